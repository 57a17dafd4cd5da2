package postgres_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/core"
)

// egress lists all flows of a workspace.
func (d *db) egress(id core.WorkspaceID) (list []flows.Flow) {
	d.t.Helper()
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		list, err = tx.WorkspaceFlows(ctx, id, flows.Filter{Limit: 100_000})
		return err
	})
	return list
}

// effectsOf reads all effects of a checkpoint, page by page, and what the tree says of it.
func (d *db) effectsOf(cp controller.Checkpoint, limit int) (list []flows.Effect, count int) {
	d.t.Helper()
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		var after flows.EffectMark
		for {
			page, err := tx.Effects(ctx, cp.ID, after, limit)
			if err != nil {
				return err
			}
			if list = append(list, page...); len(page) < limit {
				break
			}
			last := page[len(page)-1]
			after = flows.EffectMark{Depth: last.Depth, Mark: flows.Mark{At: last.At, ID: last.ID}}
		}
		tree, err := tx.Tree(ctx, cp.ID, controller.TreePage{Page: page(10), MaxDepth: 0})
		if err == nil {
			count = tree[0].Effects
		}
		return err
	})
	return list, count
}

func (d *db) fold() {
	d.t.Helper()
	for n := 1; n > 0; {
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			n, err = tx.FoldFlowCounts(ctx, 7)
			return err
		})
	}
}

func (d *db) number(sql string) (n int64) {
	d.t.Helper()
	if err := d.conn().QueryRow(d.t.Context(), sql).Scan(&n); err != nil {
		d.t.Fatal(err)
	}
	return n
}

// recent is a time of some hours ago, as the database keeps it.
func recent(ago time.Duration) time.Time {
	return time.Now().UTC().Add(-ago).Truncate(time.Microsecond)
}

// tightQuota leaves room for a few rows.
func tightQuota(n int64) flows.Quota {
	r := flows.RowQuota{Workspace: n, Project: 100 * n}
	return flows.Quota{Reads: r, Denied: r, Effects: r}
}

// TestNoiseHidesNothing: a guest that makes noise of every kind first uses up all rows. What it does later is still seen, with its host.
func TestNoiseHidesNothing(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	w := d.ready(d.project, template)
	q := tightQuota(20)
	at := recent(30 * time.Minute)
	n := 0
	send := func(f core.Flow) {
		n++
		f.ID = fmt.Sprintf("f%d", n)
		f.SandboxID, f.At, f.Spoken, f.Port = w.Sandbox.ID, at.Add(time.Duration(n)*time.Millisecond), core.SpokenHTTP, 443
		d.within(q, f)
		if f.Outcome == core.FlowAllowed {
			f.Ended, f.Sent, f.Status = f.At.Add(time.Second), 10, 200
			d.within(q, f)
		}
	}
	for i := range 40 { // to hosts that have no other purpose
		host := fmt.Sprintf("noise%d.example", i)
		send(core.Flow{Host: host, Method: "GET", Outcome: core.FlowDenied, Reason: "no rule"})
		send(core.Flow{Host: host, Method: "GET", Outcome: core.FlowAllowed, Rule: "*.example"})
		send(core.Flow{Host: host, Method: "POST", Outcome: core.FlowAllowed, Rule: "*.example"})
	}
	send(core.Flow{Host: "read.vault.example", Method: "GET", Outcome: core.FlowAllowed, Rule: "read.vault.example", Grant: "grt_1"})
	send(core.Flow{Host: "write.vault.example", Method: "POST", Outcome: core.FlowAllowed, Rule: "write.vault.example", Grant: "grt_1"})
	for i := range 40 { // a grant for many hosts
		send(core.Flow{Host: fmt.Sprintf("h%d.wide.example", i), Method: "POST", Outcome: core.FlowAllowed, Rule: "*.wide.example", Grant: "grt_2"})
	}
	at = at.Add(5 * time.Minute) // another minute
	send(core.Flow{Host: "later.example", Method: "POST", Outcome: core.FlowAllowed, Rule: "*.example"})
	send(core.Flow{Host: "denied.example", Method: "POST", Outcome: core.FlowDenied, Reason: "no rule"})
	cp := d.captureAt(w, template.ID, at.Add(time.Minute))

	seen := map[string]int64{}
	for _, f := range d.egress(w.ID) {
		seen[fmt.Sprint(f.Host, " ", f.Outcome, " ", f.Grant)] += f.Flows()
	}
	for _, want := range []string{"read.vault.example allowed grt_1", "write.vault.example allowed grt_1", "later.example allowed ", "denied.example denied "} {
		if seen[want] != 1 {
			t.Errorf("%q was seen %d times: %v", want, seen[want], seen)
		}
	}
	if got := seen["*.wide.example allowed grt_2"]; got != 40-(flows.CountsOfMinute-1) {
		t.Errorf("%d flows with a grant are counted under their rule", got)
	}
	effects, count := d.effectsOf(cp, 7)
	hosts, sum := map[string]int64{}, int64(0)
	for _, e := range effects {
		hosts[e.Host] += e.Flows()
		sum += e.Flows()
	}
	if hosts["write.vault.example"] != 1 || hosts["later.example"] != 1 || sum != 40+1+40+1 || count != int(sum) {
		t.Errorf("behind the checkpoint: %d, %d by the tree: %v", sum, count, hosts)
	}
}

// TestEndOfRowIsRow: a flow that has a row for its beginning has one for its end, also when the quota is used up in between: it does not
// look open for ever.
func TestEndOfRowIsRow(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	q := tightQuota(3)
	at := recent(time.Minute)
	var begun []core.Flow
	for _, method := range []string{"GET", "POST"} {
		for i := range 6 {
			f := post(fmt.Sprint(method, i), w.Sandbox.ID, at.Add(time.Duration(i)*time.Millisecond))
			f.Method = method
			begun = append(begun, f)
		}
	}
	d.within(q, begun...)
	for _, f := range begun {
		f.Ended, f.Status = at.Add(time.Second), 200
		d.within(q, f)
	}
	rows := 0
	for _, f := range d.egress(w.ID) {
		if f.Counted {
			if f.Count != 3 {
				t.Errorf("counted: %+v", f)
			}
			continue
		}
		if rows++; f.Ended.IsZero() {
			t.Errorf("%s looks open", f.ID)
		}
	}
	if rows != 6 {
		t.Errorf("%d flows have rows", rows)
	}
}

// flowModel knows nothing of rows, minutes and bounds: it remembers each record that was ever sent.
type flowModel map[string]*modelFlow

type modelFlow struct {
	began, ended *core.Flow
	denied       *core.Flow
}

func (m flowModel) take(f core.Flow) {
	key := string(f.SandboxID) + f.ID
	if m[key] == nil {
		m[key] = &modelFlow{}
	}
	switch {
	case flows.KindOf(f) == flows.KindDenied:
		m[key].denied = &f
	case f.Ended.IsZero():
		m[key].began = &f
	default:
		m[key].ended = &f
	}
}

// sent reports whether something of a flow may have been sent.
func (f *modelFlow) sent() bool {
	return f.began != nil && (f.ended == nil || f.ended.Outcome != core.FlowDenied)
}

// TestFlowCountsAgainstModel sends flows at random, in batches that come again, whole and in parts, while old minutes become days. Rows and counts
// together say what a model says, whatever the quota; and the rows of counts are bounded.
func TestFlowCountsAgainstModel(t *testing.T) {
	t.Parallel()
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			countFlowsAtRandom(t, rand.New(rand.NewPCG(seed, 15)))
		})
	}
}

// randomFlow begins a flow of any kind. open says whether it has an end.
func randomFlow(r *rand.Rand, id string, of core.SandboxID, at time.Time) (f core.Flow, open bool) {
	f = post(id, of, at)
	f.Host, f.Port, f.Grant, f.Rule = fmt.Sprintf("h%d.example", r.IntN(50)), uint16(80+r.IntN(2)), "", "*.example"
	f.Method = []string{"GET", "POST", "", "PUT"}[r.IntN(4)]
	if r.IntN(4) == 0 {
		f.Grant, f.Rule = fmt.Sprintf("grt_%d", r.IntN(2)), fmt.Sprintf("*%d.example", r.IntN(3))
	}
	if r.IntN(4) == 0 {
		f.Outcome, f.Grant, f.Reason = core.FlowDenied, "", "no rule"
		if r.IntN(2) == 0 {
			f.Count, f.Ended = 1+r.Int64N(1000), at
			f.Last = at
		}
		return f, false
	}
	return f, true
}

func countFlowsAtRandom(t *testing.T, r *rand.Rand) {
	t.Helper()
	d := newDB(t)
	template := d.template()
	machines := []controller.Workspace{d.ready(d.project, template), d.ready(d.project, template)}
	q := tightQuota(int64(r.IntN(80)))
	at := recent(5 * time.Hour)
	model, open, id := flowModel{}, []core.Flow{}, 0
	var batches [][]core.Flow
	for range 80 {
		var batch []core.Flow
		for range 1 + r.IntN(30) {
			at = at.Add(time.Duration(r.IntN(14000)) * time.Millisecond)
			if len(open) > 0 && r.IntN(3) > 0 {
				i := r.IntN(len(open))
				f := open[i]
				open = slices.Delete(open, i, i+1)
				f.Ended, f.Sent, f.Received = at, r.Int64N(1000), r.Int64N(1000)
				if f.Outcome = []core.Outcome{core.FlowAllowed, core.FlowAllowed, core.FlowCut, core.FlowFailed, core.FlowDenied}[r.IntN(5)]; f.Outcome == core.FlowDenied {
					f.Sent, f.Received = 0, 0
				}
				batch = append(batch, f)
				continue
			}
			id++
			f, ends := randomFlow(r, fmt.Sprintf("f%05d", id), machines[r.IntN(2)].Sandbox.ID, at)
			if batch = append(batch, f); ends {
				open = append(open, f)
			}
		}
		for _, f := range batch {
			model.take(f)
		}
		d.within(q, batch...)
		batches = append(batches, batch)
		switch r.IntN(6) {
		case 0: // the answer was lost
			if kept := d.within(q, batch...); len(kept.Fresh) != 0 || kept.Omitted != 0 {
				t.Errorf("a batch that came twice: %+v", kept)
			}
		case 1: // it comes with others that follow, or after them, as from a controller that was slow
			old := batches[max(0, len(batches)-1-r.IntN(flows.CountedBatches/2))]
			if kept := d.within(q, old[r.IntN(len(old)):]...); len(kept.Fresh) != 0 || kept.Omitted != 0 {
				t.Errorf("an old batch: %+v", kept)
			}
		case 2:
			d.fold()
		}
	}
	for i, w := range machines {
		cp := d.captureAt(w, template.ID, at)
		d.compareFlows(w, cp, model, 3+r.IntN(50))
		if i == 0 {
			d.fold()
		}
		d.compareFlows(w, cp, model, 3+r.IntN(50))
	}
	// 16 by host, 16 by host with a grant, 3 rules with 2 grants, and the rest; by protocol and whether it is opaque, at most twice.
	if n := d.number(`SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM flow_counts WHERE NOT daily GROUP BY sandbox_id, kind, from_at) x`); n > 2*flows.CountsOfMinute+20 {
		t.Errorf("%d rows are of one minute", n)
	}
	if n := d.number(`SELECT coalesce(max(n), 0) FROM (SELECT count(*) AS n FROM flow_counts WHERE daily GROUP BY sandbox_id, kind, from_at) x`); n > 2*flows.CountsOfDay+20 {
		t.Errorf("%d rows are of one day", n)
	}
}

// compareFlows compares what is kept of a workspace with a model. All its flows are before the checkpoint.
func (d *db) compareFlows(w controller.Workspace, cp controller.Checkpoint, model flowModel, limit int) {
	d.t.Helper()
	type sums struct{ effects, reads, denied, bytes int64 }
	var want, got sums
	granted, ended := map[string]int64{}, map[string]bool{}
	for _, f := range model {
		for _, r := range []*core.Flow{f.began, f.ended, f.denied} {
			if r != nil && r.SandboxID != w.Sandbox.ID {
				f = &modelFlow{}
			}
		}
		switch {
		case f.denied != nil:
			want.denied += f.denied.Flows()
		case f.began == nil:
		case !f.sent():
			want.denied++
		case f.began.Method == http.MethodGet:
			want.reads++
		default:
			want.effects++
		}
		if f.ended != nil {
			want.bytes += f.ended.Sent + f.ended.Received
			ended[f.ended.ID] = true
		}
		if f.began != nil && f.began.Grant != "" {
			granted[f.began.Grant]++
		}
	}
	for _, f := range d.egress(w.ID) {
		if granted[f.Grant] -= f.Flows(); f.Grant != "" && f.Host == "" {
			d.t.Errorf("a flow that had a grant has no host: %+v", f)
		}
		got.bytes += f.Sent + f.Received
		switch {
		case f.Outcome == core.FlowDenied:
			got.denied += f.Flows()
		case f.Method == http.MethodGet || f.Counted && !f.Opaque && f.Method == "":
			got.reads += f.Flows() // with effects, which the checkpoint tells from them
		default:
			got.effects += f.Flows()
		}
		if !f.Counted && f.Ended.IsZero() && ended[f.ID] {
			d.t.Errorf("%s has ended and looks open", f.ID)
		}
	}
	effects, count := d.effectsOf(cp, limit)
	sum, ids := int64(0), map[string]bool{}
	for _, e := range effects {
		sum += e.Flows()
		ids[e.ID] = true
	}
	if got.effects+got.reads != want.effects+want.reads || sum != want.effects || got.denied != want.denied || got.bytes != want.bytes {
		d.t.Errorf("%s: %+v and %d effects, want %+v", w.ID, got, sum, want)
	}
	if count != int(sum) || len(ids) != len(effects) {
		d.t.Errorf("%s: the tree says %d effects, want %d; %d ids of %d", w.ID, count, sum, len(ids), len(effects))
	}
	delete(granted, "")
	for id, n := range granted {
		if n != 0 {
			d.t.Errorf("%d flows with the grant %s are missing", n, id)
		}
	}
}

// TestCountsOfBothSides: a count whose flows began on both sides of the instant of a checkpoint is behind it and between it and the next one. What
// is certainly on one side only is listed there only.
func TestCountsOfBothSides(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	w := d.ready(d.project, template)
	q := tightQuota(0)
	minute := recent(time.Hour).Truncate(time.Minute)
	hosts := func(cp controller.Checkpoint) (list []string) {
		effects, _ := d.effectsOf(cp, 100)
		for _, e := range effects {
			list = append(list, fmt.Sprint(e.Host, e.Depth, "x", e.Flows()))
		}
		slices.Sort(list)
		return list
	}
	at := func(id, host string, s int) {
		f := post(id, w.Sandbox.ID, minute.Add(time.Duration(s)*time.Second))
		f.Host = host
		d.within(q, f)
	}
	at("1", "before", 5)
	at("2", "both", 10)
	at("3", "both", 40)
	at("4", "after", 50)
	first := d.captureAt(w, template.ID, minute.Add(30*time.Second))
	second := d.captureAt(w, first.ID, minute.Add(55*time.Second))
	if got, want := hosts(first), []string{"before1x1", "both1x2"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
	if got, want := hosts(second), []string{"after2x1", "before1x1", "both1x2", "both2x2"}; !slices.Equal(got, want) {
		t.Errorf("%v, want %v", got, want)
	}
}

// TestFlowCountsGo: counts go after the retention, and with their workspace; what a clock that is wrong says goes into few days.
func TestFlowCountsGo(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	w, other := d.ready(d.project, template), d.ready(d.project, template)
	q := tightQuota(0)
	for i := range 300 {
		d.within(q, post(fmt.Sprint("a", i), w.Sandbox.ID, noon.AddDate(-20, 0, i)), post(fmt.Sprint("b", i), w.Sandbox.ID, noon.AddDate(20, 0, i)))
	}
	if n := d.number(`SELECT count(DISTINCT from_at) FROM flow_counts`); n > 4 {
		t.Errorf("a clock that is wrong made counts of %d days", n)
	}
	d.within(q, post("now", other.Sandbox.ID, recent(0)))
	if n := d.number(`SELECT count(*) FROM flow_counts`); n < 3 {
		t.Errorf("%d rows are there", n)
	}
	tidy := func() (n int) {
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			n, err = tx.TidyFlowCounts(ctx, 90*24*time.Hour, 1)
			return err
		})
		return n
	}
	if n := tidy() + tidy() + tidy(); n == 0 {
		t.Error("nothing was removed")
	}
	if n := d.number(`SELECT count(*) FROM flow_counts WHERE from_at < now() - interval '91 days'`); n != 0 {
		t.Errorf("%d rows are older than the retention", n)
	}
	if n := d.number(`SELECT count(*) FROM flow_batches`); n > flows.CountedBatches {
		t.Errorf("%d batches are remembered", n)
	}
	d.exec(`ALTER TABLE workspaces DISABLE TRIGGER USER`)
	d.exec(`WITH gone AS (DELETE FROM sandboxes WHERE workspace_id = '` + string(other.ID) + `') DELETE FROM workspaces WHERE id = '` + string(other.ID) + `'`)
	if n := d.number(`SELECT count(*) FROM flow_counts WHERE workspace_id = '` + string(other.ID) + `'`); n != 0 {
		t.Errorf("%d counts of a workspace that was removed are left", n)
	}
	d.refused(`ALTER TABLE flow_counts DISABLE ROW LEVEL SECURITY`)
}

// TestManyEffects: a workspace that has as many rows of effects as it may have does not make its tree, or the list of its effects, slow.
func TestManyEffects(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	w := d.ready(d.project, template)
	d.exec(`
		INSERT INTO flows (project_id, workspace_id, sandbox_id, epoch, id, at, final, changes, spoken, host, port, method, path, outcome, rule, grant_id, reason, status,
			sent_bytes, received_bytes, ended_at)
		SELECT '` + string(d.project) + `', '` + string(w.ID) + `', '` + string(w.Sandbox.ID) + `', 1, 'f' || i, '` + noon.Format(time.RFC3339) + `'::timestamptz + i * interval '1 ms',
			true, true, 'http', 'a.example', 80, 'POST', '/', 'allowed', 'a.example', '', '', 200, 1, 1, now() FROM generate_series(1, 100000) i`)
	d.exec(`ANALYZE flows`)
	parent, nodes := template.ID, 40
	for i := range nodes { // a long path, with the rows at its end
		parent = d.captureAt(w, parent, noon.Add(-time.Duration(nodes-i)*time.Second)).ID
	}
	cp := d.captureAt(w, parent, noon.Add(time.Hour))
	read := d.counted(func() {
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			tree, err := tx.Tree(ctx, template.ID, controller.TreePage{Page: page(1000), MaxDepth: -1})
			if err == nil && tree[len(tree)-1].Effects != flows.MaxEffectRows {
				t.Errorf("the last of %d nodes has %d effects", len(tree), tree[len(tree)-1].Effects)
			}
			return err
		})
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			list, err := tx.Effects(ctx, cp.ID, flows.EffectMark{}, 100)
			if len(list) != 100 || list[99].ID != "f100" {
				t.Errorf("%d effects", len(list))
			}
			return err
		})
	})
	if read > 3*flows.MaxEffectRows {
		t.Errorf("%d rows are read for a page of each, which show at most %d", read, flows.MaxEffectRows)
	} else {
		t.Logf("%d rows are read for a page of each", read)
	}
}
