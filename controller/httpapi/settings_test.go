package httpapi_test

import (
	"encoding/json"
	"net/http"
	"slices"
	"testing"

	"github.com/coppice-dev/coppice/api"
)

// TestRenameWorkspace: a name is free as soon as its workspace has another one, and an ended workspace keeps its name.
func TestRenameWorkspace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first, second := w.create("first"), w.create("second")
	at := "/v1/workspaces/" + first.ID
	if got := w.do(call{method: "PATCH", path: at, body: `{"name":"second"}`}); got.status != 409 || got.problem(t).Code != "NAME_TAKEN" {
		t.Errorf("taken: %d %s", got.status, got.body)
	}
	if got := w.do(call{method: "PATCH", path: at, body: `{"name":"Not A Name"}`}); got.status != 400 || got.problem(t).Code != "INVALID_NAME" {
		t.Errorf("no name: %d %s", got.status, got.body)
	}
	var now api.Workspace
	w.want(200, "PATCH", at, map[string]any{"name": "third", "labels": map[string]any{"k": "v"}}, &now)
	if now.Name != "third" || now.Labels["k"] != "v" || now.Network.Hostname != first.Network.Hostname || now.Version != first.Version+1 {
		t.Errorf("renamed: %+v", now)
	}
	w.want(200, "PATCH", "/v1/workspaces/"+second.ID, map[string]any{"name": "first"}, nil)
	var list api.WorkspaceList
	w.want(200, "GET", "/v1/workspaces?name=first", nil, &list)
	if len(list.Items) != 1 || list.Items[0].ID != second.ID {
		t.Errorf("first is %+v", list.Items)
	}
	var log api.AuditRecordList
	w.want(200, "GET", "/v1/audit?object_id="+first.ID+"&action=patchWorkspace", nil, &log)
	var detail struct {
		Name   string `json:"name"`
		Before string `json:"name_before"`
	}
	if len(log.Items) != 1 || json.Unmarshal(log.Items[0].Detail, &detail) != nil || detail.Name != "third" || detail.Before != "first" {
		t.Errorf("audit: %+v", log.Items)
	}
	w.want(200, "DELETE", at, nil, nil)
	if got := w.do(call{method: "PATCH", path: at, body: `{"name":"fourth"}`}); got.status != 409 || got.problem(t).Code != "WORKSPACE_NOT_READY" {
		t.Errorf("an ended one: %d %s", got.status, got.body)
	}
}

// TestPatchRules changes single entries of what a workspace may reach.
func TestPatchRules(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	at := "/v1/workspaces/" + w.create("main").ID
	for _, x := range []struct {
		network map[string]any
		want    []string
	}{
		{map[string]any{"add": []string{"B.example.com", "a.example.com"}}, []string{"a.example.com", "b.example.com"}},
		{map[string]any{"add": []string{"a.example.com", "bundle:python"}}, []string{"a.example.com", "b.example.com", "bundle:python"}},
		{map[string]any{"remove": []string{"A.example.com"}, "add": []string{"c.example.com:8443"}}, []string{"b.example.com", "bundle:python", "c.example.com:8443"}},
		{map[string]any{"remove": []string{"bundle:python"}}, []string{"b.example.com", "c.example.com:8443"}},
		{map[string]any{"allow": []string{}}, nil},
	} {
		var ws api.Workspace
		w.want(200, "PATCH", at, map[string]any{"network": x.network}, &ws)
		if !slices.Equal(ws.Network.Allow, x.want) {
			t.Errorf("%v: %v, want %v", x.network, ws.Network.Allow, x.want)
		}
	}
	for _, body := range []string{
		`{"network":{"remove":["a.example.com"]}}`, `{"network":{"add":["not a host"]}}`, `{"network":{"allow":["a.example.com"],"add":["b.example.com"]}}`, `{"network":{}}`,
	} {
		if got := w.do(call{method: http.MethodPatch, path: at, body: body}); got.status != 400 || got.problem(t).Code != "INVALID_FIELD" {
			t.Errorf("%s: %d %s", body, got.status, got.body)
		}
	}
}
