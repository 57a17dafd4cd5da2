package clitest

import (
	"context"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api"
)

// Secret is the secret of every key that the server makes.
const Secret = "cpk_00000000000000000000000003_secret"

func project(n int, name string) api.Project {
	return api.Project{
		ID: ID("prj", n), Name: name, Version: 4, CreatedAt: Dawn, Encryption: api.EncryptionEnvelope, KeyVersion: 3,
		Quotas: api.Quotas{Workspaces: 10, ForksInFlight: 20, Checkpoints: 30, CheckpointBytes: 40 << 30, Depth: 50, Children: 60, Keys: 70},
	}
}

func key(n int, name string) api.APIKey {
	return api.APIKey{
		ID: ID("key", n), ProjectID: ID("prj", 1), Name: name, Prefix: "cpk_" + strings.Repeat("0", 25) + "3",
		Scopes: []api.KeyScope{api.ScopeWorkspaceRead, api.ScopeKeyWrite}, CreatedAt: Dawn,
	}
}

func (f *Server) GetSelf(context.Context, api.GetSelfRequestObject) (api.GetSelfResponseObject, error) {
	return api.GetSelf200JSONResponse(key(1, "mine")), nil
}

func (f *Server) CreateProject(_ context.Context, r api.CreateProjectRequestObject) (api.CreateProjectResponseObject, error) {
	f.note(*r.Body)
	return api.CreateProject201JSONResponse(project(3, r.Body.Name)), nil
}

func (f *Server) ListProjects(context.Context, api.ListProjectsRequestObject) (api.ListProjectsResponseObject, error) {
	return api.ListProjects200JSONResponse{Items: []api.Project{project(2, "blue"), project(1, "default")}}, nil
}

func (f *Server) GetProject(_ context.Context, r api.GetProjectRequestObject) (api.GetProjectResponseObject, error) {
	p := project(1, "default")
	if r.ProjectID == ID("prj", 2) {
		p = project(2, "blue")
	}
	p.Usage = &api.QuotaUsage{Workspaces: 1, ForksInFlight: 2, Checkpoints: 3, CheckpointBytes: 4 << 30, Keys: 5}
	return api.GetProject200JSONResponse(p), nil
}

func (f *Server) PatchProject(_ context.Context, r api.PatchProjectRequestObject) (api.PatchProjectResponseObject, error) {
	f.note(*r.Body)
	return api.PatchProject200JSONResponse(project(2, "blue")), nil
}

func (f *Server) DeleteProject(_ context.Context, r api.DeleteProjectRequestObject) (api.DeleteProjectResponseObject, error) {
	f.note("delete " + r.ProjectID)
	return api.DeleteProject204Response{}, nil
}

func (f *Server) CreateKey(_ context.Context, r api.CreateKeyRequestObject) (api.CreateKeyResponseObject, error) {
	f.note(r.ProjectID)
	f.note(*r.Body)
	k := key(3, r.Body.Name)
	k.ExpiresAt = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	return api.CreateKey201JSONResponse{Key: k, Secret: Secret}, nil
}

func (f *Server) ListKeys(context.Context, api.ListKeysRequestObject) (api.ListKeysResponseObject, error) {
	gone, late := key(4, "gone"), key(5, "late")
	gone.RevokedAt, late.ExpiresAt = Dawn, Dawn
	return api.ListKeys200JSONResponse{Items: []api.APIKey{late, gone, key(2, "ci"), key(1, "mine")}}, nil
}

func (f *Server) GetKey(_ context.Context, r api.GetKeyRequestObject) (api.GetKeyResponseObject, error) {
	return api.GetKeydefaultApplicationProblemPlusJSONResponse{StatusCode: 404, Body: refusal(404, "KEY_NOT_FOUND")}, nil
}

func (f *Server) RevokeKey(_ context.Context, r api.RevokeKeyRequestObject) (api.RevokeKeyResponseObject, error) {
	f.note("revoke " + r.KeyID)
	return api.RevokeKey204Response{}, nil
}

func (f *Server) ListAudit(_ context.Context, r api.ListAuditRequestObject) (api.ListAuditResponseObject, error) {
	f.note("audit of " + r.Params.ProjectID)
	return api.ListAudit200JSONResponse{Items: []api.AuditRecord{{
		ID: "1", CreatedAt: Dawn, Actor: ID("key", 1), Source: "192.0.2.7", Action: "forkCheckpoint", ObjectID: ID("ws", 1), After: "ready", Outcome: api.AuditSucceeded,
	}}}, nil
}

func (f *Server) CheckAudit(_ context.Context, r api.CheckAuditRequestObject) (api.CheckAuditResponseObject, error) {
	f.note("check of " + r.Params.ProjectID)
	return api.CheckAudit200JSONResponse{Intact: r.Params.ProjectID == "", BrokenSeal: 7, Records: 3, Seals: 8, Head: "abcd"}, nil
}
