package httpapi_test

import (
	"encoding/json"
	"testing"

	"github.com/coppice-dev/coppice/api"
)

// TestRest drives suspension and idle expiry through the wire.
func TestRest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ws api.Workspace
	w.want(201, "POST", "/v1/workspaces", map[string]any{"name": "main", "idle_seconds": 3600, "auto_resume": true}, &ws)
	if ws.IdleSeconds != 3600 || ws.OnIdle != api.IdleSuspend || !ws.AutoResume {
		t.Fatalf("created: %+v", ws)
	}
	at := "/v1/workspaces/" + ws.ID
	w.want(200, "PATCH", at, map[string]any{"on_idle": "terminate", "auto_resume": false}, &ws)
	if ws.IdleSeconds != 3600 || ws.OnIdle != api.IdleTerminate || ws.AutoResume {
		t.Errorf("patched: %+v", ws)
	}
	w.want(200, "PATCH", at, map[string]any{"idle_seconds": 0}, &ws)
	if ws.IdleSeconds != 0 || ws.OnIdle != "" {
		t.Errorf("patched: %+v", ws)
	}
	for _, body := range []map[string]any{{"on_idle": "suspend"}, {"on_idle": "explode"}, {"idle_seconds": -1}} {
		if p := w.want(400, "PATCH", at, body, nil).problem(t); p.Code != "INVALID_FIELD" {
			t.Errorf("%v: %+v", body, p)
		}
	}
	w.want(400, "POST", "/v1/workspaces", map[string]any{"on_idle": "suspend"}, nil)

	for range 2 { // idempotent
		w.want(200, "POST", at+"/suspend", nil, &ws)
		if ws.State != api.WorkspaceSuspended || ws.RunnerID != "" || ws.Network.IP != "" {
			t.Fatalf("suspended: %+v", ws)
		}
	}
	if p := w.want(409, "POST", at+"/exec", map[string]any{"command": []string{"true"}}, nil).problem(t); p.Code != "WORKSPACE_NOT_READY" {
		t.Errorf("exec: %+v", p)
	}
	var op api.Operation
	w.want(202, "POST", at+"/resume?wait=0", nil, &op)
	w.want(200, "GET", "/v1/operations/"+op.ID+"?wait=30", nil, &op)
	if err := json.Unmarshal(op.Result, &ws); err != nil || op.State != api.OperationSucceeded || ws.State != api.WorkspaceReady || ws.Epoch != 2 {
		t.Fatalf("resumed: %+v, %+v, %v", op, ws, err)
	}
	w.want(200, "POST", at+"/resume", nil, &ws)
	w.want(201, "POST", "/v1/checkpoints/"+ws.CheckpointID+"/fork", map[string]any{"idle_seconds": 60, "on_idle": "terminate"}, nil)
	w.want(404, "POST", "/v1/workspaces/ws_00000000000000000000000000/suspend", nil, nil)
	w.want(404, "POST", "/v1/workspaces/ws_00000000000000000000000000/resume", nil, nil)
}
