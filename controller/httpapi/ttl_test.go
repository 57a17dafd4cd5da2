package httpapi_test

import (
	"testing"

	"github.com/coppice-dev/coppice/api"
)

// TestOnTTLNeedsTheRightToSuspend: a key that may not suspend does not get a suspension by way of the time.
func TestOnTTLNeedsTheRightToSuspend(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	plain := w.create("plain")
	key := func(name string, scopes ...string) string {
		var made api.CreatedKey
		w.want(201, "POST", "/v1/projects/"+w.project()+"/keys", map[string]any{"name": name, "scopes": scopes}, &made)
		return made.Secret
	}
	less := key("less", "workspace:read", "workspace:create")
	more := key("more", "workspace:read", "workspace:create", "checkpoint:create")
	const body = `{"ttl_seconds":3600,"on_ttl":"suspend"}`
	refused := func(what string, got reply) {
		t.Helper()
		if got.status != 403 || got.problem(t).Code != "PERMISSION_DENIED" {
			t.Errorf("%s: %d %s", what, got.status, got.body)
		}
	}
	refused("create", w.do(call{method: "POST", path: "/v1/workspaces", body: body, key: less}))
	if got := w.do(call{method: "POST", path: "/v1/workspaces", body: `{"ttl_seconds":3600,"on_ttl":"terminate"}`, key: less}); got.status != 201 {
		t.Errorf("terminated at the end: %d %s", got.status, got.body)
	}
	refused("change", w.do(call{method: "PATCH", path: "/v1/workspaces/" + plain.ID, body: `{"on_ttl":"suspend"}`, key: less}))
	refused("fork", w.do(call{method: "POST", path: "/v1/checkpoints/" + w.checkpoint(plain.ID).ID + "/fork", body: body, key: less}))
	var ws api.Workspace
	if got := w.do(call{method: "POST", path: "/v1/workspaces", body: body, key: more}); got.status != 201 {
		t.Fatalf("with the right: %d %s", got.status, got.body)
	}
	w.want(201, "POST", "/v1/workspaces", map[string]any{"ttl_seconds": 3600, "on_ttl": "suspend"}, &ws)
	if ws.OnTTL != api.TTLSuspend {
		t.Errorf("%+v", ws)
	}
	// To set its time is to say when it is suspended.
	refused("a new time", w.do(call{method: "PATCH", path: "/v1/workspaces/" + ws.ID, body: `{"ttl_seconds":1}`, key: less}))
	if got := w.do(call{method: "PATCH", path: "/v1/workspaces/" + ws.ID, body: `{"labels":{"a":"b"}}`, key: less}); got.status != 200 {
		t.Errorf("a label: %d %s", got.status, got.body)
	}
	if got := w.do(call{method: "PATCH", path: "/v1/workspaces/" + ws.ID, body: `{"ttl_seconds":60}`, key: more}); got.status != 200 {
		t.Errorf("a new time with the right: %d %s", got.status, got.body)
	}
}
