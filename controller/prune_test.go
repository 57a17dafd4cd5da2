package controller_test

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// scored takes a checkpoint with a score.
func (w *world) scored(id core.WorkspaceID, score float64) controller.Checkpoint {
	w.t.Helper()
	a, err := w.CreateCheckpoint(w.t.Context(), w.project, id, controller.CheckpointRequest{
		Annotations: map[string]json.RawMessage{"score": json.RawMessage(fmt.Sprint(score))},
	}, wait)
	if err != nil {
		w.t.Fatal(err)
	}
	return *a.Result.Checkpoint
}

func (w *world) pin(id core.CheckpointID, on bool) {
	w.t.Helper()
	if cp, err := w.Tree.Patch(w.t.Context(), w.project, id, controller.CheckpointPatch{Pinned: &on}); err != nil || cp.Pinned != on {
		w.t.Fatalf("pin: %+v, %v", cp, err)
	}
}

func (w *world) end(list ...core.WorkspaceID) {
	w.t.Helper()
	for _, id := range list {
		if _, err := w.Terminate(w.t.Context(), w.project, id, wait); err != nil {
			w.t.Fatal(err)
		}
	}
}

func pruned(a controller.Answer) []core.CheckpointID {
	var list []core.CheckpointID
	for _, i := range a.Result.Prune.Items {
		if i.Skipped == "" {
			list = append(list, i.ID)
		}
	}
	return list
}

// TestPins keeps a pinned checkpoint beyond its workspace, against every way of deleting it.
func TestPins(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ws := w.create("main")
	a, err := w.CreateCheckpoint(ctx, w.project, ws.ID, controller.CheckpointRequest{Name: "keep", Pinned: true}, wait)
	if err != nil || !a.Result.Checkpoint.Pinned {
		t.Fatalf("%+v, %v", a, err)
	}
	kept := a.Result.Checkpoint.ID
	later := w.checkpoint(ws.ID)
	w.end(ws.ID)
	wantCode(t, w.DeleteCheckpoint(ctx, w.project, kept), core.CodeCheckpointPinned)
	_, err = w.DeleteCheckpoints(ctx, w.project, kept, true, false, wait)
	wantCode(t, err, core.CodeCheckpointPinned)
	a, err = w.PruneCheckpoints(ctx, w.project, kept, controller.RetentionPolicy{Policy: retention.Policy{MaxAge: time.Nanosecond}}, false, wait)
	if err != nil || !slices.Equal(pruned(a), []core.CheckpointID{later.ID}) || a.Result.Prune.Kept != 1 {
		t.Fatalf("prune: %+v, %v", a.Result.Prune, err)
	}
	w.end(w.fork(kept, 1)[0].ID)
	w.pin(kept, false)
	if err := w.DeleteCheckpoint(ctx, w.project, kept); err != nil {
		t.Error(err)
	}
	w.consistent()
}

// TestCascade deletes a subtree whole, or nothing of it.
func TestCascade(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ws := w.create("main")
	top := w.checkpoint(ws.ID)
	below := w.checkpoint(ws.ID)
	side := w.fork(top.ID, 1)[0]
	leaf := w.checkpoint(side.ID)

	plan, err := w.DeleteCheckpoints(ctx, w.project, top.ID, true, true, wait)
	if err != nil || !plan.Result.Prune.DryRun || !slices.Equal(pruned(plan), []core.CheckpointID{top.ID, below.ID, leaf.ID}) || plan.Result.Prune.Bytes() == 0 {
		t.Fatalf("plan: %+v, %v", plan.Result.Prune, err)
	}
	if plan, err = w.DeleteCheckpoints(ctx, w.project, top.ID, false, true, wait); err != nil || !slices.Equal(pruned(plan), []core.CheckpointID{top.ID}) {
		t.Errorf("plan of one: %+v, %v", plan.Result.Prune, err)
	}
	refused := func(what string, code core.Code) {
		t.Helper()
		for _, dry := range []bool{true, false} {
			if _, err := w.DeleteCheckpoints(ctx, w.project, top.ID, true, dry, wait); core.CodeOf(err) != code {
				t.Errorf("%s: %v", what, err)
			}
		}
		if n := len(w.runner.Checkpoints()); n != 4 {
			t.Errorf("%s: %d checkpoints are left", what, n)
		}
	}
	w.pin(leaf.ID, true)
	refused("one is pinned", core.CodeCheckpointPinned)
	w.pin(leaf.ID, false)
	asleep := w.suspend(side.ID)
	wantCode(t, w.DeleteCheckpoint(ctx, w.project, asleep.Head), core.CodeCheckpointInUse)
	if _, err := w.DeleteCheckpoints(ctx, w.project, top.ID, true, false, wait); core.CodeOf(err) != core.CodeCheckpointInUse {
		t.Errorf("a workspace is suspended as one: %v", err)
	}
	w.end(side.ID)
	_, err = w.DeleteCheckpoints(ctx, w.project, ws.Parent, true, false, wait)
	wantCode(t, err, core.CodeCheckpointInUse) // it is a template

	done, err := w.DeleteCheckpoints(ctx, w.project, top.ID, true, false, wait)
	if err != nil || len(pruned(done)) != 4 || len(w.runner.Checkpoints()) != 1 {
		t.Fatalf("cascade: %+v, %v; %v are left", done.Result.Prune, err, w.runner.Checkpoints())
	}
	again, err := w.Operation(ctx, w.project, done.Operation.ID, 0)
	if err != nil || len(pruned(again)) != 4 {
		t.Errorf("read again: %+v, %v", again, err)
	}
	w.checkpoint(ws.ID) // its machine, whose head is deleted, goes on
	w.consistent()
}

// TestPrune keeps the best of a search with the paths to them, what is pinned, and what lives.
func TestPrune(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ws := w.create("main")
	root := w.scored(ws.ID, 0.1)
	var best, worst []controller.Checkpoint
	for i, child := range w.fork(root.ID, 3) {
		worst = append(worst, w.scored(child.ID, 0.2))
		best = append(best, w.scored(child.ID, float64(i)))
		w.end(child.ID)
	}
	living := w.fork(worst[0].ID, 1)[0]
	w.pin(worst[1].ID, true)
	policy := controller.RetentionPolicy{Annotation: "score", Policy: retention.Policy{KeepBest: 1}}
	a, err := w.PruneCheckpoints(ctx, w.project, ws.Parent, policy, true, wait)
	want := []core.CheckpointID{best[0].ID, worst[2].ID, best[1].ID}
	slices.Sort(want)
	if err != nil || !slices.Equal(pruned(a), want) {
		t.Fatalf("plan: %+v, %v; want %v", a.Result.Prune, err, want)
	}
	if n := w.number(`SELECT count(*) FROM operations WHERE kind = 'prune_checkpoints'`); n != 0 {
		t.Errorf("a dry run began %d operations", n)
	}
	policy.KeepPathToRoot = true
	a, err = w.PruneCheckpoints(ctx, w.project, ws.Parent, policy, false, wait)
	want = []core.CheckpointID{best[0].ID, best[1].ID}
	slices.Sort(want)
	if err != nil || !slices.Equal(pruned(a), want) {
		t.Fatalf("pruned: %+v, %v; want %v", a.Result.Prune, err, want)
	}
	if got := w.state(living.ID); got != core.WorkspaceReady {
		t.Errorf("the living one is %s", got)
	}
	_, err = w.PruneCheckpoints(ctx, w.project, ws.Parent, controller.RetentionPolicy{Policy: retention.Policy{KeepPathToRoot: true}}, true, wait)
	wantCode(t, err, core.CodeInvalidField)
	_, err = w.PruneCheckpoints(ctx, w.project, core.NewID[core.CheckpointID](), policy, true, wait)
	wantCode(t, err, core.CodeCheckpointNotFound)
	w.consistent()
}

// TestPruneLeavesWhatCameIntoUse forks a checkpoint between a plan and its execution.
func TestPruneLeavesWhatCameIntoUse(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ws := w.create("main")
	first := w.checkpoint(ws.ID)
	list := []core.CheckpointID{first.ID}
	for range 105 { // more than one batch
		list = append(list, w.checkpoint(ws.ID).ID)
	}
	w.end(ws.ID)
	g := w.gate(runnertest.PointDeleteCheckpoint) // the first batch, that of the newest, is written, the second not
	a, err := w.PruneCheckpoints(ctx, w.project, first.ID, controller.RetentionPolicy{Policy: retention.Policy{MaxAge: time.Nanosecond}}, false, 0)
	if err != nil || a.Done {
		t.Fatalf("%+v, %v", a, err)
	}
	<-g.reached
	used := list[0]
	child := w.fork(used, 1)[0]
	close(g.open)
	end, err := w.Operation(ctx, w.project, a.Operation.ID, wait)
	if err != nil || len(end.Result.Prune.Items) != len(list) || len(pruned(end)) != len(list)-1 || slices.Contains(pruned(end), used) {
		t.Fatalf("%+v, %v", end.Result.Prune, err)
	}
	if got := w.state(child.ID); got != core.WorkspaceReady {
		t.Errorf("the child is %s", got)
	}
	w.consistent()
}

// TestRetention stores a policy and lets it work.
func TestRetention(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ws := w.create("main")
	var last controller.Checkpoint
	for i := range 4 {
		last = w.scored(ws.ID, float64(i))
	}
	_, err := w.Retention(ctx, w.project, ws.Parent)
	wantCode(t, err, core.CodeRetentionNotFound)
	policy := controller.RetentionPolicy{Annotation: "score", Policy: retention.Policy{KeepBest: 1}}
	for version := int64(1); version <= 2; version++ {
		if got, err := w.PutRetention(ctx, w.project, ws.Parent, policy); err != nil || got.Version != version || got.Policy != policy {
			t.Fatalf("%+v, %v", got, err)
		}
	}
	// A periodic job is due at its interval, and when somebody is elected: let somebody be.
	w.stop()
	w.Controller, w.stop = w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
	eventually(t, "all but the best are gone", func() bool {
		return w.number(`SELECT count(*) FROM checkpoints WHERE kind = 'user' AND state = 'captured'`) == 1
	})
	if _, err := w.Tree.Checkpoint(ctx, w.project, last.ID); err != nil {
		t.Error(err)
	}
	for range 2 { // idempotent
		if err := w.DeleteRetention(ctx, w.project, ws.Parent); err != nil {
			t.Error(err)
		}
	}
	eventually(t, "the operations have ended", func() bool {
		return w.number(`SELECT count(*) FROM operations WHERE state IN ('pending', 'running')`) == 0
	})
	w.consistent()
}

// TestDeleteWhileSuspending races deletions of the checkpoint that a workspace is being suspended as.
func TestDeleteWhileSuspending(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	for range 5 {
		var group sync.WaitGroup
		ctx, cancel := context.WithCancel(t.Context())
		group.Go(func() {
			for ctx.Err() == nil {
				list, err := w.Tree.Checkpoints(t.Context(), w.project, controller.CheckpointFilter{Page: controller.Page{Limit: 1}, Kind: controller.KindUser, States: []core.CheckpointState{core.CheckpointCaptured}})
				if err == nil && len(list) == 1 {
					_ = w.DeleteCheckpoint(t.Context(), w.project, list[0].ID) // refused, or it is not that one
				}
			}
		})
		w.suspend(ws.ID)
		cancel()
		group.Wait()
		w.resume(ws.ID)
	}
	w.consistent()
}

// TestPruneOnASilentRunner deletes checkpoints of a runner that no longer answers: it is not called for each of them.
func TestPruneOnASilentRunner(t *testing.T) {
	t.Parallel()
	w := quiet(t)
	ws := w.create("main")
	const n = 40
	for range n {
		w.checkpoint(ws.ID)
	}
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointDeleteCheckpoint {
			return runnertest.ErrVanish
		}
		return nil
	})
	a, err := w.PruneCheckpoints(t.Context(), w.project, ws.Parent, controller.RetentionPolicy{Policy: retention.Policy{MaxAge: time.Nanosecond}}, false, wait)
	if err != nil || !a.Done || len(a.Result.Prune.Items) < n-1 {
		t.Fatalf("%+v, %v", a, err)
	}
	if calls := w.runner.Calls(runnertest.PointDeleteCheckpoint); calls == 0 || calls > 16 { // eight at a time
		t.Errorf("the runner was called %d times", calls)
	}
}
