package main

import (
	"context"
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api"
)

const (
	fakeSecret = "cpk_00000000000000000000000003_secret"
	allScopes  = "workspace:read key:write"
)

func fakeProject(n int, name string) api.Project {
	return api.Project{
		ID: fakeID("prj", n), Name: name, Version: 4, CreatedAt: dawn, Encryption: api.EncryptionEnvelope, KeyVersion: 3,
		Quotas: api.Quotas{Workspaces: 10, ForksInFlight: 20, Checkpoints: 30, CheckpointBytes: 40 << 30, Depth: 50, Children: 60, Keys: 70},
	}
}

func fakeKey(n int, name string) api.APIKey {
	return api.APIKey{
		ID: fakeID("key", n), ProjectID: fakeID("prj", 1), Name: name, Prefix: "cpk_" + strings.Repeat("0", 25) + "3",
		Scopes: []api.KeyScope{api.ScopeWorkspaceRead, api.ScopeKeyWrite}, CreatedAt: dawn,
	}
}

func (f *fake) GetSelf(context.Context, api.GetSelfRequestObject) (api.GetSelfResponseObject, error) {
	return api.GetSelf200JSONResponse(fakeKey(1, "mine")), nil
}

func (f *fake) CreateProject(_ context.Context, r api.CreateProjectRequestObject) (api.CreateProjectResponseObject, error) {
	f.note(*r.Body)
	return api.CreateProject201JSONResponse(fakeProject(3, r.Body.Name)), nil
}

func (f *fake) ListProjects(context.Context, api.ListProjectsRequestObject) (api.ListProjectsResponseObject, error) {
	return api.ListProjects200JSONResponse{Items: []api.Project{fakeProject(2, "blue"), fakeProject(1, "default")}}, nil
}

func (f *fake) GetProject(_ context.Context, r api.GetProjectRequestObject) (api.GetProjectResponseObject, error) {
	p := fakeProject(1, "default")
	if r.ProjectID == fakeID("prj", 2) {
		p = fakeProject(2, "blue")
	}
	p.Usage = &api.QuotaUsage{Workspaces: 1, ForksInFlight: 2, Checkpoints: 3, CheckpointBytes: 4 << 30, Keys: 5}
	return api.GetProject200JSONResponse(p), nil
}

func (f *fake) PatchProject(_ context.Context, r api.PatchProjectRequestObject) (api.PatchProjectResponseObject, error) {
	f.note(*r.Body)
	return api.PatchProject200JSONResponse(fakeProject(2, "blue")), nil
}

func (f *fake) DeleteProject(_ context.Context, r api.DeleteProjectRequestObject) (api.DeleteProjectResponseObject, error) {
	f.note("delete " + r.ProjectID)
	return api.DeleteProject204Response{}, nil
}

func (f *fake) CreateKey(_ context.Context, r api.CreateKeyRequestObject) (api.CreateKeyResponseObject, error) {
	f.note(r.ProjectID)
	f.note(*r.Body)
	k := fakeKey(3, r.Body.Name)
	k.ExpiresAt = time.Date(2030, 1, 1, 0, 0, 0, 0, time.UTC)
	return api.CreateKey201JSONResponse{Key: k, Secret: fakeSecret}, nil
}

func (f *fake) ListKeys(context.Context, api.ListKeysRequestObject) (api.ListKeysResponseObject, error) {
	gone, late := fakeKey(4, "gone"), fakeKey(5, "late")
	gone.RevokedAt, late.ExpiresAt = dawn, dawn
	return api.ListKeys200JSONResponse{Items: []api.APIKey{late, gone, fakeKey(2, "ci"), fakeKey(1, "mine")}}, nil
}

func (f *fake) GetKey(_ context.Context, r api.GetKeyRequestObject) (api.GetKeyResponseObject, error) {
	return api.GetKeydefaultApplicationProblemPlusJSONResponse{StatusCode: 404, Body: refusal(404, "KEY_NOT_FOUND")}, nil
}

func (f *fake) RevokeKey(_ context.Context, r api.RevokeKeyRequestObject) (api.RevokeKeyResponseObject, error) {
	f.note("revoke " + r.KeyID)
	return api.RevokeKey204Response{}, nil
}

func (f *fake) ListAudit(_ context.Context, r api.ListAuditRequestObject) (api.ListAuditResponseObject, error) {
	f.note("audit of " + r.Params.ProjectID)
	return api.ListAudit200JSONResponse{Items: []api.AuditRecord{{
		ID: "1", CreatedAt: dawn, Actor: fakeID("key", 1), Source: "192.0.2.7", Action: "forkCheckpoint", ObjectID: fakeID("ws", 1), After: "ready", Outcome: api.AuditSucceeded,
	}}}, nil
}

func (f *fake) CheckAudit(_ context.Context, r api.CheckAuditRequestObject) (api.CheckAuditResponseObject, error) {
	f.note("check of " + r.Params.ProjectID)
	return api.CheckAudit200JSONResponse{Intact: r.Params.ProjectID == "", BrokenSeal: 7, Records: 3, Seals: 8, Head: "abcd"}, nil
}

// TestTenantCommands runs the commands for projects, keys and their audit log: what they print, and what they send.
func TestTenantCommands(t *testing.T) {
	t.Parallel()
	f, run := newFake(t)
	for _, c := range []struct {
		line   string
		status int
		out    []string // parts of standard output, or of standard error when it fails
		sent   string   // as JSON
	}{
		{"project create blue --quota workspaces=7 --quota depth=0", 0, []string{"blue is created: " + fakeID("prj", 3), "coppice key create"}, `[{"name":"blue","quotas":{"depth":0,"workspaces":7}}]`},
		{"project create blue -q", 0, []string{fakeID("prj", 3)}, `[{"name":"blue"}]`},
		{"project create blue --quota nosuch=1", 2, []string{`there is no quota "nosuch"; the quotas are checkpoint_bytes, checkpoints, children, depth, forks_in_flight, keys, ports, workspaces`}, ""},
		{"project create blue --quota depth=many", 2, []string{"not a number"}, ""},
		{"project ls", 0, []string{"NAME", "blue     " + fakeID("prj", 2), "default"}, ""},
		{"project show", 0, []string{"default", "workspaces        1 of 10", "checkpoint bytes  4.0 GiB of 40.0 GiB", "keys              5 of 70"}, ""},
		{"project show blue", 0, []string{fakeID("prj", 2)}, ""},
		{"project show green", 66, []string{`there is no project "green"`}, ""},
		{"project quota blue keys=3 --version 4", 0, []string{"version"}, `[{"quotas":{"keys":3},"version":4}]`},
		{"project rm blue " + fakeID("prj", 1), 0, []string{fakeID("prj", 2) + " is deleted", fakeID("prj", 1) + " is deleted"}, `["delete ` + fakeID("prj", 2) + `","delete ` + fakeID("prj", 1) + `"]`},
		{"key create ci --scope workspace:read,key:write --ttl 24h", 0, []string{fakeSecret + "\n", "is not shown again"}, `["` + fakeID("prj", 1) + `",{"name":"ci","scopes":["workspace:read","key:write"],"ttl_seconds":86400}]`},
		{"key create ci -q --project blue", 0, []string{fakeSecret}, `["` + fakeID("prj", 2) + `",{"name":"ci"}]`},
		{"key create ci --ttl 1ms", 2, []string{"whole number of seconds"}, ""},
		{"key ls", 0, []string{"ci", "mine", allScopes}, ""},
		{"key ls --all", 0, []string{"gone  revoked", "late  expired"}, ""},
		{"key show", 0, []string{"mine", "valid"}, ""},
		{"key show ci", 0, []string{fakeID("key", 2)}, ""},
		{"key show gone", 66, []string{`there is no valid key "gone"`}, ""},
		{"key show " + fakeID("key", 9), 66, []string{"KEY_NOT_FOUND"}, ""},
		{"key revoke ci", 0, []string{fakeID("key", 2) + " is revoked"}, `["revoke ` + fakeID("key", 2) + `"]`},
		{"audit", 0, []string{fakeID("key", 1), "192.0.2.7", "forkCheckpoint", "- > ready", "succeeded"}, `["audit of "]`},
		{"audit --project blue", 0, []string{"forkCheckpoint"}, `["audit of ` + fakeID("prj", 2) + `"]`},
		{"audit --project system --json", 0, []string{`"forkCheckpoint"`}, `["audit of ` + fakeID("prj", 0) + `"]`},
		{"audit --project green", 66, []string{`there is no project "green"`}, ""},
		{"audit check", 0, []string{"Intact", "abcd"}, `["check of "]`},
		{"audit check --project system", 1, []string{"the audit log was tampered with: seal 7"}, `["check of ` + fakeID("prj", 0) + `"]`},
		{"--json key revoke ci", 0, []string{`"` + fakeID("key", 2) + `"`}, `["revoke ` + fakeID("key", 2) + `"]`},
		{"--json key create ci", 0, []string{`"secret": "` + fakeSecret + `"`}, `["` + fakeID("prj", 1) + `",{"name":"ci"}]`},
	} {
		f.requests = nil
		status, stdout, stderr := run(strings.Fields(c.line)...)
		text := stdout
		if c.status != 0 {
			text = stderr
		}
		if status != c.status {
			t.Errorf("%s: status %d, %s%s", c.line, status, stdout, stderr)
		}
		for _, part := range c.out {
			if !strings.Contains(text, part) {
				t.Errorf("%s: no %q in\n%s", c.line, part, text)
			}
		}
		sent, err := json.Marshal(f.requests)
		if err != nil {
			t.Fatal(err)
		}
		if want := c.sent; want != "" && string(sent) != want {
			t.Errorf("%s sent %s, want %s", c.line, sent, want)
		} else if want == "" && f.requests != nil {
			t.Errorf("%s sent %s", c.line, sent)
		}
	}
	if _, stdout, _ := run("key", "ls"); strings.Contains(stdout, "gone") || strings.Contains(stdout, "late") {
		t.Errorf("ended keys are listed:\n%s", stdout)
	}
}
