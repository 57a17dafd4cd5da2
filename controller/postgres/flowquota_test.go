package postgres_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/core"
)

// counted is a record of many flows that were denied.
func counted(id string, of core.SandboxID, at time.Time, count int64) core.Flow {
	f := post(id, of, at)
	f.Outcome, f.Rule, f.Grant, f.Reason = core.FlowDenied, "", "", "no rule"
	f.Count, f.Last = count, at.Add(40*time.Second)
	f.Ended = f.Last
	return f
}

// TestCountedFlows: a record of many flows is kept once, as it came.
func TestCountedFlows(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	f := counted("f1", w.Sandbox.ID, noon, 240_000)
	for i := range 2 {
		if got := d.flows(f); len(got) != 1-i {
			t.Errorf("time %d: %+v", i, got)
		}
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		list, err := tx.WorkspaceFlows(ctx, w.ID, flows.Filter{Limit: 10})
		f.Epoch = 1
		if len(list) != 1 || list[0].Flow != f {
			t.Errorf("kept: %+v, want %+v", list, f)
		}
		return err
	})
}

// TestFlowQuota: beyond its quota, a workspace's denied flows are counted by host and have no rows. They take no place of other flows. Another
// workspace has a quota of its own, and all of a project have one together.
func TestFlowQuota(t *testing.T) {
	t.Parallel()
	const most = 50
	d := newDB(t)
	template := d.template()
	w, other := d.ready(d.project, template), d.ready(d.project, template)
	q := flows.Quota{Reads: plenty, Denied: flows.RowQuota{Workspace: most, Project: 2*most + 10}, Effects: plenty}
	deny := func(id string, of controller.Workspace, at time.Time) core.Flow {
		f := post(id, of.Sandbox.ID, at)
		f.Outcome, f.Rule, f.Grant, f.Reason = core.FlowDenied, "", "", "no rule"
		return f
	}
	omitted := func(of controller.Workspace) (out flows.Omitted) {
		t.Helper()
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			out, err = tx.OmittedFlows(ctx, of.ID)
			return err
		})
		return out
	}
	rows := func() (n int) {
		t.Helper()
		if err := d.conn().QueryRow(t.Context(), `SELECT count(*) FROM flows`).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	for batch := range 4 { // 80 rows are offered
		var list []core.Flow
		for i := range 20 {
			n := 20*batch + i
			list = append(list, deny(fmt.Sprintf("f%d", n), w, noon.Add(time.Duration(n)*time.Second)))
		}
		d.within(q, list...)
	}
	if got := omitted(w); rows() != most || got.Count != 30 || !got.First.Equal(noon.Add(most*time.Second)) || !got.Last.Equal(noon.Add(79*time.Second)) {
		t.Errorf("%d rows are kept, and %+v left out", rows(), got)
	}
	read := post("read", w.Sandbox.ID, noon)
	read.Method = "GET"
	readEnd := read
	readEnd.Ended = noon
	wrote := post("wrote", w.Sandbox.ID, noon)
	unsent := wrote // it was about to be sent, and was not: without its end it would be an effect
	unsent.Outcome, unsent.Ended = core.FlowDenied, noon
	kept := d.within(q, read, readEnd, wrote, unsent, counted("many", w.Sandbox.ID, noon, 1000))
	if len(kept.Fresh) != 4 || kept.Omitted != 1000 || omitted(w).Count != 1030 {
		t.Errorf("beyond the quota: %+v, %+v", kept, omitted(w))
	}
	for i := range 2 * most {
		d.within(q, deny(fmt.Sprintf("o%d", i), other, noon))
	}
	if got := omitted(other); got.Count != most || rows() != 2*most+4 {
		t.Errorf("another workspace: %+v; %d rows", got, rows())
	}
	third := d.ready(d.project, template)
	for i := range most {
		d.within(q, deny(fmt.Sprintf("t%d", i), third, noon))
	}
	if got := omitted(third); got.Count != most-10 || rows() != 2*most+14 {
		t.Errorf("beyond the project's: %+v; %d rows", got, rows())
	}
	// What was dropped with its month makes room.
	if _, err := d.conn().Exec(t.Context(), `UPDATE flow_rows SET month = month - interval '7 months'`); err != nil {
		t.Fatal(err)
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.TidyFlows(ctx, 90*24*time.Hour) })
	if kept := d.within(q, deny("later", w, noon)); len(kept.Fresh) != 1 || omitted(w).Count != 0 {
		t.Errorf("after some months: %+v, %+v", kept, omitted(w))
	}
}
