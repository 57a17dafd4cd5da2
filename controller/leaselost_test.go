package controller_test

import (
	"context"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// stalled is a world whose controller renews and claims nothing: its leases run out while it works.
func stalled(t *testing.T) *world {
	t.Helper()
	return newWorld(t, func(c *controller.Config, _ *runnertest.Config) {
		c.LoopInterval, c.OperationLease, c.RunnerRetry = time.Hour, 300*time.Millisecond, time.Second
	})
}

// takenOver starts an operation, which a gate stops. Another controller takes it over and ends it.
func (w *world) takenOver(g *gate, start func() (controller.Answer, error)) (second *controller.Controller, a controller.Answer) {
	w.t.Helper()
	a, err := start()
	if err != nil || a.Done {
		w.t.Fatalf("%+v, %v", a, err)
	}
	<-g.reached
	second, _ = w.start(controller.Config{LoopInterval: 20 * time.Millisecond})
	end, err := second.Operation(w.t.Context(), w.project, a.Operation.ID, wait)
	if err != nil || end.Operation.State != core.OperationSucceeded || end.Operation.LeaseEpoch < 2 {
		w.t.Fatalf("taken over: %+v, %v", end.Operation, err)
	}
	return second, a
}

// TestStaleControllerUndoesNothing stops a controller in the middle of each kind of operation. Another controller takes the
// operation over and ends it. Then the first one goes on and its work fails: nothing on the runner may change.
func TestStaleControllerUndoesNothing(t *testing.T) {
	t.Parallel()
	ways := map[string]error{
		"the call fails":         core.Errorf(core.Unavailable, core.CodeVMMFailed, "qemu ended with status 1"),
		"the answer is refused":  nil,
		"the runner is away":     runnertest.ErrVanish,
		"the sandbox is unknown": core.Errorf(core.NotFound, core.CodeSandboxNotFound, "this runner has no such sandbox"),
	}
	list := kinds()
	for name := range list {
		if strings.HasPrefix(name, "step") { // it terminates what it forks, which a late call may make again (TestLateFork); TestStaleControllerInAStep has steps
			delete(list, name)
		}
	}
	all := list["fork"]
	all.start = func(w *world, _ controller.Workspace, cp controller.Checkpoint) (controller.Answer, error) {
		return w.ForkCheckpoint(w.t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 3, AllOrNothing: true}, 0)
	}
	list["fork, all or nothing"] = all
	for name, kind := range list {
		for way, problem := range ways {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				w := stalled(t)
				ws := w.create("main")
				cp := w.checkpoint(ws.ID)
				g := w.hold(kind.point, problem)
				second, _ := w.takenOver(g, func() (controller.Answer, error) { return kind.start(w, ws, cp) })
				before := sandboxIDs(w.runner)
				if problem == nil {
					w.runner.Tamper(func(out *runnerapi.ChildResult) {
						if out.Reseal != nil {
							out.Reseal.Complete = false
						}
					})
				}
				close(g.open)
				w.stop() // it returns when the first controller has ended its work
				w.Controller = second
				if after := sandboxIDs(w.runner); !slices.Equal(before, after) {
					t.Errorf("the runner had %v, and has %v", before, after)
				}
				w.runner.Tamper(nil)
				w.consistent()
			})
		}
	}
}

func sandboxIDs(r *runnertest.Runner) []core.SandboxID {
	var ids []core.SandboxID
	for _, s := range r.Sandboxes() {
		ids = append(ids, s.ID)
	}
	return ids
}

// TestLateLoss lets a capture learn that its runner has no such sandbox while the workspace goes on in another one. What the
// capture knows is about the old sandbox: the workspace must not be lost.
func TestLateLoss(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	var once sync.Once
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		err := error(nil)
		if at == runnertest.PointCapture {
			once.Do(func() {
				// As a second client does that restores the moment the capture has been taken back.
				w.sql(`UPDATE workspaces SET state = 'ready' WHERE id = $1`, ws.ID)
				if a, restoreErr := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait); restoreErr != nil || !a.Done {
					t.Errorf("restore: %+v, %v", a, restoreErr)
				}
				err = core.Errorf(core.NotFound, core.CodeSandboxNotFound, "this runner has no such sandbox")
			})
		}
		return err
	})
	if _, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, wait); err == nil {
		t.Error("the capture succeeded")
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("the workspace is %s", got)
	}
	w.consistent()
}

// TestOnlyDropDeletes keeps calls that destroy something on a runner in fleet/drop.go, which looks at the rows first.
func TestOnlyDropDeletes(t *testing.T) {
	t.Parallel()
	var files []string
	for _, pattern := range []string{"*.go", "*/*.go"} {
		list, err := filepath.Glob(pattern)
		if err != nil || len(list) == 0 {
			t.Fatal(list, err)
		}
		files = append(files, list...)
	}
	for _, file := range files {
		if strings.HasSuffix(file, "_test.go") || file == filepath.Join("fleet", "drop.go") {
			continue
		}
		parsed, err := parser.ParseFile(token.NewFileSet(), file, nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		ast.Inspect(parsed, func(n ast.Node) bool {
			call, ok := n.(*ast.CallExpr)
			if !ok {
				return true
			}
			method, ok := call.Fun.(*ast.SelectorExpr)
			if !ok || method.Sel.Name != "DeleteSandbox" && method.Sel.Name != "DeleteCheckpoint" {
				return true
			}
			if on, ok := method.X.(*ast.SelectorExpr); ok && on.Sel.Name == "runners" {
				t.Errorf("%s calls %s of a runner: call Drop, DropCheckpoints or TakeDown of package fleet", file, method.Sel.Name)
			}
			return true
		})
	}
}

// TestStaleControllerInAStep stops a controller in the middle of a step. Another controller ends the step. Then the first one goes on: it
// changes no result, and leaves nothing behind.
func TestStaleControllerInAStep(t *testing.T) {
	t.Parallel()
	for name, kind := range kinds() {
		if !strings.HasPrefix(name, "step") {
			continue
		}
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := stalled(t)
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			g := w.hold(kind.point, nil)
			second, a := w.takenOver(g, func() (controller.Answer, error) { return kind.start(w, ws, cp) })
			before := w.stepResults(a.Operation.ID)
			close(g.open)
			w.stop() // it returns when the first controller has ended its work
			w.Controller = second
			after := w.stepResults(a.Operation.ID)
			if !reflect.DeepEqual(before, after) || len(after) != 1 || after[0].Kept != steps.KeepCheckpoint || string(after[0].Stdout) != "1\n" {
				t.Errorf("the results were %+v, and are %+v", before, after)
			}
			if n := w.number(`SELECT count(*) FROM checkpoints WHERE parent_id = $1`, cp.ID); n != 1 {
				t.Errorf("%d nodes", n)
			}
			w.consistent()
		})
	}
}

// TestLateFork lets a stale controller's call of a fork reach the runner after the workspace has ended. The runner makes the sandbox again, as it
// knows nothing of the end, and the next heartbeat drops it. A fork of a step is no different.
func TestLateFork(t *testing.T) {
	t.Parallel()
	w := stalled(t)
	cp := w.checkpoint(w.create("main").ID)
	g := w.hold(runnertest.PointFork, nil)
	a, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, 0)
	if err != nil || a.Done {
		t.Fatalf("%+v, %v", a, err)
	}
	<-g.reached
	second, _ := w.start(controller.Config{LoopInterval: 20 * time.Millisecond})
	end, err := second.Operation(t.Context(), w.project, a.Operation.ID, wait)
	if err != nil || !end.Done {
		t.Fatalf("taken over: %+v, %v", end.Operation, err)
	}
	if _, err := second.Terminate(t.Context(), w.project, end.Result.Children[0].Workspace.ID, wait); err != nil {
		t.Fatal(err)
	}
	before := sandboxIDs(w.runner)
	close(g.open)
	w.stop()
	w.Controller = second
	w.consistent() // after a heartbeat
	if after := sandboxIDs(w.runner); !slices.Equal(before, after) {
		t.Errorf("the runner had %v, and has %v", before, after)
	}
}
