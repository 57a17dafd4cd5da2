package httpapi_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/core"
)

// TestEgressAfterNoise: a guest has used up the rows of its workspace. A secret that it reads with later is seen, with the host that it was
// sent to, and so is each further host that it changes something at; a batch that comes twice counts once. Rows of effects have a bound.
func TestEgressAfterNoise(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	sandbox := w.sandboxOf(ws.ID)
	at := time.Now().UTC().Truncate(time.Microsecond)
	flow := func(id, method, host, grant string) []core.Flow {
		f := core.Flow{ID: id, SandboxID: sandbox, At: at, Spoken: core.SpokenHTTP, Host: host, Port: 443, Method: method, Path: "/x", Outcome: core.FlowAllowed, Rule: host, Grant: grant}
		ended := f
		ended.Ended, ended.Status, ended.Sent = at.Add(time.Second), 200, 100
		return []core.Flow{f, ended}
	}
	w.reportFlows(flow("noise1", "GET", "noise.example", "")...)
	w.reportFlows(flow("noise2", "POST", "noise.example", "")...)
	w.reportFlows(core.Flow{ID: "noise3", SandboxID: sandbox, At: at, Spoken: core.SpokenTCP, Host: "noise.example", Port: 1, Outcome: core.FlowDenied, Reason: "no rule"})
	w.sql(`UPDATE flow_rows SET (rows, effects, denied) = (30000000, 10000000, 10000000)`) // as if there had been so many
	quiet := flow("read", "GET", "vault.example", "grt_1")
	for range 2 {
		w.reportFlows(quiet...)
	}
	for i := range 30 {
		w.reportFlows(flow(fmt.Sprint("write", i), "PUT", "bank.example", "")...)
	}
	w.reportFlows(core.Flow{ID: "late", SandboxID: sandbox, At: at, Spoken: core.SpokenTCP, Host: "evil.example", Port: 22, Outcome: core.FlowDenied, Reason: "no rule"})
	cp := w.checkpoint(ws.ID)

	var list api.FlowList
	w.want(200, "GET", "/v1/workspaces/"+ws.ID+"/egress?limit=1000", nil, &list)
	seen := map[string]int64{}
	for _, f := range list.Items {
		seen[f.Host+" "+f.GrantID] += f.Count
		if f.Host == "vault.example" && (f.SentBytes != 100 || f.LastAt.IsZero() || f.Opaque || !f.Counted) {
			t.Errorf("the count of a flow: %+v", f)
		}
	}
	if seen["vault.example grt_1"] != 1 || seen["bank.example "] != 30 || seen["evil.example "] != 1 || len(list.Items) != 3+3 {
		t.Errorf("%d rows are listed: %v", len(list.Items), seen)
	}
	if list.Omitted == nil || list.Omitted.Count != 32 {
		t.Errorf("without rows: %+v", list.Omitted)
	}
	var effects api.EffectList
	w.want(200, "GET", "/v1/checkpoints/"+cp.ID+"/effects", nil, &effects)
	var got []string
	for _, e := range effects.Items {
		got = append(got, fmt.Sprint(e.Flow.Host, " ", e.Flow.Count))
	}
	if fmt.Sprint(got) != "[bank.example 30 noise.example 1]" && fmt.Sprint(got) != "[noise.example 1 bank.example 30]" {
		t.Errorf("behind the checkpoint: %v", got)
	}
	var tree api.Tree
	w.want(200, "GET", "/v1/checkpoints/"+cp.ID+"/tree", nil, &tree)
	if tree.Items[0].EffectsCount != 31 {
		t.Errorf("the tree says %d effects", tree.Items[0].EffectsCount)
	}
}
