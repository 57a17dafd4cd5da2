// Package find finds the workspace or checkpoint that a person means by a name, an id or the end of an id.
package find

import (
	"context"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/cli"
	"github.com/coppice-dev/coppice/internal/cli/argument"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// People name a workspace or a checkpoint by its id, the end of its id, or its name.

// Workspace finds the workspace that a person means.
func Workspace(ctx context.Context, c *coppice.Client, ref string) (coppice.Workspace, error) {
	if _, err := core.ParseID[core.WorkspaceID](ref); err == nil {
		return c.Workspace(ctx, ref)
	}
	filters := []coppice.WorkspaceFilter{}
	if core.ValidateName("name", ref) == nil {
		filters = append(filters, coppice.WorkspaceFilter{Name: ref})
	}
	if suffix, ok := idSuffix(ref, "ws_"); ok {
		filters = append(filters, coppice.WorkspaceFilter{IDSuffix: suffix})
	}
	for _, f := range filters {
		found, err := coppice.Collect(c.Workspaces(ctx, f))
		if err != nil {
			return coppice.Workspace{}, err
		}
		if live := alive(found); len(live) > 0 {
			found = live
		}
		switch {
		case len(found) == 1 || len(found) > 1 && f.Name != "": // of the ended ones of one name, the newest
			return found[0], nil
		case len(found) > 1:
			return coppice.Workspace{}, core.Errorf(core.Invalid, core.CodeInvalidID, "%q names %d workspaces; give more of the id: coppice ws ls", core.Clip(ref), len(found))
		}
	}
	return coppice.Workspace{}, core.Errorf(core.NotFound, core.CodeWorkspaceNotFound, "there is no workspace %q; list the workspaces with coppice ws ls", core.Clip(ref))
}

// Workspaces finds all the workspaces that a person means, or none.
func Workspaces(ctx context.Context, c *coppice.Client, refs []string) ([]coppice.Workspace, error) {
	return argument.All(refs, func(ref string) (coppice.Workspace, error) { return Workspace(ctx, c, ref) }, func(ws coppice.Workspace) string { return ws.ID })
}

// Checkpoints finds all the checkpoints that a person means, or none.
func Checkpoints(ctx context.Context, c *coppice.Client, refs []string) ([]coppice.Checkpoint, error) {
	return argument.All(refs, func(ref string) (coppice.Checkpoint, error) { return Checkpoint(ctx, c, ref) }, func(cp coppice.Checkpoint) string { return cp.ID })
}

func alive(list []coppice.Workspace) []coppice.Workspace {
	var out []coppice.Workspace
	for _, ws := range list {
		if !core.WorkspaceState(ws.State).Final() {
			out = append(out, ws)
		}
	}
	return out
}

// Checkpoint finds the checkpoint that a person means.
func Checkpoint(ctx context.Context, c *coppice.Client, ref string) (coppice.Checkpoint, error) {
	if _, err := core.ParseID[core.CheckpointID](ref); err == nil {
		return c.Checkpoint(ctx, ref)
	}
	filters := []coppice.CheckpointFilter{}
	if core.ValidateName("name", ref) == nil {
		filters = append(filters, coppice.CheckpointFilter{Name: ref})
	}
	if suffix, ok := idSuffix(ref, "ckpt_"); ok {
		filters = append(filters, coppice.CheckpointFilter{IDSuffix: suffix})
	}
	for _, f := range filters {
		found, err := coppice.Collect(c.Checkpoints(ctx, f))
		if err != nil {
			return coppice.Checkpoint{}, err
		}
		switch {
		case len(found) == 1:
			return found[0], nil
		case len(found) > 1:
			return coppice.Checkpoint{}, core.Errorf(core.Invalid, core.CodeInvalidID, "%q names %d checkpoints; give more of the id: coppice ckpt ls", core.Clip(ref), len(found))
		}
	}
	return coppice.Checkpoint{}, core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "there is no checkpoint %q; list the checkpoints with coppice ckpt ls or coppice ckpt tree", core.Clip(ref))
}

// ClientAndCheckpoint makes a client of the server, and finds the checkpoint that a person means there.
func ClientAndCheckpoint(ctx context.Context, a *cli.App, ref string) (*coppice.Client, coppice.Checkpoint, error) {
	client, err := a.Client()
	if err != nil {
		return nil, coppice.Checkpoint{}, err
	}
	cp, err := Checkpoint(ctx, client, ref)
	return client, cp, err
}

// idSuffix says whether ref may be the end of an id, with or without the prefix and dots that tables show.
func idSuffix(ref, prefix string) (string, bool) {
	s := strings.TrimPrefix(ref, prefix)
	if len(s) < 4 || len(s) > 26 || strings.Trim(s, "0123456789abcdefghjkmnpqrstvwxyz") != "" {
		return "", false
	}
	return s, true
}

// Node finds what a person wants to fork: exactly one of the two is set.
func Node(ctx context.Context, c *coppice.Client, ref string) (*coppice.Workspace, *coppice.Checkpoint, error) {
	if strings.HasPrefix(ref, "ws_") {
		ws, err := Workspace(ctx, c, ref)
		return &ws, nil, err
	}
	if strings.HasPrefix(ref, "ckpt_") {
		cp, err := Checkpoint(ctx, c, ref)
		return nil, &cp, err
	}
	ws, errWS := Workspace(ctx, c, ref)
	if errWS != nil && core.CodeOf(errWS) != core.CodeWorkspaceNotFound {
		return nil, nil, errWS
	}
	cp, errCP := Checkpoint(ctx, c, ref)
	if errCP != nil && core.CodeOf(errCP) != core.CodeCheckpointNotFound {
		return nil, nil, errCP
	}
	switch {
	case errWS == nil && errCP == nil:
		return nil, nil, core.Errorf(core.Invalid, core.CodeInvalidID, "%q is the name of a workspace (%s) and of a checkpoint (%s); give the id of the one you mean", core.Clip(ref), ws.ID, cp.ID)
	case errWS == nil:
		return &ws, nil, nil
	case errCP == nil:
		return nil, &cp, nil
	}
	return nil, nil, core.Errorf(core.NotFound, core.CodeWorkspaceNotFound, "there is no workspace and no checkpoint %q; list them with coppice ws ls and coppice ckpt ls", core.Clip(ref))
}
