package controller_test

import (
	"context"
	"net/netip"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

func (w *world) suspend(id core.WorkspaceID) controller.Workspace {
	w.t.Helper()
	a, err := w.Suspend(w.t.Context(), w.project, id, wait)
	if err != nil || !a.Done || a.Result.Workspace == nil || a.Result.Workspace.State != core.WorkspaceSuspended {
		w.t.Fatalf("suspend: %+v, %v", a, err)
	}
	return *a.Result.Workspace
}

func (w *world) resume(id core.WorkspaceID) controller.Workspace {
	w.t.Helper()
	a, err := w.Resume(w.t.Context(), w.project, id, wait)
	if err != nil || !a.Done || a.Result.Workspace == nil || a.Result.Workspace.State != core.WorkspaceReady {
		w.t.Fatalf("resume: %+v, %v", a, err)
	}
	return *a.Result.Workspace
}

// TestSuspendAndResume follows one workspace: its machine is gone while it is suspended, and what ran in it goes on afterwards
// under its old names, in a new identity. Tokens of before are dead.
func TestSuspendAndResume(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ws := w.create("main")
	if _, err := w.Exec(ctx, w.project, ws.ID, controller.ExecRequest{Command: []string{"true"}}); err != nil {
		t.Fatal(err)
	}
	session, err := w.StartSession(ctx, w.project, ws.ID, controller.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	port, err := w.Ports().Open(ctx, w.project, ws.ID, 80, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	token, _, err := w.Attach(ctx, w.project, session.ID)
	if err != nil {
		t.Fatal(err)
	}

	asleep := w.suspend(ws.ID)
	if asleep.Sandbox.ID != "" || asleep.Head == ws.Head || asleep.Epoch != ws.Epoch || len(w.runner.Sandboxes()) != 0 {
		t.Fatalf("suspended: %+v; %d sandboxes", asleep, len(w.runner.Sandboxes()))
	}
	w.suspend(ws.ID) // idempotent
	w.beat()
	w.consistent()
	_, err = w.Exec(ctx, w.project, ws.ID, controller.ExecRequest{Command: []string{"true"}})
	wantCode(t, err, core.CodeWorkspaceNotReady)
	_, err = w.Session(ctx, w.project, session.ID, 0)
	wantCode(t, err, core.CodeWorkspaceNotReady)
	_, err = w.CreateCheckpoint(ctx, w.project, ws.ID, controller.CheckpointRequest{}, wait)
	wantCode(t, err, core.CodeWorkspaceNotReady)
	w.fork(asleep.Head, 1) // its checkpoint is one like any other

	back := w.resume(ws.ID)
	id, old := back.Sandbox.Identity, ws.Sandbox.Identity
	if back.Epoch != ws.Epoch+1 || back.Head != asleep.Head || id.Generation == old.Generation || id.MachineID == old.MachineID || id.MAC == old.MAC {
		t.Fatalf("resumed: %+v", back)
	}
	if again := w.resume(ws.ID); again.Epoch != back.Epoch {
		t.Errorf("a second resume made epoch %d", again.Epoch)
	}
	view, err := w.Session(ctx, w.project, session.ID, 0)
	if err != nil || view.Guest.State == controller.GuestExited || view.Epoch != back.Epoch {
		t.Errorf("its session: %+v, %v", view, err)
	}
	if list, err := w.Sessions(ctx, w.project, ws.ID, controller.Page{Limit: 10}); err != nil || len(list) != 2 {
		t.Errorf("its sessions: %+v, %v", list, err)
	}
	if ports := w.runner.Ports(back.Sandbox.ID); len(ports) != 1 || ports[0].ID != port.ID {
		t.Errorf("its ports: %+v", ports)
	}
	_, _, _, err = w.UseAttachToken(ctx, session.ID, token)
	wantCode(t, err, core.CodeUnauthenticated)
	if cp := w.checkpoint(ws.ID); cp.Parent != asleep.Head {
		t.Errorf("the tree does not grow on from where it was suspended: %+v", cp)
	}
	w.consistent()

	w.suspend(ws.ID)
	if a, err := w.Terminate(ctx, w.project, ws.ID, wait); err != nil || a.Result.Workspace.State != core.WorkspaceTerminated {
		t.Errorf("terminate it suspended: %+v, %v", a, err)
	}
	_, err = w.Resume(ctx, w.project, ws.ID, wait)
	wantCode(t, err, core.CodeWorkspaceNotReady)
	w.consistent()
}

// TestSuspendInsists loses the runner after it has stopped the machine: heartbeats do not take the workspace for lost, and the
// suspension is written when the runner is back, however long that takes.
func TestSuspendInsists(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.RunnerRetry = 50 * time.Millisecond })
	ws := w.create("main")
	w.beat()
	tried := make(chan struct{}, 100)
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointCapture+runnertest.Done {
			tried <- struct{}{}
			return runnertest.ErrVanish
		}
		return nil
	})
	a, err := w.Suspend(t.Context(), w.project, ws.ID, 0)
	if err != nil || a.Done {
		t.Fatalf("%+v, %v", a, err)
	}
	<-tried
	for range 3 {
		w.beat()
	}
	if got := w.state(ws.ID); got != core.WorkspaceCheckpointing {
		t.Fatalf("while it is being suspended it is %s", got)
	}
	w.runner.Hook(nil)
	end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
	if err != nil || end.Operation.State != core.OperationSucceeded || w.state(ws.ID) != core.WorkspaceSuspended {
		t.Fatalf("%+v, %v", end.Operation, err)
	}
	w.resume(ws.ID)
	w.consistent()
}

// TestUnknownCapture has a runner that captured a checkpoint although the operation failed: the parent of the next one is that of the
// controller's row, and it can be forked.
func TestUnknownCapture(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	first := w.checkpoint(ws.ID)
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointCapture+runnertest.Done {
			return core.Errorf(core.Internal, core.CodeInternal, "it was captured, and something else failed")
		}
		return nil
	})
	if _, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, wait); err == nil {
		t.Fatal("the operation did not fail")
	}
	w.runner.Hook(nil)
	next := w.checkpoint(ws.ID)
	if next.Parent != first.ID {
		t.Errorf("its parent is %s instead of %s", next.Parent, first.ID)
	}
	w.fork(next.ID, 1)
	w.fork(w.suspend(ws.ID).Head, 1)
	w.consistent()
}

// TestResumeFails leaves the workspace suspended.
func TestResumeFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	w.suspend(ws.ID)
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointChild {
			return core.Errorf(core.Unavailable, core.CodeResealFailed, "the clock could not be set")
		}
		return nil
	})
	_, err := w.Resume(t.Context(), w.project, ws.ID, wait)
	wantCode(t, err, core.CodeResealFailed)
	if got := w.state(ws.ID); got != core.WorkspaceSuspended {
		t.Errorf("it is %s", got)
	}
	w.runner.Hook(nil)
	w.consistent()
	if back := w.resume(ws.ID); back.Epoch != ws.Epoch+1 {
		t.Errorf("epoch %d", back.Epoch)
	}
	w.consistent()
}

// TestAutoResume uses a suspended workspace from many sides at once: it is resumed once, for all of them. One that is just
// being suspended is resumed when it is.
func TestAutoResume(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	ws := w.create("main")
	on := true
	if _, err := w.PatchWorkspace(ctx, w.project, ws.ID, controller.WorkspacePatch{AutoResume: &on}); err != nil {
		t.Fatal(err)
	}
	session, err := w.StartSession(ctx, w.project, ws.ID, controller.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	w.suspend(ws.ID)
	var group sync.WaitGroup
	for i := range 9 {
		group.Go(func() {
			var err error
			switch i % 3 {
			case 0:
				_, err = w.Exec(ctx, w.project, ws.ID, controller.ExecRequest{Command: []string{"true"}})
			case 1:
				_, err = w.Guest(ctx, w.project, ws.ID)
			case 2:
				_, _, err = w.Attach(ctx, w.project, session.ID)
			}
			if err != nil {
				t.Errorf("use %d: %v", i, err)
			}
		})
	}
	group.Wait()
	if n := w.number(`SELECT count(*) FROM operations WHERE kind = 'resume_workspace'`); n != 1 {
		t.Errorf("%d resumes", n)
	}
	w.consistent()

	g := w.gate(runnertest.PointCapture)
	if _, err := w.Suspend(ctx, w.project, ws.ID, 0); err != nil {
		t.Fatal(err)
	}
	<-g.reached
	used := make(chan error, 1)
	go func() {
		_, err := w.Exec(ctx, w.project, ws.ID, controller.ExecRequest{Command: []string{"true"}})
		used <- err
	}()
	close(g.open)
	if err := <-used; err != nil {
		t.Errorf("use while it is being suspended: %v", err)
	}
	w.consistent()
}

// TestIdle lets four workspaces rest: only those that nobody uses are suspended or terminated.
func TestIdle(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.UseInterval = 50 * time.Millisecond })
	ctx := t.Context()
	make := func(name string, policy controller.IdlePolicy) core.WorkspaceID {
		a, err := w.CreateWorkspace(ctx, w.project, controller.CreateRequest{Name: name, Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}, IdlePolicy: policy}, wait)
		if err != nil || a.Result.Workspace.IdlePolicy != policy {
			t.Fatalf("%s: %+v, %v", name, a, err)
		}
		return a.Result.Workspace.ID
	}
	suspend := controller.IdlePolicy{IdleAfter: time.Hour, OnIdle: controller.IdleSuspend}
	always := make("always", controller.IdlePolicy{})
	running := make("running", suspend)
	if _, err := w.StartSession(ctx, w.project, running, controller.ExecRequest{Command: []string{"cat"}, StdinOpen: true}); err != nil {
		t.Fatal(err)
	}
	used := make("used", suspend)
	asleep := make("asleep", suspend)
	gone := make("gone", controller.IdlePolicy{IdleAfter: time.Hour, OnIdle: controller.IdleTerminate})
	if _, err := w.Processes(ctx, w.project, used); err != nil {
		t.Fatal(err)
	}
	lately := func(id core.WorkspaceID) bool {
		return w.number(`SELECT count(*) FROM workspace_uses WHERE workspace_id = $1 AND used_at > now() - interval '1 hour'`, id) == 1
	}
	eventually(t, "its use is recorded", func() bool { return lately(used) })
	// Two hours go by, in which one was used and in one a program ran.
	w.sql(`UPDATE sessions SET created_at = created_at - interval '2 hours'`)
	w.sql(`UPDATE workspaces SET ready_at = ready_at - interval '2 hours'`)
	eventually(t, "the unused ones rest", func() bool {
		return w.state(asleep) == core.WorkspaceSuspended && w.state(gone) == core.WorkspaceTerminated
	})
	eventually(t, "that a program runs is use", func() bool { return lately(running) })
	for _, id := range []core.WorkspaceID{always, running, used} {
		if got := w.state(id); got != core.WorkspaceReady {
			t.Errorf("%s is %s", id, got)
		}
	}
	if n := w.number(`SELECT count(*) FROM workspaces WHERE version > 1`); n != 0 {
		t.Errorf("use changed %d workspace rows", n)
	}
	w.sql(`UPDATE workspace_uses SET used_at = used_at - interval '2 hours' WHERE workspace_id = $1`, used)
	eventually(t, "the used one rests too", func() bool { return w.state(used) == core.WorkspaceSuspended })
	w.consistent()
}

// afterSession is a store that lets something happen between the first reading of a session's row and the next statement.
type afterSession struct {
	controller.Store
	once sync.Once
	then func()
}

func (s *afterSession) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	return s.Store.InTx(ctx, scope, func(tx controller.AllTx) error { return fn(&afterSessionTx{tx, s}) })
}

type afterSessionTx struct {
	controller.AllTx
	store *afterSession
}

func (t *afterSessionTx) Session(ctx context.Context, id core.SessionID) (controller.Session, error) {
	row, err := t.AllTx.Session(ctx, id)
	t.store.once.Do(t.store.then)
	return row, err
}

// TestResumeWhileASessionIsLookedUp moves a session on to another sandbox between two statements of a transaction that reads it.
func TestResumeWhileASessionIsLookedUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	session, err := w.StartSession(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	w.suspend(ws.ID)
	other, _ := w.startOn(&afterSession{Store: w.store, then: func() { w.resume(ws.ID) }}, controller.Config{})
	row, now, err := other.ReachSession(t.Context(), w.project, session.ID)
	if err != nil || now.Epoch != ws.Epoch+1 || row.SandboxID != now.Sandbox.ID {
		t.Errorf("%+v in %+v: %v", row, now, err)
	}
}
