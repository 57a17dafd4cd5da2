package httpapi_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api"
)

func allowing(entries ...string) map[string]any {
	return map[string]any{"network": map[string]any{"allow": append([]string{}, entries...)}}
}

// TestNetworkRules drives what workspaces may reach through the wire.
func TestNetworkRules(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var ws api.Workspace
	w.want(201, "POST", "/v1/workspaces", allowing("B.example.", "a.example", "bundle:python", "b.example"), &ws)
	want := []string{"a.example", "b.example", "bundle:python"}
	if !slices.Equal(ws.Network.Allow, want) || ws.Network.EgressPolicy != api.EgressDenyAll || ws.Network.RulesPending {
		t.Fatalf("created: %+v", ws.Network)
	}
	at := "/v1/workspaces/" + ws.ID
	w.want(200, "GET", at, nil, &ws)
	if !slices.Equal(ws.Network.Allow, want) {
		t.Errorf("read: %+v", ws.Network)
	}
	p := w.want(400, "PATCH", at, allowing("a.example", "*", "x:0"), nil).problem(t)
	if p.Code != "INVALID_FIELD" || len(p.Fields) != 1 || p.Fields[0].Field != "network.allow" || !strings.Contains(p.Detail, "network.allow[1]") || !strings.Contains(p.Detail, "network.allow[2]") {
		t.Errorf("%+v", p)
	}
	w.want(400, "PATCH", at, map[string]any{"network": map[string]any{}}, nil)
	w.want(400, "PATCH", at, map[string]any{"network": map[string]any{"allow": nil}}, nil)
	w.want(400, "PATCH", at, map[string]any{"network": map[string]any{"allow": []string{}, "egress_policy": "allow-all"}}, nil)
	w.want(400, "POST", "/v1/workspaces", map[string]any{"network": map[string]any{"allow": []string{"a.example"}, "egress_policy": "allow-all"}}, nil)
	w.want(200, "PATCH", at, allowing("a.example"), &ws)
	if !slices.Equal(ws.Network.Allow, []string{"a.example"}) || ws.Version != 2 {
		t.Errorf("patched: %+v at version %d", ws.Network, ws.Version)
	}
	var res api.ForkResult
	w.want(201, "POST", at+"/fork", map[string]any{"network": map[string]any{"egress_policy": "deny-all"}}, &res)
	if got := res.Children[0].Workspace.Network; !slices.Equal(got.Allow, []string{"a.example"}) {
		t.Errorf("inherited: %+v", got)
	}
	w.want(201, "POST", "/v1/checkpoints/"+res.CheckpointID+"/fork", allowing(), &res)
	child := res.Children[0].Workspace
	if len(child.Network.Allow) != 0 {
		t.Errorf("narrowed: %+v", child.Network)
	}
	for path, body := range map[string]map[string]any{
		"/v1/checkpoints/" + res.CheckpointID + "/fork":    allowing("a.example", "evil.example"),
		"/v1/checkpoints/" + res.CheckpointID + "/restore": {"network": map[string]any{"egress_policy": "allow-all"}},
		at + "/fork": allowing("evil.example"),
	} {
		if p := w.want(403, "POST", path, body, nil).problem(t); p.Code != "EGRESS_BEYOND_PARENT" || !strings.Contains(p.Detail, "evil.example") && !strings.Contains(p.Detail, "allow-all") {
			t.Errorf("%s: %+v", path, p)
		}
	}
	w.want(403, "PATCH", "/v1/workspaces/"+child.ID, allowing("evil.example"), nil)
	// The change is in the audit log, with what was before.
	var log api.AuditRecordList
	w.want(200, "GET", "/v1/audit?object_id="+ws.ID+"&action=patchWorkspace", nil, &log)
	if !slices.ContainsFunc(log.Items, func(r api.AuditRecord) bool {
		return strings.Contains(string(r.Detail), `"egress_allow":["a.example"]`)
	}) {
		t.Errorf("audited: %+v", log.Items)
	}
}
