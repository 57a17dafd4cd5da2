package httpapi

import (
	"context"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func quotasOf(q controller.Quotas) api.Quotas {
	return api.Quotas{
		Workspaces: q.Workspaces, ForksInFlight: q.ForksInFlight, Checkpoints: q.Checkpoints, CheckpointBytes: q.CheckpointBytes, Depth: q.Depth,
		Children: q.Children, Keys: q.Keys, Ports: q.Ports,
	}
}

func quotasIn(version int64, q api.QuotasPatch) controller.QuotasPatch {
	return controller.QuotasPatch{
		Version: version, Workspaces: q.Workspaces, ForksInFlight: q.ForksInFlight, Checkpoints: q.Checkpoints, CheckpointBytes: q.CheckpointBytes,
		Depth: q.Depth, Children: q.Children, Keys: q.Keys, Ports: q.Ports,
	}
}

func tenantOf(p controller.Project) api.Project {
	return api.Project{
		ID: string(p.ID), Name: p.Name, Version: p.Quotas.Version, Quotas: quotasOf(p.Quotas), CreatedAt: p.CreatedAt,
		AllowAllEgress: api.AllowAllEgress(p.Quotas.AllowAll),
		Encryption:     api.Encryption(p.Encryption), KeyVersion: p.KeyVersion,
	}
}

func keyOf(k controller.Key) api.APIKey {
	return api.APIKey{
		ID: string(k.ID), ProjectID: string(k.ProjectID), Name: k.Name, Prefix: k.Prefix, ParentID: string(k.Parent),
		Scopes:    convert(k.Scopes, func(s core.KeyScope) api.KeyScope { return api.KeyScope(s) }),
		CreatedAt: k.CreatedAt, LastUsedAt: k.LastUsedAt, ExpiresAt: k.ExpiresAt, RevokedAt: k.RevokedAt,
	}
}

// GetSelf serves GET /v1/self.
func (s *server) GetSelf(ctx context.Context, _ api.GetSelfRequestObject) (api.GetSelfResponseObject, error) {
	return api.GetSelf200JSONResponse(keyOf(controller.KeyOf(ctx))), nil
}

// CreateProject serves POST /v1/projects.
func (s *server) CreateProject(ctx context.Context, r api.CreateProjectRequestObject) (api.CreateProjectResponseObject, error) {
	p, err := s.control.Tenancy.CreateProject(ctx, controller.KeyOf(ctx), r.Body.Name, quotasIn(0, r.Body.Quotas),
		controller.EncryptionPatch{Mode: controller.Encryption(r.Body.Encryption)})
	if err != nil {
		return nil, err
	}
	return api.CreateProject201JSONResponse(tenantOf(p)), nil
}

// ListProjects serves GET /v1/projects.
func (s *server) ListProjects(ctx context.Context, r api.ListProjectsRequestObject) (api.ListProjectsResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Tenancy.Projects(ctx, controller.KeyOf(ctx), p)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(v controller.Project) string { return string(v.ID) })
	return api.ListProjects200JSONResponse{Items: convert(list, tenantOf), NextCursor: next}, nil
}

// GetProject serves GET /v1/projects/{id}.
func (s *server) GetProject(ctx context.Context, r api.GetProjectRequestObject) (api.GetProjectResponseObject, error) {
	p, usage, err := s.control.Tenancy.Project(ctx, controller.KeyOf(ctx), core.ProjectID(r.ProjectID))
	if err != nil {
		return nil, err
	}
	out := tenantOf(p)
	out.Usage = &api.QuotaUsage{
		Workspaces: usage.Workspaces, ForksInFlight: usage.ForksInFlight, Checkpoints: usage.Checkpoints, CheckpointBytes: usage.CheckpointBytes, Keys: usage.Keys,
	}
	return api.GetProject200JSONResponse(out), nil
}

// PatchProject serves PATCH /v1/projects/{id}.
func (s *server) PatchProject(ctx context.Context, r api.PatchProjectRequestObject) (api.PatchProjectResponseObject, error) {
	q := quotasIn(r.Body.Version, r.Body.Quotas)
	if to := controller.AllowAll(r.Body.AllowAllEgress); to != "" {
		q.AllowAll = &to
	}
	p, err := s.control.Tenancy.PatchProject(ctx, controller.KeyOf(ctx), core.ProjectID(r.ProjectID), q,
		controller.EncryptionPatch{Mode: controller.Encryption(r.Body.Encryption), KeyVersion: r.Body.KeyVersion})
	if err != nil {
		return nil, err
	}
	return api.PatchProject200JSONResponse(tenantOf(p)), nil
}

// DeleteProject serves DELETE /v1/projects/{id}.
func (s *server) DeleteProject(ctx context.Context, r api.DeleteProjectRequestObject) (api.DeleteProjectResponseObject, error) {
	return api.DeleteProject204Response{}, s.control.Tenancy.DeleteProject(ctx, controller.KeyOf(ctx), core.ProjectID(r.ProjectID))
}

// CreateKey serves POST /v1/projects/{id}/keys.
func (s *server) CreateKey(ctx context.Context, r api.CreateKeyRequestObject) (api.CreateKeyResponseObject, error) {
	scopes := convert(r.Body.Scopes, func(v api.KeyScope) core.KeyScope { return core.KeyScope(v) })
	key, secret, err := s.control.Tenancy.CreateKey(ctx, controller.KeyOf(ctx), core.ProjectID(r.ProjectID), r.Body.Name, scopes, seconds(r.Body.TTLSeconds))
	if err != nil {
		return nil, err
	}
	return api.CreateKey201JSONResponse{Key: keyOf(key), Secret: secret}, nil
}

// ListKeys serves GET /v1/projects/{id}/keys.
func (s *server) ListKeys(ctx context.Context, r api.ListKeysRequestObject) (api.ListKeysResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Tenancy.Keys(ctx, controller.KeyOf(ctx), core.ProjectID(r.ProjectID), p)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(v controller.Key) string { return string(v.ID) })
	return api.ListKeys200JSONResponse{Items: convert(list, keyOf), NextCursor: next}, nil
}

// GetKey serves GET /v1/keys/{id}.
func (s *server) GetKey(ctx context.Context, r api.GetKeyRequestObject) (api.GetKeyResponseObject, error) {
	key, err := s.control.Tenancy.Key(ctx, controller.KeyOf(ctx), core.KeyID(r.KeyID))
	if err != nil {
		return nil, err
	}
	return api.GetKey200JSONResponse(keyOf(key)), nil
}

// RevokeKey serves DELETE /v1/keys/{id}.
func (s *server) RevokeKey(ctx context.Context, r api.RevokeKeyRequestObject) (api.RevokeKeyResponseObject, error) {
	return api.RevokeKey204Response{}, s.control.Tenancy.RevokeKey(ctx, controller.KeyOf(ctx), core.KeyID(r.KeyID))
}
