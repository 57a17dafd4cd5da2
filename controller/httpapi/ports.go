package httpapi

import (
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// ListPorts serves GET /v1/workspaces/{id}/ports.
func (s *server) ListPorts(ctx context.Context, r api.ListPortsRequestObject) (api.ListPortsResponseObject, error) {
	list, err := s.control.Ports().List(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	items, err := s.portsOf(ctx, list)
	if err != nil {
		return nil, err
	}
	return api.ListPorts200JSONResponse{Items: items}, nil
}

// CreatePort serves POST /v1/workspaces/{id}/ports.
func (s *server) CreatePort(ctx context.Context, r api.CreatePortRequestObject) (api.CreatePortResponseObject, error) {
	p, err := s.createPort(ctx, core.WorkspaceID(r.WorkspaceID), *r.Body)
	if err != nil {
		return nil, err
	}
	items, err := s.portsOf(ctx, []controller.Port{p})
	if err != nil {
		return nil, err
	}
	return api.CreatePort201JSONResponse(items[0]), nil
}

func (s *server) createPort(ctx context.Context, id core.WorkspaceID, b api.CreatePortRequest) (controller.Port, error) {
	ttl := time.Duration(b.TTLSeconds) * time.Second
	switch {
	case b.Visibility == "" && ttl != 0:
		return controller.Port{}, invalid("ttl_seconds", "it is for a preview: give visibility as well")
	case b.Visibility != "" && b.Listen != "":
		return controller.Port{}, invalid("listen", "a preview has no address; leave it out, or leave visibility out to forward a port")
	case b.Visibility == api.VisibilitySigned || b.Visibility == api.VisibilityPublic:
		if core.MissingScope(request.KeyOf(ctx).Scopes, core.ScopeWorkspaceExec) != "" {
			return controller.Port{}, core.Errorf(core.PermissionDenied, core.CodePermissionDenied,
				"a %s preview lets others into the workspace, so the key needs %s as well", b.Visibility, core.ScopeWorkspaceExec)
		}
	}
	if b.Visibility != "" {
		return s.control.Previews().Open(ctx, projectOf(ctx), id, previews.Want{GuestPort: b.GuestPort, Visibility: model.Visibility(b.Visibility), TTL: ttl})
	}
	listen, err := listenIn(b.Listen)
	if err != nil {
		return controller.Port{}, err
	}
	return s.control.Ports().Open(ctx, projectOf(ctx), id, b.GuestPort, listen)
}

// portsOf converts ports. A token lets its bearer into a guest, so a key that may only read does not get it.
func (s *server) portsOf(ctx context.Context, list []controller.Port) ([]api.Port, error) {
	mayOpen := core.MissingScope(request.KeyOf(ctx).Scopes, core.ScopeWorkspaceCreate, core.ScopeWorkspaceExec) == ""
	urls, err := s.control.Previews().URLs(ctx, projectOf(ctx), list, mayOpen)
	if err != nil {
		return nil, err
	}
	return convert(list, func(p controller.Port) api.Port {
		out := portOf(p)
		out.URL = urls[p.ID]
		return out
	}), nil
}

// forkResult is the result of a fork, with the previews of its children.
func (s *server) forkResult(ctx context.Context, a controller.Answer) (api.ForkResult, error) {
	out := forkResultOf(a)
	var ids []core.WorkspaceID
	for _, child := range out.Children {
		if child.Workspace != nil {
			ids = append(ids, core.WorkspaceID(child.Workspace.ID))
		}
	}
	list, err := s.control.Previews().Of(ctx, projectOf(ctx), ids)
	if err != nil {
		return out, err
	}
	all, err := s.portsOf(ctx, slices.Concat(slices.Collect(maps.Values(list))...))
	if err != nil {
		return out, err
	}
	slices.SortFunc(all, func(a, b api.Port) int { return strings.Compare(a.ID, b.ID) })
	for i, child := range out.Children {
		for _, p := range all {
			if child.Workspace != nil && p.WorkspaceID == child.Workspace.ID {
				out.Children[i].Previews = append(out.Children[i].Previews, p)
			}
		}
	}
	return out, nil
}
