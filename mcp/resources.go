package mcp

import (
	"context"
	"encoding/json"
	"errors"
	"strings"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The resources. A host shows them to its user, who puts them into a conversation.
const (
	workspacesURI  = "coppice://workspaces"
	treesURI       = "coppice://trees"
	workspaceURI   = "coppice://workspaces/"
	checkpointURI  = "coppice://checkpoints/"
	treeURI        = "coppice://trees/"
	resourceNodes  = 1000 // of a tree
	resourceListed = 200  // workspaces
)

func (r *registry) addResources() {
	r.server.AddResource(&sdk.Resource{URI: workspacesURI, Name: "workspaces", Title: "Workspaces", Description: "The newest 200 workspaces of the project.", MIMEType: "application/json"}, r.readResource)
	r.server.AddResource(&sdk.Resource{URI: treesURI, Name: "trees", Title: "Trees", Description: "Every tree of checkpoints of the project, drawn.", MIMEType: "text/plain"}, r.readResource)
	for _, t := range []sdk.ResourceTemplate{
		{URITemplate: workspaceURI + "{id}", Name: "workspace", Title: "Workspace", Description: "A workspace, by its id or name.", MIMEType: "application/json"},
		{URITemplate: checkpointURI + "{id}", Name: "checkpoint", Title: "Checkpoint", Description: "A checkpoint, by its id or name.", MIMEType: "application/json"},
		{URITemplate: treeURI + "{id}", Name: "tree", Title: "Tree", Description: "The tree below a checkpoint, or the whole tree of a workspace, drawn.", MIMEType: "text/plain"},
	} {
		r.server.AddResourceTemplate(&t, r.readResource)
	}
}

func (r *registry) readResource(ctx context.Context, req *sdk.ReadResourceRequest) (*sdk.ReadResourceResult, error) {
	uri := req.Params.URI
	kind, text, err := r.resource(ctx, uri)
	if err != nil {
		f := explain(err)
		if missing(f) {
			return nil, sdk.ResourceNotFoundError(uri)
		}
		return nil, errors.New(f.code + ": " + visible(clip(f.detail, maxDetail)) + " " + f.hint)
	}
	return &sdk.ReadResourceResult{Contents: []*sdk.ResourceContents{{URI: uri, MIMEType: kind, Text: text}}}, nil
}

// resource returns the type and the text of a resource.
func (r *registry) resource(ctx context.Context, uri string) (kind, text string, err error) {
	if uri == treesURI || strings.HasPrefix(uri, treeURI) {
		_, text, err = r.tree(ctx, treeIn{Of: strings.TrimPrefix(strings.TrimPrefix(uri, treesURI), "/"), MaxNodes: resourceNodes})
		return "text/plain", text, err
	}
	var v any
	switch id := ""; {
	case uri == workspacesURI:
		v, _, err = r.listWorkspaces(ctx, workspaceListIn{Limit: resourceListed})
	case cut(uri, workspaceURI, &id):
		var ws coppice.Workspace
		ws, err = r.workspace(ctx, id)
		v = viewWorkspace(ws)
	case cut(uri, checkpointURI, &id):
		var cp coppice.Checkpoint
		if id, err = r.checkpointID(ctx, id); err == nil {
			cp, err = r.client.Checkpoint(ctx, id)
		}
		v = viewCheckpoint(cp)
	default:
		err = &fault{code: string(coppice.CodeWorkspaceNotFound), detail: "there is no such resource"}
	}
	if err != nil {
		return "", "", err
	}
	b, err := json.MarshalIndent(v, "", "  ")
	return "application/json", string(b), err
}

func cut(s, prefix string, rest *string) (ok bool) {
	*rest, ok = strings.CutPrefix(s, prefix)
	return ok
}
