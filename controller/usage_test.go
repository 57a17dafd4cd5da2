package controller_test

import (
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// report sends a heartbeat with what sandboxes have used.
func (w *world) report(list ...runnerapi.Usage) {
	w.t.Helper()
	h := w.runner.NextBeat(w.epoch)
	h.Usage = list
	out, err := w.Fleet().Heartbeat(w.t.Context(), w.runner.ID(), h)
	if err != nil {
		w.t.Fatal(err)
	}
	w.runner.Obey(h, out)
}

// TestUsage sums cumulative samples over epochs and branches. A heartbeat writes a sandbox's sample once in a while and its
// last one always, and touches no workspace.
func TestUsage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ws := w.create("main")
	first := ws.Sandbox.ID
	before := w.number(`SELECT sum(xmin::text::bigint) FROM workspaces`)
	w.report(runnerapi.Usage{SandboxID: first, CPUSeconds: 1.5, SentBytes: 100, ReceivedBytes: 10})
	w.report(runnerapi.Usage{SandboxID: first, CPUSeconds: 2, SentBytes: 110, ReceivedBytes: 10}) // too soon to be written
	w.report(runnerapi.Usage{SandboxID: core.NewID[core.SandboxID](), CPUSeconds: 99})            // nobody's
	if n := w.number(`SELECT count(*) FROM usage_totals`); n != 1 {
		t.Errorf("%d sandboxes have totals", n)
	}
	if after := w.number(`SELECT sum(xmin::text::bigint) FROM workspaces`); after != before {
		t.Error("a heartbeat wrote a workspace's row")
	}
	got, err := w.Tenancy.WorkspaceUsage(ctx, w.project, ws.ID)
	if err != nil || got.CPUSeconds != 1.5 || got.SentBytes != 100 || got.ReceivedBytes != 10 || got.GiBSeconds <= 0 || got.Checkpoints != 0 || got.SampledAt.IsZero() {
		t.Errorf("%+v, %v", got, err)
	}

	cp := w.checkpoint(ws.ID)
	a, err := w.RestoreWorkspace(ctx, w.project, ws.ID, cp.ID, wait)
	if err != nil {
		t.Fatal(err)
	}
	children := w.fork(cp.ID, 2)
	w.report(
		runnerapi.Usage{SandboxID: first, CPUSeconds: 3, SentBytes: 120, ReceivedBytes: 20, Ended: true},
		runnerapi.Usage{SandboxID: a.Result.Workspace.Sandbox.ID, CPUSeconds: 4, SentBytes: 1},
		runnerapi.Usage{SandboxID: children[0].Sandbox.ID, CPUSeconds: 10}, runnerapi.Usage{SandboxID: children[1].Sandbox.ID, CPUSeconds: 20},
	)
	leaf := w.checkpoint(children[0].ID)
	if got, err = w.Tenancy.WorkspaceUsage(ctx, w.project, ws.ID); err != nil || got.CPUSeconds != 7 || got.SentBytes != 121 || got.StoredBytes == 0 || got.Checkpoints != 1 {
		t.Errorf("in two epochs: %+v, %v", got, err)
	}
	branch, err := w.Tenancy.CheckpointUsage(ctx, w.project, cp.ID)
	if err != nil || branch.CPUSeconds != 30 || branch.Workspaces != 2 || branch.Checkpoints != 2 {
		t.Errorf("a branch: %+v, %v", branch, err)
	}
	tree, err := w.Tenancy.CheckpointUsage(ctx, w.project, cp.Root)
	if err != nil || tree.CPUSeconds != 37 || tree.Workspaces != 3 || tree.StoredBytes <= branch.StoredBytes {
		t.Errorf("the tree: %+v, %v", tree, err)
	}
	if err := w.DeleteCheckpoint(ctx, w.project, leaf.ID); err != nil {
		t.Fatal(err)
	}
	if now, err := w.Tenancy.CheckpointUsage(ctx, w.project, cp.ID); err != nil || now.Checkpoints != 1 || now.StoredBytes >= branch.StoredBytes || now.CPUSeconds != 30 {
		t.Errorf("after a deletion: %+v, %v", now, err)
	}
	_, err = w.Tenancy.WorkspaceUsage(ctx, w.project, core.NewID[core.WorkspaceID]())
	wantCode(t, err, core.CodeWorkspaceNotFound)
}
