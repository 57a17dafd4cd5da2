package postgres_test

import (
	"cmp"
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/core"
)

var noon = time.Date(2026, 11, 23, 12, 0, 0, 0, time.UTC)

// captureAt makes a node of a workspace with the instant that it has.
func (d *db) captureAt(w controller.Workspace, parent core.CheckpointID, instant time.Time) controller.Checkpoint {
	d.t.Helper()
	cp := controller.Checkpoint{
		ID: core.NewID[core.CheckpointID](), ProjectID: w.ProjectID, Kind: controller.KindUser, Parent: parent, WorkspaceID: w.ID, WorkspaceEpoch: w.Epoch,
		SandboxID: w.Sandbox.ID, Image: w.Image, Resources: w.Resources, RunnerID: d.runner,
	}
	d.in(controller.InProject(w.ProjectID), func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.InsertCheckpoint(ctx, cp); err != nil {
			return err
		}
		got := d.captured()
		got.CreatedAt = instant
		var err error
		cp, err = tx.CaptureCheckpoint(ctx, cp.ID, d.runner, got)
		return err
	})
	return cp
}

func (d *db) flows(list ...core.Flow) []core.Flow {
	d.t.Helper()
	return d.within(noQuota, list...).Fresh
}

// noQuota is one that is never used up.
var noQuota = flows.Quota{Reads: plenty, Denied: plenty, Effects: plenty}

var plenty = flows.RowQuota{Workspace: 1 << 40, Project: 1 << 40}

func (d *db) within(q flows.Quota, list ...core.Flow) (kept flows.Kept) {
	d.t.Helper()
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		kept, err = tx.InsertFlows(ctx, d.runner, list, q)
		return err
	})
	return kept
}

func post(id string, of core.SandboxID, at time.Time) core.Flow {
	return core.Flow{ID: id, SandboxID: of, At: at, Spoken: core.SpokenHTTP, Host: "a.example", Port: 80, Method: "POST", Path: "/x", Outcome: core.FlowAllowed, Rule: "a.example", Grant: "grt_1"}
}

// TestFlowsAreKeptOnce: whatever comes twice, in whatever order, is there once, as it ended.
func TestFlowsAreKeptOnce(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	began := post("f1", w.Sandbox.ID, noon)
	ended := began
	ended.Ended, ended.Status, ended.Sent, ended.Received = noon.Add(time.Second), 201, 10, 20
	failed := ended
	failed.ID, failed.Outcome, failed.Reason = "f2", core.FlowFailed, "no answer"
	denied := post("f3", w.Sandbox.ID, noon.Add(time.Minute))
	denied.Outcome, denied.Rule, denied.Reason = core.FlowDenied, "", "no rule"
	cut := ended
	cut.ID, cut.At, cut.Outcome, cut.Reason = "f4", noon.Add(2*time.Minute), core.FlowCut, "the grant has ended"
	list := func(f flows.Filter) (out []flows.Flow) {
		f.Limit = 10
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			out, err = tx.WorkspaceFlows(ctx, w.ID, f)
			return err
		})
		return out
	}
	for _, step := range []struct {
		send  []core.Flow
		fresh int
		want  []core.Flow
	}{
		{[]core.Flow{began, began}, 1, []core.Flow{began}},
		{[]core.Flow{began}, 0, []core.Flow{began}},
		{[]core.Flow{failed, denied}, 2, []core.Flow{denied, failed, began}},
		{[]core.Flow{ended, failed, denied, began, ended}, 1, []core.Flow{denied, failed, ended}},
		{[]core.Flow{post("f2", w.Sandbox.ID, noon)}, 1, []core.Flow{denied, failed, ended}}, // its beginning, after its end
		{[]core.Flow{cut, post("f4", w.Sandbox.ID, cut.At)}, 2, []core.Flow{cut, denied, failed, ended}},
	} {
		if got := d.flows(step.send...); len(got) != step.fresh {
			t.Errorf("%d were new, want %d", len(got), step.fresh)
		}
		got := list(flows.Filter{})
		if len(got) != len(step.want) {
			t.Fatalf("%d flows, want %d: %+v", len(got), len(step.want), got)
		}
		for i, f := range step.want {
			f.Epoch = 1
			if got[i].Flow != f || got[i].WorkspaceID != w.ID {
				t.Errorf("%d is %+v, want %+v", i, got[i], f)
			}
		}
	}
	if got := list(flows.Filter{Outcome: core.FlowDenied}); len(got) != 1 || got[0].ID != "f3" {
		t.Errorf("denied: %+v", got)
	}
	if got := list(flows.Filter{Outcome: core.FlowCut}); len(got) != 1 || got[0].ID != "f4" {
		t.Errorf("cut: %+v", got)
	}
	if got := list(flows.Filter{Outcome: core.FlowAllowed}); len(got) != 1 || got[0].ID != "f1" {
		t.Errorf("allowed: %+v", got) // f2 was when it began
	}
	if got := list(flows.Filter{Host: "b.example"}); len(got) != 0 {
		t.Errorf("of another host: %+v", got)
	}
	if got := list(flows.Filter{After: flows.Mark{At: failed.At, ID: failed.ID}}); len(got) != 1 || got[0].ID != "f1" {
		t.Errorf("the next page: %+v", got)
	}
	for _, sql := range []string{`UPDATE flows SET host = 'x'`, `DELETE FROM flows`, `TRUNCATE flows`} {
		if _, err := d.conn().Exec(t.Context(), sql); err == nil {
			t.Errorf("%s changed the journal", sql)
		}
	}
}

// TestFlowsOfOthersAreNotHeard: a runner writes of sandboxes that it has or had, and of no other.
func TestFlowsOfOthersAreNotHeard(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	other := core.NewID[core.RunnerID]()
	info := d.info()
	info.RunnerID = other
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		if _, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: info, Endpoint: "http://127.0.0.1:2"}, time.Minute); err != nil {
			return err
		}
		kept, err := tx.InsertFlows(ctx, other, []core.Flow{post("f1", w.Sandbox.ID, noon), post("f2", core.NewID[core.SandboxID](), noon)}, noQuota)
		if len(kept.Fresh) != 0 {
			t.Errorf("kept: %+v", kept.Fresh)
		}
		return err
	})
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.EndWorkspaces(ctx, []controller.EndedWorkspace{{ID: w.ID, To: core.WorkspaceLost, Failure: &controller.Failure{Code: core.CodeSandboxLost, Message: "gone"}}})
		return err
	})
	if got := d.flows(post("f1", w.Sandbox.ID, noon)); len(got) != 1 {
		t.Errorf("of one that has ended: %+v", got)
	}
}

// lived is a node of the model: what has happened to its state, flow by flow.
type lived struct {
	cp     controller.Checkpoint
	behind []flows.Effect
	own    int
}

// TestEffectsFollowTheState grows trees at random and compares what is behind each node with a model that knows nothing of times: it appends
// each flow to the history of the machine that sent it, and a capture copies that.
func TestEffectsFollowTheState(t *testing.T) {
	t.Parallel()
	for seed := range uint64(6) {
		t.Run(fmt.Sprint(seed), func(t *testing.T) {
			t.Parallel()
			growEffects(t, rand.New(rand.NewPCG(seed, 1)))
		})
	}
}

type machine struct {
	w       controller.Workspace
	head    core.CheckpointID
	depth   int
	behind  []flows.Effect // with the nodes that they belong to, as far as those are known
	pending []core.Flow    // since its head
}

func growEffects(t *testing.T, r *rand.Rand) {
	t.Helper()
	d := newDB(t)
	template := d.template()
	grow := func(cp controller.Checkpoint, depth int, behind []flows.Effect) *machine {
		return &machine{w: d.ready(d.project, cp), head: cp.ID, depth: depth, behind: slices.Clone(behind)}
	}
	machines := []*machine{grow(template, 0, nil)}
	nodes, at, id := []lived{{cp: template}}, noon, 0
	var all []core.Flow
	for range 150 {
		at = at.Add(time.Duration(1+r.IntN(3)) * time.Microsecond)
		m := machines[r.IntN(len(machines))]
		switch r.IntN(8) {
		case 0:
			cp := d.captureAt(m.w, m.head, at)
			m.depth++
			for _, f := range m.pending {
				m.behind = append(m.behind, flows.Effect{Flow: flows.Flow{Flow: f}, CheckpointID: cp.ID, Depth: m.depth})
			}
			nodes = append(nodes, lived{cp: cp, behind: slices.Clone(m.behind), own: len(m.pending)})
			m.head, m.pending = cp.ID, nil
		case 1:
			n := nodes[r.IntN(len(nodes))]
			depth := 0
			if n.cp.ID != template.ID {
				depth = n.cp.Depth
			}
			machines = append(machines, grow(n.cp, depth, n.behind))
		default:
			id++
			f := post(fmt.Sprintf("f%04d", id), m.w.Sandbox.ID, at)
			f.Method = []string{"GET", "POST", "DELETE", "HEAD", "OPTIONS", ""}[r.IntN(6)]
			if f.Method == "" {
				f.Spoken, f.Path = core.SpokenTLS, ""
			}
			begun := f
			ended := f
			ended.Ended = at.Add(time.Second) // after the instants that follow: when it began counts
			// What the model knows: whether anything was sent that may have changed something.
			sent := slices.Contains([]string{"", "POST", "DELETE"}, f.Method)
			switch r.IntN(6) {
			case 0: // refused at once
				begun.Outcome, ended.ID, sent = core.FlowDenied, "", false
			case 1: // it was about to be sent, and was not: its name had an address that is forbidden
				ended.Outcome, sent = core.FlowDenied, false
			case 2: // it was sent, and its answer was taken away
				ended.Outcome, ended.Reason = core.FlowCut, "the host's answer has the secret in it"
			case 3:
				ended.Outcome = core.FlowFailed
			case 4: // nobody knows how it ended
				ended.ID = ""
			}
			if all = append(all, begun); ended.ID != "" {
				all, begun = append(all, ended), ended
			}
			if sent {
				m.pending = append(m.pending, begun)
			}
		}
	}
	r.Shuffle(len(all), func(i, j int) { all[i], all[j] = all[j], all[i] })
	d.flows(all...)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		for _, n := range nodes {
			var got []flows.Effect
			var after flows.EffectMark
			limit := 1 + r.IntN(20)
			for {
				page, err := tx.Effects(ctx, n.cp.ID, after, limit)
				if err != nil {
					return err
				}
				got = append(got, page...)
				if len(page) < limit {
					break
				}
				last := page[len(page)-1]
				after = flows.EffectMark{Depth: last.Depth, Mark: flows.Mark{At: last.At, ID: last.ID}}
			}
			key := func(e flows.Effect) string { return fmt.Sprint(e.Depth, e.CheckpointID, e.ID, e.Ended.IsZero()) }
			if !slices.EqualFunc(got, n.behind, func(a, b flows.Effect) bool { return key(a) == key(b) }) {
				t.Errorf("behind %s: %d effects, want %d", n.cp.ID, len(got), len(n.behind))
			}
		}
		tree, err := tx.Tree(ctx, template.ID, controller.TreePage{Page: page(1000), MaxDepth: -1})
		if err != nil {
			return err
		}
		for _, node := range tree {
			i := slices.IndexFunc(nodes, func(n lived) bool { return n.cp.ID == node.Checkpoint.ID })
			if node.Effects != nodes[i].own {
				t.Errorf("%s shows %d effects, want %d", node.Checkpoint.ID, node.Effects, nodes[i].own)
			}
		}
		if slices.MaxFunc(nodes, func(a, b lived) int { return cmp.Compare(len(a.behind), len(b.behind)) }).behind == nil {
			t.Error("nothing was behind any node: the test shows nothing")
		}
		return nil
	})
}

// TestFlowsAreKeptForATime: months that are over for long enough go, whole; what came to the default partition goes by when it came; and nobody
// but the owner's function removes anything.
func TestFlowsAreKeptForATime(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	ctx := t.Context()
	w := d.ready(d.project, d.template())
	var now time.Time
	if err := d.conn().QueryRow(ctx, `SELECT now()`).Scan(&now); err != nil {
		t.Fatal(err)
	}
	now = now.UTC()
	month := func(back int) time.Time {
		return time.Date(now.Year(), now.Month()-time.Month(back), 1, 0, 0, 0, 0, time.UTC)
	}
	partition := func(back int) {
		if _, err := d.conn().Exec(ctx, fmt.Sprintf(`CREATE TABLE flows_%s PARTITION OF flows FOR VALUES FROM ('%s') TO ('%s')`,
			month(back).Format("200601"), month(back).Format(time.RFC3339), month(back-1).Format(time.RFC3339))); err != nil {
			t.Fatal(err)
		}
	}
	for back := 1; back <= 4; back++ {
		partition(back)
	}
	// What is older than this is older than the last two months and what is over of the present one.
	keep := now.Sub(month(2))
	late, stray := month(7), month(9)
	d.flows(
		post("older", w.Sandbox.ID, month(4)), post("old", w.Sandbox.ID, month(2).Add(-time.Microsecond)), post("boundary", w.Sandbox.ID, month(2)), post("last", w.Sandbox.ID, month(1)),
		post("now", w.Sandbox.ID, now), post("late", w.Sandbox.ID, late), post("stray", w.Sandbox.ID, stray), post("ahead", w.Sandbox.ID, now.AddDate(5, 0, 0)),
	)
	// Two of those in the default partition came long ago; a superuser can say so.
	for _, sql := range []string{
		`ALTER TABLE flows_default DISABLE TRIGGER flows_append_only`,
		`UPDATE flows_default SET created_at = now() - interval '400 days' WHERE id IN ('stray', 'ahead')`,
		`ALTER TABLE flows_default ENABLE TRIGGER flows_append_only`,
	} {
		if _, err := d.conn().Exec(ctx, sql); err != nil {
			t.Fatal(err)
		}
	}
	left := func() []string {
		rows, err := d.conn().Query(ctx, `SELECT id FROM flows ORDER BY at`)
		if err != nil {
			t.Fatal(err)
		}
		ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
		if err != nil {
			t.Fatal(err)
		}
		return ids
	}
	tidy := func(keep time.Duration) error {
		return d.store.InTx(ctx, controller.System(), func(tx controller.AllTx) error { return tx.TidyFlows(ctx, keep) })
	}
	if err := tidy(keep + time.Hour); err != nil {
		t.Fatal(err)
	}
	if got, want := left(), []string{"late", "old", "boundary", "last", "now"}; !slices.Equal(got, want) {
		t.Errorf("an hour before the end of a month: %v, want %v", got, want)
	}
	for range 2 {
		if err := tidy(keep); err != nil {
			t.Fatal(err)
		}
		if got, want := left(), []string{"late", "boundary", "last", "now"}; !slices.Equal(got, want) {
			t.Errorf("after the end of a month: %v, want %v", got, want)
		}
	}
	for _, short := range []time.Duration{0, -time.Hour, 23 * time.Hour} {
		if err := tidy(short); err == nil {
			t.Errorf("flows are removed after %v", short)
		}
	}
	d.refused(`DELETE FROM flows`, `DELETE FROM flows_default`, `UPDATE flows SET host = 'x'`, `TRUNCATE flows`, `TRUNCATE flows_default`, `DROP TABLE flows_default`,
		`ALTER TABLE flows_default DISABLE TRIGGER flows_append_only`)
	// Not the owner either, by accident.
	for _, sql := range []string{`DELETE FROM flows`, `DELETE FROM flows_default`, `DELETE FROM flows_` + month(1).Format("200601"), `TRUNCATE flows`} {
		if _, err := d.conn().Exec(ctx, sql); err == nil {
			t.Errorf("%s changed the journal", sql)
		}
	}
	if got := left(); len(got) != 4 {
		t.Errorf("%v are left", got)
	}
	d.flows(post("later", w.Sandbox.ID, month(-2)))
	var part string
	if err := d.conn().QueryRow(ctx, `SELECT tableoid::regclass::text FROM flows WHERE id = 'later'`).Scan(&part); err != nil || part == "flows_default" {
		t.Errorf("the month after next is in %s: %v", part, err)
	}
}

// refused fails unless the controller's role may not do something.
func (d *db) refused(list ...string) {
	d.t.Helper()
	for _, sql := range list {
		conn := d.conn()
		if _, err := conn.Exec(d.t.Context(), `SET ROLE coppice_app`); err != nil {
			d.t.Fatal(err)
		}
		if _, err := conn.Exec(d.t.Context(), `SELECT set_config('coppice.project_id', 'system', false)`); err != nil {
			d.t.Fatal(err)
		}
		if _, err := conn.Exec(d.t.Context(), sql); err == nil {
			d.t.Errorf("the controller's role may do %s", sql)
		}
	}
}
