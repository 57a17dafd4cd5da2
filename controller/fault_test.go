package controller_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// sql runs a statement as the owner, past all policies.
func (w *world) sql(statement string, args ...any) {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(w.t.Context())) }()
	if _, err := conn.Exec(w.t.Context(), statement, args...); err != nil {
		w.t.Fatalf("%s: %v", statement, err)
	}
}

func (w *world) number(query string, args ...any) int {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(w.t.Context())) }()
	var n int
	if err := conn.QueryRow(w.t.Context(), query, args...).Scan(&n); err != nil {
		w.t.Fatalf("%s: %v", query, err)
	}
	return n
}

// consistent checks what must hold whenever nothing is under way: the runner has exactly the sandboxes of living
// workspaces, no operation is open, every ready workspace has a complete reseal of its generation.
func (w *world) consistent() {
	w.t.Helper()
	w.beat()
	for what, query := range map[string]string{
		"operations that did not end":               `SELECT count(*) FROM operations WHERE state IN ('pending', 'running')`,
		"workspaces under way":                      `SELECT count(*) FROM workspaces WHERE state IN ('creating', 'restoring', 'quarantined', 'checkpointing', 'terminating')`,
		"checkpoints under way":                     `SELECT count(*) FROM checkpoints WHERE state = 'capturing'`,
		"living sandboxes of dead workspaces":       `SELECT count(*) FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id WHERE s.ended_at IS NULL AND (w.ended_at IS NOT NULL OR w.sandbox_id <> s.id)`,
		"ready workspaces without a living sandbox": `SELECT count(*) FROM workspaces w WHERE w.state = 'ready' AND NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.id = w.sandbox_id AND s.ended_at IS NULL)`,
		"ready workspaces without a complete reseal": `SELECT count(*) FROM workspaces w JOIN sandboxes s ON s.id = w.sandbox_id WHERE w.state = 'ready'
			AND NOT EXISTS (SELECT 1 FROM reseal_reports r WHERE r.sandbox_id = s.id AND r.complete AND r.generation = s.generation)`,
		"ready workspaces without an attestation of their epoch": `SELECT count(*) FROM workspaces w WHERE w.state = 'ready'
			AND NOT EXISTS (SELECT 1 FROM attestations a WHERE a.workspace_id = w.id AND a.epoch = w.epoch AND a.sandbox_id = w.sandbox_id)`,
		"ports of ended workspaces": portsOfEnded,
		"attestations that the audit log does not name": `SELECT count(*) FROM attestations a
			WHERE NOT EXISTS (SELECT 1 FROM audit_records r WHERE r.object_id = a.workspace_id AND r.detail ->> 'attestation' = a.digest)`,
	} {
		if n := w.number(query); n != 0 {
			w.t.Errorf("%d %s", n, what)
		}
	}
	living := w.number(`SELECT count(*) FROM sandboxes WHERE ended_at IS NULL`)
	if held := w.runner.Sandboxes(); len(held) != living {
		w.t.Errorf("the runner holds %d sandboxes, the rows say %d", len(held), living)
	}
	kept := w.number(`SELECT count(*) FROM checkpoints WHERE state IN ('captured', 'sealed')`)
	if held := w.runner.Checkpoints(); len(held) != kept {
		w.t.Errorf("the runner holds %d checkpoints, the rows say %d", len(held), kept)
	}
}

// gate blocks at a point, the first time, until it is opened.
type gate struct {
	reached, open chan struct{}
	once          sync.Once
}

func (w *world) gate(point string) *gate { return w.hold(point, nil) }

// hold blocks the first passage of a point until the gate opens. That passage then fails with the problem; nil lets it pass.
func (w *world) hold(point string, problem error) *gate {
	g := &gate{reached: make(chan struct{}), open: make(chan struct{})}
	w.runner.Hook(func(ctx context.Context, at, _ string) error {
		if at != point {
			return nil
		}
		first := false
		g.once.Do(func() { first = true })
		if !first {
			return nil
		}
		close(g.reached)
		select {
		case <-g.open:
		case <-ctx.Done():
		}
		return problem
	})
	return g
}

// kinds starts every kind of operation, in a world with a ready workspace and a checkpoint of it.
func kinds() map[string]struct {
	point string // that it passes on the runner
	start func(w *world, ws controller.Workspace, cp controller.Checkpoint) (controller.Answer, error)
} {
	type kind = struct {
		point string
		start func(w *world, ws controller.Workspace, cp controller.Checkpoint) (controller.Answer, error)
	}
	return map[string]kind{
		"create": {runnertest.PointFork, func(w *world, _ controller.Workspace, _ controller.Checkpoint) (controller.Answer, error) {
			return w.CreateWorkspace(w.t.Context(), w.project, controller.CreateRequest{Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}}, 0)
		}},
		"create with a new template": {runnertest.PointTemplate, func(w *world, _ controller.Workspace, _ controller.Checkpoint) (controller.Answer, error) {
			return w.CreateWorkspace(w.t.Context(), w.project, controller.CreateRequest{Resources: core.Resources{VCPUs: 2, MemoryMiB: 256, DiskGiB: 1}}, 0)
		}},
		"checkpoint": {runnertest.PointCapture, func(w *world, ws controller.Workspace, _ controller.Checkpoint) (controller.Answer, error) {
			return w.CreateCheckpoint(w.t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, 0)
		}},
		"fork": {runnertest.PointFork, func(w *world, _ controller.Workspace, cp controller.Checkpoint) (controller.Answer, error) {
			return w.ForkCheckpoint(w.t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 3}, 0)
		}},
		"fork of a workspace, capturing": {runnertest.PointCapture, func(w *world, ws controller.Workspace, _ controller.Checkpoint) (controller.Answer, error) {
			return w.ForkWorkspace(w.t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 2}, 0)
		}},
		"fork of a workspace, growing": {runnertest.PointFork, func(w *world, ws controller.Workspace, _ controller.Checkpoint) (controller.Answer, error) {
			return w.ForkWorkspace(w.t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 2}, 0)
		}},
		"restore in place": {runnertest.PointFork, func(w *world, ws controller.Workspace, cp controller.Checkpoint) (controller.Answer, error) {
			return w.RestoreWorkspace(w.t.Context(), w.project, ws.ID, cp.ID, 0)
		}},
		"restore in place, dropping": {runnertest.PointDeleteSandbox, func(w *world, ws controller.Workspace, cp controller.Checkpoint) (controller.Answer, error) {
			return w.RestoreWorkspace(w.t.Context(), w.project, ws.ID, cp.ID, 0)
		}},
		"restore a checkpoint": {runnertest.PointFork, func(w *world, _ controller.Workspace, cp controller.Checkpoint) (controller.Answer, error) {
			return w.RestoreCheckpoint(w.t.Context(), w.project, cp.ID, controller.ForkRequest{Name: "again"}, 0)
		}},
		"suspend": {runnertest.PointCapture, func(w *world, ws controller.Workspace, _ controller.Checkpoint) (controller.Answer, error) {
			return w.Suspend(w.t.Context(), w.project, ws.ID, 0)
		}},
		"resume": {runnertest.PointFork, func(w *world, ws controller.Workspace, _ controller.Checkpoint) (controller.Answer, error) {
			if a, err := w.Suspend(w.t.Context(), w.project, ws.ID, wait); err != nil || !a.Done {
				return a, err
			}
			return w.Resume(w.t.Context(), w.project, ws.ID, 0)
		}},
		"step, forking":   {runnertest.PointFork, startStep},
		"step, capturing": {runnertest.PointCapture, startStep},
		"step, dropping":  {runnertest.PointDeleteSandbox, startStep},
		"terminate": {runnertest.PointDeleteSandbox, func(w *world, ws controller.Workspace, _ controller.Checkpoint) (controller.Answer, error) {
			return w.Terminate(w.t.Context(), w.project, ws.ID, 0)
		}},
	}
}

// TestResume stops the controller in the middle of every kind of operation, before and after the runner has done its part,
// and lets another one finish it.
func TestResume(t *testing.T) {
	t.Parallel()
	for name, kind := range kinds() {
		for _, when := range []string{"", runnertest.Done} {
			t.Run(name+when, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.ShutdownGrace = time.Millisecond })
				ws := w.create("main")
				cp := w.checkpoint(ws.ID)
				g := w.gate(kind.point + when)
				a, err := kind.start(w, ws, cp)
				if err != nil || a.Done {
					t.Fatalf("%+v, %v", a, err)
				}
				<-g.reached
				stopped := make(chan struct{})
				go func() {
					w.stop()
					close(stopped)
				}()
				eventually(t, "the lease is given up", func() bool {
					return w.number(`SELECT count(*) FROM operations WHERE state = 'running' AND lease_expires_at > now()`) == 0
				})
				<-stopped
				second, _ := w.start(controller.Config{LoopInterval: 20 * time.Millisecond})
				close(g.open)
				w.Controller = second
				end, err := second.Operation(t.Context(), w.project, a.Operation.ID, wait)
				if err != nil || end.Operation.State != core.OperationSucceeded || end.Operation.LeaseEpoch < 2 {
					t.Fatalf("resumed: %+v, %v", end.Operation, err)
				}
				w.consistent()
			})
		}
	}
}

// TestRunnerDies cuts the runner's connection in the middle of every kind of operation: it was repeated, and did its work once.
func TestRunnerDies(t *testing.T) {
	t.Parallel()
	for name, kind := range kinds() {
		for _, when := range []string{"", runnertest.Done} {
			t.Run(name+when, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				ws := w.create("main")
				cp := w.checkpoint(ws.ID)
				var once sync.Once
				w.runner.Hook(func(_ context.Context, at, _ string) error {
					err := error(nil)
					if at == kind.point+when {
						once.Do(func() { err = runnertest.ErrVanish })
					}
					return err
				})
				a, err := kind.start(w, ws, cp)
				if err != nil {
					t.Fatal(err)
				}
				end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
				if err != nil || end.Operation.State != core.OperationSucceeded {
					t.Fatalf("%+v, %v", end.Operation, err)
				}
				w.consistent()
			})
		}
	}
}

// TestConnectionBreaksLate loses the runner's answer to a call that took longer than the controller insists: it asks again all
// the same.
func TestConnectionBreaksLate(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.RunnerRetry = 200 * time.Millisecond })
	cp := w.checkpoint(w.create("main").ID)
	var once sync.Once
	w.runner.Hook(func(ctx context.Context, at, _ string) error {
		err := error(nil)
		if at == runnertest.PointFork+runnertest.Done {
			once.Do(func() {
				select {
				case <-time.After(300 * time.Millisecond):
				case <-ctx.Done():
				}
				err = runnertest.ErrVanish
			})
		}
		return err
	})
	w.fork(cp.ID, 1)
	w.consistent()
}

// TestRunnerStaysAway ends every kind of operation with a clear error when the runner does not come back in time; when it does
// later, its heartbeat cleans up what it had begun.
func TestRunnerStaysAway(t *testing.T) {
	t.Parallel()
	for name, kind := range kinds() {
		if kind.point == runnertest.PointDeleteSandbox || name == "suspend" {
			continue // what stops a machine insists: TestSuspendInsists
		}
		if strings.HasPrefix(name, "step") {
			continue // the problem is that of an action, whose workspace is terminated: TestRunnerStaysAwayFromAStep
		}
		after := core.WorkspaceReady
		if name == "resume" {
			after = core.WorkspaceSuspended
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.RunnerRetry = 200 * time.Millisecond })
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			w.runner.Hook(func(_ context.Context, at, _ string) error {
				if at == kind.point+runnertest.Done || strings.HasPrefix(at, runnertest.PointDeleteSandbox) {
					return runnertest.ErrVanish // it did it, and nobody hears
				}
				return nil
			})
			a, err := kind.start(w, ws, cp)
			if err != nil {
				t.Fatal(err)
			}
			end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
			if err != nil || end.Operation.State != core.OperationFailed || end.Operation.Problem.Code != core.CodeRunnerUnreachable {
				t.Fatalf("%+v, %v", end.Operation, err)
			}
			if got := w.state(ws.ID); got != after {
				t.Errorf("the workspace is %s", got)
			}
			w.runner.Hook(nil)
			w.beat()
			w.consistent()
		})
	}
}

func TestClientHangsUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	g := w.gate(runnertest.PointFork)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() {
		_, err := w.ForkCheckpoint(ctx, w.project, cp.ID, controller.ForkRequest{Count: 2, Name: "child"}, wait)
		done <- err
	}()
	<-g.reached
	cancel()
	wantCode(t, <-done, core.CodeCanceled)
	close(g.open)
	eventually(t, "the children are ready", func() bool {
		list, err := w.Workspaces(t.Context(), w.project, controller.WorkspaceFilter{Page: controller.Page{Limit: 10}, Parent: cp.ID, States: []core.WorkspaceState{core.WorkspaceReady}})
		return err == nil && len(list) == 2
	})
	w.consistent()
}

func TestSomeChildrenFail(t *testing.T) {
	t.Parallel()
	for _, all := range []bool{false, true} {
		t.Run(fmt.Sprintf("all_or_nothing=%v", all), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			cp := w.checkpoint(w.create("main").ID)
			n := 0
			var mu sync.Mutex
			w.runner.Hook(func(_ context.Context, at, _ string) error {
				mu.Lock()
				defer mu.Unlock()
				if at == runnertest.PointChild {
					if n++; n == 2 {
						return core.Errorf(core.Unavailable, core.CodeVMMFailed, "qemu ended with status 1")
					}
				}
				return nil
			})
			a, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 4, Name: "c", AllOrNothing: all}, wait)
			ready := w.number(`SELECT count(*) FROM workspaces WHERE state = 'ready'`)
			failed := w.number(`SELECT count(*) FROM workspaces WHERE state = 'failed' AND failure_message LIKE '%qemu ended with status 1%'`)
			if all {
				wantCode(t, err, core.CodeForkFailed)
				if ready != 1 || failed != 4 {
					t.Errorf("%d ready, %d failed", ready, failed)
				}
			} else {
				problems := 0
				for _, child := range a.Result.Children {
					if child.Problem != nil && child.Problem.Code == core.CodeVMMFailed && child.Workspace == nil {
						problems++
					}
				}
				if err != nil || problems != 1 || len(a.Result.Children) != 4 || ready != 4 || failed != 1 {
					t.Errorf("%+v, %v; %d ready, %d failed", a.Result, err, ready, failed)
				}
			}
			w.consistent()
		})
	}
}

// TestUnsealedIsNotReady answers with sandboxes whose reseal is not proven: none of them is ever ready.
func TestUnsealedIsNotReady(t *testing.T) {
	t.Parallel()
	for name, tamper := range map[string]func(*runnerapi.ChildResult){
		"incomplete":         func(r *runnerapi.ChildResult) { r.Reseal.Complete = false },
		"no report":          func(r *runnerapi.ChildResult) { r.Reseal = nil },
		"another generation": func(r *runnerapi.ChildResult) { r.Reseal.Generation = "old" },
		"quarantined":        func(r *runnerapi.ChildResult) { r.Sandbox.State = runnerapi.SandboxQuarantined },
		"another sandbox":    func(r *runnerapi.ChildResult) { r.SandboxID = core.NewID[core.SandboxID]() },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			w.runner.Tamper(tamper)
			_, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
			wantCode(t, err, core.CodeForkFailed)
			if _, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait); err == nil {
				t.Error("a restore succeeded")
			}
			now, err := w.Workspace(t.Context(), w.project, ws.ID)
			if err != nil || now.State != core.WorkspaceReady || now.Epoch != 1 || now.Sandbox.ID != ws.Sandbox.ID {
				t.Errorf("after a failed restore nothing must have changed: %+v, %v", now, err)
			}
			w.runner.Tamper(nil)
			w.consistent()
		})
	}
}

// TestLeaseIsLost lets another controller take over while the first waits for the runner: only one of them writes.
func TestLeaseIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.OperationLease = time.Hour })
	cp := w.checkpoint(w.create("main").ID)
	g := w.gate(runnertest.PointFork + runnertest.Done)
	a, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, 0)
	if err != nil {
		t.Fatal(err)
	}
	<-g.reached
	_, stop := w.start(controller.Config{OperationLease: time.Hour})
	defer stop()
	w.sql(`UPDATE operations SET lease_owner = 'gone', lease_expires_at = now() - interval '1 s' WHERE state = 'running'`)
	end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait) // claimed by the loop of the other one, under another epoch
	if err != nil || end.Operation.State != core.OperationSucceeded || end.Operation.LeaseEpoch != 2 {
		t.Fatalf("%+v, %v", end.Operation, err)
	}
	before := w.number(`SELECT count(*) FROM reseal_reports`)
	close(g.open)
	w.stop() // the first task has ended too
	stop()
	if after := w.number(`SELECT count(*) FROM reseal_reports`); after != before || before != 3 {
		t.Errorf("reports: %d, then %d", before, after)
	}
	if n := len(w.runner.Sandboxes()); n != 3 {
		t.Errorf("%d sandboxes", n)
	}
}

// TestSoleController resumes what an earlier process left, though the lease of that has an hour to go.
func TestSoleController(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.OperationLease = time.Hour })
	cp := w.checkpoint(w.create("main").ID)
	g := w.gate(runnertest.PointFork + runnertest.Done)
	a, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, 0)
	if err != nil {
		t.Fatal(err)
	}
	<-g.reached
	_, stop := w.start(controller.Config{OperationLease: time.Hour, Sole: true})
	defer stop()
	end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
	if err != nil || end.Operation.State != core.OperationSucceeded || end.Operation.LeaseEpoch != 2 {
		t.Fatalf("%+v, %v", end.Operation, err)
	}
	close(g.open)
}

func TestTerminateWhileItIsMade(t *testing.T) {
	t.Parallel()
	for name, point := range map[string]string{
		"before the template": runnertest.PointTemplate, "before the fork": runnertest.PointFork, "after the fork": runnertest.PointFork + runnertest.Done,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			g := w.gate(point)
			a, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}}, 0)
			if err != nil {
				t.Fatal(err)
			}
			<-g.reached
			id := a.Operation.WorkspaceID
			if a, err := w.Terminate(t.Context(), w.project, id, wait); err != nil || a.Result.Workspace.State != core.WorkspaceTerminated {
				t.Fatalf("%+v, %v", a, err)
			}
			close(g.open)
			end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
			if err != nil || end.Operation.State != core.OperationFailed || end.Operation.Problem.Code != core.CodeStateConflict {
				t.Errorf("%+v, %v", end.Operation, err)
			}
			if got := w.state(id); got != core.WorkspaceTerminated {
				t.Errorf("it came back to life as %s", got)
			}
			w.consistent()
		})
	}
}

func TestTerminateWhileItActs(t *testing.T) {
	t.Parallel()
	for name, kind := range kinds() {
		if kind.point == runnertest.PointDeleteSandbox || strings.HasPrefix(name, "create") || name == "fork" || name == "restore a checkpoint" {
			continue // these do not act on the workspace
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			g := w.gate(kind.point)
			a, err := kind.start(w, ws, cp)
			if err != nil {
				t.Fatal(err)
			}
			<-g.reached
			if a, err := w.Terminate(t.Context(), w.project, ws.ID, wait); err != nil || a.Result.Workspace.State != core.WorkspaceTerminated {
				t.Fatalf("%+v, %v", a, err)
			}
			close(g.open)
			if _, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait); err != nil {
				t.Fatal(err)
			}
			if got := w.state(ws.ID); got != core.WorkspaceTerminated {
				t.Errorf("it is %s", got)
			}
			w.consistent()
		})
	}
}

func TestTerminateTwiceAtOnce(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	var group sync.WaitGroup
	for range 8 {
		group.Go(func() {
			a, err := w.Terminate(t.Context(), w.project, ws.ID, wait)
			if err != nil || a.Result.Workspace == nil || a.Result.Workspace.State != core.WorkspaceTerminated {
				t.Errorf("%+v, %v", a, err)
			}
		})
	}
	group.Wait()
	if n := w.number(`SELECT count(*) FROM operations WHERE kind = 'terminate_workspace'`); n != 1 {
		t.Errorf("%d operations", n)
	}
	w.consistent()
}

// TestTerminateInsists keeps a workspace terminating until its runner has really taken it down.
func TestTerminateInsists(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	w.runner.Stop()
	a, err := w.Terminate(t.Context(), w.project, ws.ID, 300*time.Millisecond)
	if err != nil || a.Done {
		t.Fatalf("%+v, %v", a, err)
	}
	if got := w.state(ws.ID); got != core.WorkspaceTerminating {
		t.Errorf("it is %s although its VM runs", got)
	}
	if err := w.runner.Listen(); err != nil {
		t.Fatal(err)
	}
	if end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait); err != nil || end.Operation.State != core.OperationSucceeded {
		t.Errorf("%+v, %v", end.Operation, err)
	}
	w.consistent()
}

// TestTerminatingIsNeverStuck ends a termination without its effect: the loop begins another.
func TestTerminatingIsNeverStuck(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	w.stop()
	w.sql(`UPDATE workspaces SET state = 'terminating' WHERE id = $1`, ws.ID)
	w.sql(`INSERT INTO operations (id, project_id, kind, state, input, workspace_id) VALUES ('op_x', $1, 'terminate_workspace', 'pending', '{}', $2)`, w.project, ws.ID)
	w.sql(`UPDATE operations SET state = 'failed', ended_at = now(), problem_category = 'internal', problem_code = 'X', problem_message = 'x' WHERE id = 'op_x'`)
	w.Controller, _ = w.start(controller.Config{LoopInterval: 20 * time.Millisecond})
	eventually(t, "it is terminated", func() bool { return w.state(ws.ID) == core.WorkspaceTerminated })
	w.consistent()
}
