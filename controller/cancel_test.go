package controller_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestCancelLeavesTheNextCapture: a fork of a workspace is canceled after its capture, while another operation captures the workspace. What
// the cancel takes back is not that capture.
func TestCancelLeavesTheNextCapture(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	ctx := t.Context()
	forking, capturing, release := make(chan struct{}), make(chan struct{}), make(chan struct{})
	over := make(chan struct{})
	t.Cleanup(func() { close(over) })
	begun, captured := sync.OnceFunc(func() { close(forking) }), sync.OnceFunc(func() { close(capturing) })
	w.runner.Hook(func(_ context.Context, point, _ string) error {
		switch point {
		case runnertest.PointFork:
			begun()
			<-over
			return core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "it takes too long")
		case runnertest.PointCapture:
			select {
			case <-forking: // the second capture
				captured()
				select {
				case <-release:
				case <-over:
				}
			default:
			}
		}
		return nil
	})
	a, err := w.ForkWorkspace(ctx, w.project, ws.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	<-forking
	eventually(t, "the parent is ready again", func() bool { return w.state(ws.ID) == core.WorkspaceReady })
	suspension := make(chan error, 1)
	go func() {
		_, err := w.Suspend(ctx, w.project, ws.ID, wait)
		suspension <- err
	}()
	<-capturing
	got, err := w.CancelOperation(ctx, w.project, a.Operation.ID, wait)
	if core.CodeOf(err) != core.CodeOperationCanceled && (err != nil || !got.Operation.State.Done()) {
		t.Fatalf("%+v, %v", got, err)
	}
	if got := w.state(ws.ID); got != core.WorkspaceCheckpointing {
		t.Errorf("while it is captured for the suspension the workspace is %s", got)
	}
	close(release)
	if err := <-suspension; err != nil {
		t.Error(err)
	}
	if got := w.state(ws.ID); got != core.WorkspaceSuspended {
		t.Errorf("after its suspension the workspace is %s", got)
	}
	w.runner.Hook(nil)
	w.resume(ws.ID)
	w.consistent()
}

// TestCanceledCaptureIsResumed: a fork of a workspace is canceled while it captures, and its controller dies. The next controller finishes the
// capture, because nobody knows how far the runner is. The checkpoint stays, the workspace goes on, and nothing is forked.
func TestCanceledCaptureIsResumed(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	g := w.gate(runnertest.PointCapture)
	store := &dying{Store: w.store}
	store.left.Store(-1)
	first, stop := w.startOn(store, controller.Config{LoopInterval: time.Hour, OperationLease: time.Hour, ShutdownGrace: time.Millisecond})
	a, err := first.ForkWorkspace(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 1}, 0)
	if err != nil {
		t.Fatal(err)
	}
	<-g.reached
	if _, err := w.CancelOperation(t.Context(), w.project, a.Operation.ID, 0); err != nil {
		t.Fatal(err)
	}
	store.dead.Store(true)
	stop()
	w.sql(`UPDATE operations SET lease_expires_at = now() WHERE state = 'running'`) // time goes by
	close(g.open)
	eventually(t, "the operation has ended", func() bool {
		return w.number(`SELECT count(*) FROM operations WHERE state IN ('pending', 'running')`) == 0
	})
	end, err := w.Operation(t.Context(), w.project, a.Operation.ID, 0)
	if err != nil || end.Operation.Problem == nil || end.Operation.Problem.Code != core.CodeOperationCanceled {
		t.Errorf("the operation: %+v, %v", end.Operation, err)
	}
	if n := w.number(`SELECT count(*) FROM checkpoints WHERE state = 'captured' AND parent_id IS NOT NULL`); n != 1 {
		t.Errorf("%d checkpoints are captured, want 1", n)
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("the workspace is %s", got)
	}
	if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'ready'`); n != 1 {
		t.Errorf("%d workspaces are ready, want only the parent", n)
	}
	w.consistent()
}

// TestHeadOfARestore: while a suspended workspace is restored in place, its head cannot be deleted: if the restore fails, the head is all that
// there is of it.
func TestHeadOfARestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	first := w.checkpoint(ws.ID)
	asleep := w.suspend(ws.ID)
	ctx := t.Context()
	forking, release := make(chan struct{}), make(chan struct{})
	w.runner.Hook(func(_ context.Context, point, _ string) error {
		if point != runnertest.PointFork {
			return nil
		}
		close(forking)
		<-release
		return core.Errorf(core.Internal, core.CodeForkFailed, "no")
	})
	restored := make(chan error, 1)
	go func() {
		_, err := w.RestoreWorkspace(ctx, w.project, ws.ID, first.ID, wait)
		restored <- err
	}()
	<-forking
	wantCode(t, w.DeleteCheckpoint(ctx, w.project, asleep.Head), core.CodeCheckpointInUse)
	close(release)
	if err := <-restored; err == nil {
		t.Error("the restore has succeeded, so the test shows nothing")
	}
	w.runner.Hook(nil)
	if got := w.state(ws.ID); got != core.WorkspaceSuspended {
		t.Errorf("after the restore that failed the workspace is %s", got)
	}
	if back := w.resume(ws.ID); back.Head != asleep.Head {
		t.Errorf("it was resumed from %s, not from its head %s", back.Head, asleep.Head)
	}
	w.consistent()
}
