package httpapi

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// grantKeeper is the part of package grants that the public API serves.
type grantKeeper interface {
	List(ctx context.Context, project core.ProjectID, id core.WorkspaceID) ([]grants.Held, grants.Workspace, error)
	Get(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string) (grants.Held, grants.Workspace, error)
	Put(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string, r grants.Request) (grants.Held, grants.Workspace, error)
	Revoke(ctx context.Context, project core.ProjectID, id core.WorkspaceID, name string) error
}

// ListGrants serves GET /v1/workspaces/{id}/secrets/grants.
func (s *server) ListGrants(ctx context.Context, r api.ListGrantsRequestObject) (api.ListGrantsResponseObject, error) {
	list, w, err := s.grants.List(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	return api.ListGrants200JSONResponse{Items: convert(list, func(g grants.Held) api.Grant { return grantOf(g, w) })}, nil
}

// GetGrant serves GET /v1/workspaces/{id}/secrets/grants/{grant_id}.
func (s *server) GetGrant(ctx context.Context, r api.GetGrantRequestObject) (api.GetGrantResponseObject, error) {
	g, w, err := s.grants.Get(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), r.GrantID)
	if err != nil {
		return nil, err
	}
	return api.GetGrant200JSONResponse(grantOf(g, w)), nil
}

// PutGrant serves PUT /v1/workspaces/{id}/secrets/grants/{grant_id}.
func (s *server) PutGrant(ctx context.Context, r api.PutGrantRequestObject) (api.PutGrantResponseObject, error) {
	b := r.Body
	if b.VaultRef != "" && core.MissingScope(controller.KeyOf(ctx).Scopes, core.ScopeSecretReference) != "" {
		return nil, core.Errorf(core.PermissionDenied, core.CodePermissionDenied,
			"vault_ref: this key (%s) lacks the scope %s; give secret instead, or use a key that was made with this scope",
			controller.KeyOf(ctx).Name, core.ScopeSecretReference)
	}
	req := grants.Request{
		Provider: b.Provider, Mode: grant.Mode(b.Mode), VaultRef: b.VaultRef, Secret: grant.NewSecret(b.Secret), Hosts: b.AllowedHosts, Header: b.Header,
		Methods: b.Methods, Paths: b.Paths, Env: b.Env, BaseEnv: b.BaseURLEnv, BasePath: b.BaseURLPath, TTL: seconds(b.TTLSeconds),
		MaxBytes: b.MaxBytes, PerMinute: b.RequestsPerMinute,
	}
	g, w, err := s.grants.Put(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), r.GrantID, req)
	if err != nil {
		return nil, err
	}
	return api.PutGrant200JSONResponse(grantOf(g, w)), nil
}

// DeleteGrant serves DELETE /v1/workspaces/{id}/secrets/grants/{grant_id}.
func (s *server) DeleteGrant(ctx context.Context, r api.DeleteGrantRequestObject) (api.DeleteGrantResponseObject, error) {
	if err := s.grants.Revoke(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), r.GrantID); err != nil {
		return nil, err
	}
	return api.DeleteGrant204Response{}, nil
}

func grantOf(g grants.Held, w grants.Workspace) api.Grant {
	now := time.Now()
	return api.Grant{
		ID: g.Name, WorkspaceID: string(g.Workspace), OwnerID: string(g.Owner), Provider: g.Provider, Mode: api.GrantMode(g.Mode), VaultRef: g.VaultRef,
		AllowedHosts: g.Hosts, Header: g.Header, Methods: g.Methods, Paths: g.Paths, Placeholder: g.Placeholder,
		Env: grants.EnvOf([]grants.Held{g}, w.Sandbox.EgressURL, now), MaxBytes: g.MaxBytes, RequestsPerMinute: g.PerMinute,
		Version: g.Version, Expired: g.Expired(now), Pending: w.Pending(), ExpiresAt: g.ExpiresAt, CreatedAt: g.CreatedAt, UpdatedAt: g.UpdatedAt,
	}
}
