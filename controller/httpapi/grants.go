package httpapi

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

// ListGrants serves GET /v1/workspaces/{id}/secrets/grants.
func (s *server) ListGrants(ctx context.Context, r api.ListGrantsRequestObject) (api.ListGrantsResponseObject, error) {
	list, w, err := s.control.Grants(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	return api.ListGrants200JSONResponse{Items: convert(list, func(g controller.HeldGrant) api.Grant { return grantOf(g, w) })}, nil
}

// GetGrant serves GET /v1/workspaces/{id}/secrets/grants/{grant_id}.
func (s *server) GetGrant(ctx context.Context, r api.GetGrantRequestObject) (api.GetGrantResponseObject, error) {
	g, w, err := s.control.Grant(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), r.GrantID)
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
	req := controller.GrantRequest{
		Provider: b.Provider, Mode: grant.Mode(b.Mode), VaultRef: b.VaultRef, Secret: grant.NewSecret(b.Secret), Hosts: b.AllowedHosts, Header: b.Header,
		Methods: b.Methods, Paths: b.Paths, Env: b.Env, BaseEnv: b.BaseURLEnv, BasePath: b.BaseURLPath, TTL: seconds(b.TTLSeconds),
		MaxBytes: b.MaxBytes, PerMinute: b.RequestsPerMinute,
	}
	g, w, err := s.control.PutGrant(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), r.GrantID, req)
	if err != nil {
		return nil, err
	}
	return api.PutGrant200JSONResponse(grantOf(g, w)), nil
}

// DeleteGrant serves DELETE /v1/workspaces/{id}/secrets/grants/{grant_id}.
func (s *server) DeleteGrant(ctx context.Context, r api.DeleteGrantRequestObject) (api.DeleteGrantResponseObject, error) {
	if err := s.control.RevokeGrant(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), r.GrantID); err != nil {
		return nil, err
	}
	return api.DeleteGrant204Response{}, nil
}

func grantOf(g controller.HeldGrant, w controller.Workspace) api.Grant {
	now := time.Now()
	return api.Grant{
		ID: g.Name, WorkspaceID: string(g.Workspace), OwnerID: string(g.Owner), Provider: g.Provider, Mode: api.GrantMode(g.Mode), VaultRef: g.VaultRef,
		AllowedHosts: g.Hosts, Header: g.Header, Methods: g.Methods, Paths: g.Paths, Placeholder: g.Placeholder,
		Env: controller.GrantEnv([]controller.HeldGrant{g}, w.Sandbox.EgressURL, now), MaxBytes: g.MaxBytes, RequestsPerMinute: g.PerMinute,
		Version: g.Version, Expired: g.Expired(now), Pending: w.RulesPending(), ExpiresAt: g.ExpiresAt, CreatedAt: g.CreatedAt, UpdatedAt: g.UpdatedAt,
	}
}
