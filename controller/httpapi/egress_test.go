package httpapi_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// reportFlows sends flows as the runner does.
func (w *world) reportFlows(flows ...core.Flow) {
	w.t.Helper()
	path := strings.Replace(runnerapi.PathFlows, "{id}", string(w.runner.ID()), 1)
	if err := runnertest.Post(w.t.Context(), w.inner+path, runnerSecret, runnerapi.Flows{Flows: flows}, nil); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) sandboxOf(ws string) core.SandboxID {
	w.t.Helper()
	for _, s := range w.runner.Sandboxes() {
		if string(s.WorkspaceID) == ws {
			return s.ID
		}
	}
	w.t.Fatalf("no sandbox of %s", ws)
	return ""
}

// TestEgressJournal: what a runner reports is listed, with what of it is behind a checkpoint.
func TestEgressJournal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	sandbox := w.sandboxOf(ws.ID)
	flow := func(id, method string) core.Flow {
		return core.Flow{ID: id, SandboxID: sandbox, At: time.Now().UTC(), Spoken: core.SpokenHTTP, Host: "a.example", Port: 443, Method: method, Path: "/x", Outcome: core.FlowAllowed, Rule: "a.example"}
	}
	read, write := flow("f1", "GET"), flow("f2", "PUT")
	cp := w.checkpoint(ws.ID)
	after, tunnel, denied := flow("f3", "DELETE"), flow("f4", ""), flow("f5", "POST")
	tunnel.Spoken, tunnel.Path = core.SpokenTLS, ""
	denied.Outcome, denied.Host, denied.Rule, denied.Reason = core.FlowDenied, "evil.example\x00\xff", "", "no rule"
	ended := write
	ended.Ended, ended.Status, ended.Sent, ended.Received = write.At.Add(time.Second), 204, 5, 7
	// Its host has executed it, and the guest has not got the answer; of the other nothing was sent after all.
	cut, unsent := flow("fa", "POST"), flow("fb", "POST")
	cutBegun, unsentBegun := cut, unsent
	cut.Outcome, cut.Reason, cut.Ended = core.FlowCut, "the grant has ended", cut.At.Add(time.Second)
	unsent.Outcome, unsent.Reason, unsent.Ended = core.FlowDenied, "a forbidden address", unsent.At.Add(time.Second)
	foreign, odd, none := flow("f6", "POST"), flow("f 7", "POST"), flow("f8", "POST")
	foreign.SandboxID, none.Outcome = core.NewID[core.SandboxID](), "odd"
	w.reportFlows(denied, ended, read, foreign, odd, tunnel, none, after, write)
	w.reportFlows(ended, read)
	w.reportFlows(cutBegun, unsentBegun, unsent, cut)
	next := w.checkpoint(ws.ID)

	at := "/v1/workspaces/" + ws.ID + "/egress"
	var list api.FlowList
	w.want(200, "GET", at, nil, &list)
	var got []string
	for _, f := range list.Items {
		got = append(got, fmt.Sprintf("%s %s %s %v %d", f.ID, f.Host, f.Outcome, f.Opaque, f.Status))
		if f.WorkspaceID != ws.ID || f.Epoch != 1 || f.ID == "f2" && (f.EndedAt.IsZero() || f.SentBytes != 5 || f.ReceivedBytes != 7) {
			t.Errorf("%+v", f)
		}
	}
	want := "fb a.example denied false 0, fa a.example cut false 0, f5 evil.example?? denied false 0, f4 a.example allowed true 0, f3 a.example allowed false 0, f2 a.example allowed false 204, f1 a.example allowed false 0"
	if s := strings.Join(got, ", "); s != strings.ReplaceAll(want, "??", "?\uFFFD") && s != want {
		t.Errorf("listed: %s", s)
	}
	w.want(200, "GET", at+"?outcome=denied", nil, &list)
	if len(list.Items) != 2 || list.Items[1].Reason != "no rule" {
		t.Errorf("denied: %+v", list.Items)
	}
	w.want(200, "GET", at+"?outcome=cut", nil, &list)
	if len(list.Items) != 1 || list.Items[0].ID != "fa" {
		t.Errorf("cut: %+v", list.Items)
	}
	w.want(200, "GET", at+"?host=b.example", nil, &list)
	if len(list.Items) != 0 {
		t.Errorf("of another host: %+v", list.Items)
	}
	pages := ""
	for cursor := ""; ; {
		list = api.FlowList{}
		w.want(200, "GET", at+"?limit=2&cursor="+cursor, nil, &list)
		for _, f := range list.Items {
			pages += f.ID
		}
		if cursor = list.NextCursor; cursor == "" {
			break
		}
	}
	if pages != "fbfaf5f4f3f2f1" {
		t.Errorf("page by page: %s", pages)
	}
	w.want(400, "GET", at+"?outcome=odd", nil, nil)
	w.want(404, "GET", "/v1/workspaces/ws_00000000000000000000000000/egress", nil, nil)
	w.want(404, "GET", "/v1/checkpoints/ckpt_00000000000000000000000000/effects", nil, nil)

	for id, want := range map[string]string{cp.ID: "f2:1", next.ID: "f2:1 f3:2 f4:2 fa:2"} {
		got := []string{}
		for cursor := ""; ; {
			var effects api.EffectList
			w.want(200, "GET", "/v1/checkpoints/"+id+"/effects?limit=1&cursor="+cursor, nil, &effects)
			for _, e := range effects.Items {
				got = append(got, fmt.Sprintf("%s:%d", e.Flow.ID, e.Depth))
				if e.CheckpointID != map[int]string{1: cp.ID, 2: next.ID}[e.Depth] {
					t.Errorf("%+v", e)
				}
			}
			if cursor = effects.NextCursor; cursor == "" {
				break
			}
		}
		if s := strings.Join(got, " "); s != want {
			t.Errorf("behind %s: %s, want %s", id, s, want)
		}
	}
	var tree api.Tree
	w.want(200, "GET", "/v1/checkpoints/"+cp.ID+"/tree", nil, &tree)
	if len(tree.Items) != 2 || tree.Items[0].EffectsCount != 1 || tree.Items[1].EffectsCount != 3 {
		t.Errorf("tree: %+v", tree.Items)
	}
	// The journal outlives the workspace, and what its runner still has of it is taken.
	w.want(200, "DELETE", "/v1/workspaces/"+ws.ID, nil, nil)
	late := flow("f9", "GET")
	w.reportFlows(late)
	w.want(200, "GET", at, nil, &list)
	if len(list.Items) != 8 || list.Items[0].ID != "f9" {
		t.Errorf("after its end: %+v", list.Items)
	}
	if err := runnertest.Post(t.Context(), w.inner+strings.Replace(runnerapi.PathFlows, "{id}", string(w.runner.ID()), 1), "wrong", runnerapi.Flows{}, nil); core.CodeOf(err) != core.CodeUnauthenticated {
		t.Errorf("without the secret: %v", err)
	}
}

// TestEgressCounts: what was denied in great number is listed with its count, and its first and last time.
func TestEgressCounts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	at := time.Now().UTC().Truncate(time.Microsecond)
	f := core.Flow{
		ID: "f1", SandboxID: w.sandboxOf(ws.ID), At: at, Count: 240_000, Last: at.Add(time.Minute), Ended: at.Add(time.Minute), Spoken: core.SpokenHTTP, Host: "evil.example", Port: 80, Method: "GET",
		Path: "/", Outcome: core.FlowDenied, Reason: "no rule",
	}
	one := f
	one.ID, one.Count, one.Last, one.Ended = "f2", 0, time.Time{}, time.Time{}
	w.reportFlows(f, one)
	w.reportFlows(f)
	var list api.FlowList
	w.want(200, "GET", "/v1/workspaces/"+ws.ID+"/egress?outcome=denied", nil, &list)
	if len(list.Items) != 2 || list.Omitted != nil || list.Items[0].Count != 1 || !list.Items[0].LastAt.IsZero() || list.Items[1].Count != 240_000 || !list.Items[1].At.Equal(at) || !list.Items[1].LastAt.Equal(f.Last) {
		t.Errorf("listed: %+v, %+v", list.Items, list.Omitted)
	}
	w.sql(`UPDATE flow_rows SET omitted = 7, omitted_first_at = $1, omitted_last_at = $1`, at)
	w.want(200, "GET", "/v1/workspaces/"+ws.ID+"/egress", nil, &list)
	if o := list.Omitted; o == nil || o.Count != 7 || !o.FirstAt.Equal(at) || !o.LastAt.Equal(at) {
		t.Errorf("left out: %+v", o)
	}
}
