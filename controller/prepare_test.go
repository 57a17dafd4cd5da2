package controller_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

func withPrepared(n int) option {
	return func(_ *controller.Config, r *runnertest.Config) { r.Prepare = n }
}

func (w *world) prepared(id core.CheckpointID) prepare.State {
	w.t.Helper()
	got, err := w.Prepare.Get(w.t.Context(), w.project, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return got
}

func (w *world) prepare(id core.CheckpointID, n int, ttl time.Duration) {
	w.t.Helper()
	if _, err := w.Prepare.Set(w.t.Context(), w.project, id, prepare.Wanted{Count: n, TTL: ttl}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) awaitPrepared(id core.CheckpointID, n int) {
	w.t.Helper()
	eventually(w.t, fmt.Sprintf("%d machines of %s", n, id), func() bool { return w.runner.Prepared(id) == n })
}

func (w *world) round() {
	w.t.Helper()
	if err := w.Prepare.Round(w.t.Context()); err != nil {
		w.t.Fatal(err)
	}
}

// TestPrepared: machines that were asked for are ready on the runner of the checkpoint, forks take them, and the row counts what became of them, also
// after a restart of the runner or the controller.
func TestPrepared(t *testing.T) {
	t.Parallel()
	w := newWorld(t, withPrepared(8))
	cp := w.checkpoint(w.create("main").ID)
	if got := w.prepared(cp.ID); got != (prepare.State{}) {
		t.Errorf("nothing was asked for: %+v", got)
	}
	w.prepare(cp.ID, 3, 0)
	w.awaitPrepared(cp.ID, 3)
	w.fork(cp.ID, 2)
	w.awaitPrepared(cp.ID, 3)
	w.round()
	if got := w.prepared(cp.ID); got.Asked != 3 || got.Ready != 3 || got.Max != 8 || got.Counts.Hits != 2 || got.Counts.TakenCPUSeconds != 1 || got.RunnerID != w.runner.ID() || got.MemoryBytes != 3<<20 {
		t.Errorf("after a fork into two: %+v", got)
	}
	w.stop() // of the first controller; another one goes on
	w.runner.Stop()
	if err := w.runner.Listen(); err != nil {
		t.Fatal(err)
	}
	w.Controller, w.stop = w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
	w.awaitPrepared(cp.ID, 3)
	w.fork(cp.ID, 1)
	w.awaitPrepared(cp.ID, 3)
	w.round()
	w.round() // what was counted is not counted again
	if got := w.prepared(cp.ID); got.Counts.Hits != 3 || got.Counts.TakenCPUSeconds != 1.5 {
		t.Errorf("after both were started again: %+v", got)
	}
	w.prepare(cp.ID, 0, 0)
	w.awaitPrepared(cp.ID, 0)
	if got := w.prepared(cp.ID); got.Asked != 0 || got.Counts.Hits != 3 {
		t.Errorf("after the end: %+v", got)
	}
}

// TestPreparedEnds: what was asked for ends with its time, and with its checkpoint.
func TestPreparedEnds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, withPrepared(8))
	ws := w.create("main")
	cp, other := w.checkpoint(ws.ID), w.checkpoint(ws.ID)
	w.prepare(cp.ID, 1, time.Second)
	w.prepare(other.ID, 1, time.Hour)
	w.awaitPrepared(other.ID, 1)
	w.awaitPrepared(cp.ID, 0)
	w.round()
	if got := w.prepared(cp.ID); got.Asked != 0 || w.number(`SELECT count FROM prepared_checkpoints WHERE checkpoint_id = $1`, cp.ID) != 0 {
		t.Errorf("after its time: %+v", got)
	}
	if err := w.DeleteCheckpoint(t.Context(), w.project, other.ID); err != nil {
		t.Fatal(err)
	}
	w.round()
	if n := w.number(`SELECT count(*) FROM prepared_checkpoints WHERE count > 0`); n != 0 {
		t.Errorf("%d asks are left", n)
	}
	_, err := w.Prepare.Set(t.Context(), w.project, other.ID, prepare.Wanted{Count: 1})
	if code := core.CodeOf(err); code != core.CodeCheckpointNotReady && code != core.CodeCheckpointNotFound {
		t.Errorf("for a deleted checkpoint: %v", err)
	}
}

// TestPreparedWithCapture: a request that makes a checkpoint asks for machines of it.
func TestPreparedWithCapture(t *testing.T) {
	t.Parallel()
	w := newWorld(t, withPrepared(8))
	ws := w.create("main")
	a, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{Prepare: prepare.Wanted{Count: 2}}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	w.awaitPrepared(a.Result.Checkpoint.ID, 2)
	f, err := w.ForkWorkspace(t.Context(), w.project, ws.ID, controller.CheckpointRequest{Prepare: prepare.Wanted{Count: 1}}, controller.ForkRequest{Count: 1}, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	w.awaitPrepared(f.Result.Children[0].Workspace.Parent, 1)
}

// TestPreparedBounds: a project asks for so many machines at the most, also in requests at the same time, and never for those of another project.
func TestPreparedBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t, withPrepared(8))
	ws := w.create("main")
	var list []core.CheckpointID
	for range prepare.MaxProject/prepare.MaxCount + 1 {
		list = append(list, w.checkpoint(ws.ID).ID)
	}
	errs := make([]error, len(list))
	var group sync.WaitGroup
	for i, id := range list {
		group.Go(func() {
			_, errs[i] = w.Prepare.Set(t.Context(), w.project, id, prepare.Wanted{Count: prepare.MaxCount})
		})
	}
	group.Wait()
	refused := slices.DeleteFunc(errs, func(err error) bool { return err == nil })
	if len(refused) != 1 || core.CodeOf(refused[0]) != core.CodeQuotaExceeded {
		t.Errorf("refused: %v", refused)
	}
	for _, bad := range []prepare.Wanted{{Count: prepare.MaxCount + 1}, {Count: -1}, {Count: 1, TTL: prepare.MaxTTL + 1}, {Count: 1, TTL: 1}} {
		if _, err := w.Prepare.Set(t.Context(), w.project, list[0], bad); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%+v: %v", bad, err)
		}
	}
	project, _ := w.other()
	if _, err := w.Prepare.Set(t.Context(), project, list[0], prepare.Wanted{Count: 1}); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("another project: %v", err)
	}
	if _, err := w.Prepare.Get(t.Context(), project, list[0]); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("another project reads: %v", err)
	}
	if _, err := w.Prepare.Set(t.Context(), w.project, ws.Parent, prepare.Wanted{Count: 1}); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("a template, which belongs to nobody: %v", err)
	}
}

// TestPreparedRace: of 500 claims by 16 clients over two controllers, no two get one machine.
func TestPreparedRace(t *testing.T) {
	t.Parallel()
	const claims, clients = 500, 16
	w := newWorld(t, withPrepared(prepare.MaxCount), func(c *controller.Config, _ *runnertest.Config) { c.AdmissionWait = time.Minute })
	second, _ := w.start(controller.Config{LoopInterval: 50 * time.Millisecond, AdmissionWait: time.Minute})
	w.quota(func(q *controller.QuotasPatch) { q.Workspaces = new(int64(2 * claims)) })
	cp := w.checkpoint(w.create("main").ID)
	w.prepare(cp.ID, prepare.MaxCount, time.Hour)
	w.awaitPrepared(cp.ID, prepare.MaxCount)
	todo := make(chan *controller.Controller, claims)
	for i := range claims {
		todo <- []*controller.Controller{w.Controller, second}[i%2]
	}
	close(todo)
	var group sync.WaitGroup
	for range clients {
		group.Go(func() {
			for c := range todo {
				if _, err := c.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, time.Minute); err != nil {
					t.Errorf("fork: %v", err)
				}
			}
		})
	}
	group.Wait()
	taken := w.runner.Claims()
	slices.Sort(taken)
	if len(slices.Compact(slices.Clone(taken))) != len(taken) {
		t.Errorf("a machine was taken twice: %v", taken)
	}
	w.round()
	got := w.prepared(cp.ID).Counts
	t.Logf("%d of %d children took a prepared machine", len(taken), claims)
	if len(taken) < prepare.MaxCount || got.Hits != int64(len(taken)) || got.Hits+got.Misses != claims {
		t.Errorf("%d taken, counts %+v", len(taken), got)
	}
}
