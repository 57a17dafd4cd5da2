package controller_test

import (
	"context"
	"testing"

	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestRestoreSuspended rolls a suspended workspace back: it runs afterwards, at the checkpoint. If that fails, it stays suspended.
func TestRestoreSuspended(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	asleep := w.suspend(ws.ID)
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointChild {
			return core.Errorf(core.Unavailable, core.CodeResealFailed, "the clock could not be set")
		}
		return nil
	})
	_, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait)
	wantCode(t, err, core.CodeResealFailed)
	if got := w.state(ws.ID); got != core.WorkspaceSuspended {
		t.Fatalf("it is %s", got)
	}
	w.runner.Hook(nil)
	w.consistent()
	a, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait)
	if err != nil || !a.Done {
		t.Fatalf("%+v, %v", a, err)
	}
	now := *a.Result.Workspace
	if now.State != core.WorkspaceReady || now.Epoch != asleep.Epoch+1 || now.Head != cp.ID || now.Sandbox.ID == "" || len(w.runner.Sandboxes()) != 1 {
		t.Errorf("restored: %+v; %d sandboxes", now, len(w.runner.Sandboxes()))
	}
	w.consistent()
	w.fork(w.suspend(ws.ID).Head, 1)
	w.consistent()
}
