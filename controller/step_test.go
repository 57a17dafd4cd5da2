package controller_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// command is an action that runs a program of the fake guest.
func command(words ...string) steps.Action {
	return steps.Action{Command: &controller.ExecRequest{Command: words}}
}

// startStep begins a step of one action, which keeps a checkpoint.
func startStep(w *world, _ controller.Workspace, cp controller.Checkpoint) (controller.Answer, error) {
	return w.Step(w.t.Context(), w.project, cp.ID, []steps.Action{command("inc")}, 0, controller.ForkRequest{}, 0)
}

func (w *world) step(id core.CheckpointID, parallel int, actions ...steps.Action) []steps.Result {
	w.t.Helper()
	a, err := w.Step(w.t.Context(), w.project, id, actions, parallel, controller.ForkRequest{}, wait)
	if err != nil || !a.Done {
		w.t.Fatalf("step: %+v, %v", a, err)
	}
	return w.stepResults(a.Operation.ID)
}

func (w *world) stepResults(id core.OperationID) []steps.Result {
	w.t.Helper()
	list, err := w.Steps.Results(w.t.Context(), w.project, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return list
}

func deref[T any](v *T) any {
	if v == nil {
		return nil
	}
	return *v
}

func TestStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	if _, err := w.Exec(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"inc"}}); err != nil {
		t.Fatal(err)
	}
	cp := w.checkpoint(ws.ID)
	inc := command("inc")
	inc.Files = []guestclient.PutFile{{Path: "/workspace/deep/in", Content: []byte("from the action\n"), Mode: "0600"}}
	inc.Node = steps.Node{Name: "kept", Labels: map[string]string{"a": "b"}, Annotations: map[string]json.RawMessage{"mine": json.RawMessage(`[1]`)}}
	read := command("cat", "/workspace/in")
	read.Files, read.Keep = []guestclient.PutFile{{Path: "/workspace/in", Content: []byte("0.75\n")}}, steps.KeepWorkspace
	read.OnlyIf, read.Name = steps.Condition{MinScore: new(0.75), ExitCode: new(0)}, "named"
	scored := command("echo", `{"score":0.5,"why":"x"}`)
	scored.OnlyIf = steps.Condition{MinScore: new(0.6)}
	failed := command("sh", "-c", "err oh; exit 3")
	failed.OnlyIf = steps.Condition{ExitCode: new(0)}
	slow := command("sleep", "1000")
	slow.Command.TimeoutMS, slow.Keep = 50, steps.KeepNothing
	stdin := command("cat")
	stdin.Command.Stdin, stdin.Keep = []byte("given"), steps.KeepNothing
	files := steps.Action{Files: []guestclient.PutFile{{Path: "/workspace/only", Content: []byte("x")}}}
	got := w.step(cp.ID, 3, inc, read, scored, failed, command("no-such-program"), slow, stdin, files)
	if len(got) != 8 {
		t.Fatalf("%d results", len(got))
	}
	type outcome struct {
		kept                    steps.Keep
		exit, score             any
		stdout, stderr, problem string
		timedOut                bool
	}
	for i, want := range []outcome{
		{kept: steps.KeepCheckpoint, exit: 0, score: 2.0, stdout: "2\n"},
		{kept: steps.KeepWorkspace, exit: 0, score: 0.75, stdout: "0.75\n"},
		{kept: steps.KeepNothing, exit: 0, score: 0.5, stdout: `{"score":0.5,"why":"x"}` + "\n"},
		{kept: steps.KeepNothing, exit: 3, stderr: "oh\n"},
		{kept: steps.KeepNothing, problem: "COMMAND_NOT_FOUND"},
		{kept: steps.KeepNothing, exit: 137, timedOut: true},
		{kept: steps.KeepNothing, exit: 0, stdout: "given"},
		{kept: steps.KeepCheckpoint},
	} {
		r := got[i]
		have := outcome{kept: r.Kept, exit: deref(r.ExitCode), score: deref(r.Score), stdout: string(r.Stdout), stderr: string(r.Stderr), timedOut: r.TimedOut}
		if r.Problem != nil {
			have.problem = string(r.Problem.Code)
		}
		if have != want || r.Index != i {
			t.Errorf("action %d: %+v, want %+v", i, have, want)
		}
		state := w.state(r.Workspace)
		if (r.Kept == steps.KeepWorkspace) != (state == core.WorkspaceReady) || r.Kept != steps.KeepWorkspace && state != core.WorkspaceTerminated {
			t.Errorf("action %d kept %s, and its workspace is %s", i, r.Kept, state)
		}
	}
	node, err := w.Tree.Checkpoint(t.Context(), w.project, got[0].Checkpoint)
	if err != nil {
		t.Fatal(err)
	}
	var said struct {
		Operation core.OperationID `json:"operation_id"`
		Action    int              `json:"action"`
		ExitCode  int              `json:"exit_code"`
		Score     float64          `json:"score"`
	}
	if err := json.Unmarshal(node.Annotations[steps.Annotation], &said); err != nil || said.Score != 2 || said.Action != 0 || said.ExitCode != 0 || said.Operation == "" {
		t.Errorf("%s: %+v, %v", node.Annotations[steps.Annotation], said, err)
	}
	if node.Parent != cp.ID || node.Name != "kept" || node.Labels["a"] != "b" || string(node.Annotations["mine"]) != "[1]" {
		t.Errorf("%+v", node)
	}
	child := w.fork(node.ID, 1)[0]
	out, err := w.Exec(t.Context(), w.project, child.ID, controller.ExecRequest{Command: []string{"sh", "-c", "cat /workspace/deep/in; inc"}})
	if err != nil || string(out.Stdout) != "from the action\n3\n" {
		t.Errorf("%q, %v", out.Stdout, err)
	}
	if n := w.number(`SELECT count(*) FROM step_actions WHERE request IS NOT NULL`); n != 0 {
		t.Errorf("%d requests of actions that have ended are kept", n)
	}
	w.consistent()
}

// dying is a database from which a controller is cut off at a transaction: it was committed or it was not, and nothing comes after.
type dying struct {
	*postgres.Store

	left   atomic.Int64 // transactions until then, of this controller; negative: it does not happen
	before bool         // the last one is not committed
	dead   atomic.Bool
}

var errDead = errors.New("the controller was killed")

// InTx implements controller.Store.
func (s *dying) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	if s.dead.Load() {
		return errDead
	}
	last := s.left.Add(-1) == 0
	if last {
		s.dead.Store(true)
	}
	if last && s.before {
		return errDead
	}
	err := s.Store.InTx(ctx, scope, fn)
	if s.dead.Load() { // nobody hears of it
		return errDead
	}
	return err
}

// RunPeriodicJobs implements controller.Store.
func (s *dying) RunPeriodicJobs(ctx context.Context, list []controller.PeriodicJob, log *slog.Logger) error {
	if s.dead.Load() {
		<-ctx.Done()
		return nil
	}
	return s.Store.RunPeriodicJobs(ctx, list, log)
}

// TestKilledStep cuts a controller off at each of its transactions. Another controller continues the step. Each action is done once, and
// nothing is left of it but what it keeps. Without -long, it takes a sample of the transactions.
func TestKilledStep(t *testing.T) { //nolint:tparallel // each part says whether there is another one
	t.Parallel()
	stride := int64(11)
	if *long {
		stride = 1
	}
	for at := int64(1); ; at += stride {
		over := false
		for _, before := range []bool{true, false} {
			ok := t.Run(fmt.Sprintf("transaction %d, before %v", at, before), func(t *testing.T) {
				w := newWorld(t)
				ws := w.create("main")
				cp := w.checkpoint(ws.ID)
				store := &dying{Store: w.store, before: before}
				first, stop := w.startOn(store, controller.Config{LoopInterval: time.Hour, OperationLease: time.Hour, ShutdownGrace: time.Millisecond})
				store.left.Store(at)
				kept, dropped := command("inc"), command("inc")
				kept.Files = []guestclient.PutFile{{Path: "/workspace/a", Content: []byte("a")}}
				dropped.Keep = steps.KeepNothing
				ctx := controller.WithClaim(t.Context(), &controller.Claim{Key: "k", Kind: "op"})
				a, err := first.Step(ctx, w.project, cp.ID, []steps.Action{kept, dropped}, 0, controller.ForkRequest{}, wait)
				over = !store.dead.Load()
				store.dead.Store(true)
				stop()
				if over {
					if err != nil || !a.Done {
						t.Fatalf("%+v, %v", a, err)
					}
					return
				}
				w.sql(`UPDATE operations SET lease_expires_at = now() WHERE state = 'running'`) // time goes by
				var end controller.Answer
				eventually(t, "the step is done", func() bool {
					again := controller.WithClaim(t.Context(), &controller.Claim{Key: "k", Kind: "op"})
					end, err = w.Step(again, w.project, cp.ID, []steps.Action{kept, dropped}, 0, controller.ForkRequest{}, wait)
					return core.CodeOf(err) != core.CodeIdempotencyInProgress
				})
				if err != nil || !end.Done {
					t.Fatalf("%+v, %v", end, err)
				}
				eventually(t, "all operations have ended", func() bool {
					return w.number(`SELECT count(*) FROM operations WHERE state IN ('pending', 'running')`) == 0
				})
				results := w.stepResults(end.Operation.ID)
				if len(results) != 2 || results[0].Kept != steps.KeepCheckpoint || results[1].Kept != steps.KeepNothing || string(results[0].Stdout) != "1\n" || string(results[1].Stdout) != "1\n" {
					t.Errorf("%+v", results)
				}
				if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'ready'`); n != 1 {
					t.Errorf("%d workspaces are ready, want only the parent", n)
				}
				if n := w.number(`SELECT count(*) FROM checkpoints WHERE parent_id = $1`, cp.ID); n != 1 {
					t.Errorf("%d nodes", n)
				}
				w.consistent()
			})
			if !ok || over {
				return
			}
		}
	}
}

// TestRunnerStaysAwayFromAStep: a runner forks or captures, and never says so. The action ends with that problem, and nothing else of it is left.
func TestRunnerStaysAwayFromAStep(t *testing.T) {
	t.Parallel()
	for _, point := range []string{runnertest.PointFork, runnertest.PointCapture} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.RunnerRetry = 200 * time.Millisecond })
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			w.runner.Hook(func(_ context.Context, at, _ string) error {
				if at == point+runnertest.Done {
					return runnertest.ErrVanish
				}
				return nil
			})
			results := w.step(cp.ID, 0, command("inc"))
			if len(results) != 1 || results[0].Kept != steps.KeepNothing || results[0].Problem == nil || results[0].Problem.Code != core.CodeRunnerUnreachable {
				t.Errorf("%+v", results)
			}
			if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'ready'`); n != 1 {
				t.Errorf("%d workspaces are ready, want only the parent", n)
			}
			w.runner.Hook(nil)
			w.beat()
			w.consistent()
		})
	}
}

// TestCancelStep cancels a step while one action has ended and another is in each phase.
func TestCancelStep(t *testing.T) {
	t.Parallel()
	for _, point := range []string{"waiting", runnertest.PointFork, runnertest.PointGuest, runnertest.PointCapture, runnertest.PointCapture + runnertest.Done} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			first, second := command("inc"), command("inc")
			first.Keep = steps.KeepWorkspace
			parallel := 1
			var g *gate
			var passed atomic.Int64
			skip := map[string]int64{runnertest.PointFork: 1, runnertest.PointGuest: 2}[point] // of the first action
			if point == "waiting" {
				second = command("sleep", "1000")
			} else {
				g = &gate{reached: make(chan struct{}), open: make(chan struct{})}
				w.runner.Hook(func(ctx context.Context, at, _ string) error {
					if at != point || passed.Add(1) <= skip {
						return nil
					}
					g.once.Do(func() {
						close(g.reached)
						select {
						case <-g.open:
						case <-ctx.Done():
						}
					})
					return nil
				})
			}
			a, err := w.Step(t.Context(), w.project, cp.ID, []steps.Action{first, second, command("inc")}, parallel, controller.ForkRequest{}, 0)
			if err != nil {
				t.Fatal(err)
			}
			if g != nil {
				<-g.reached
			} else {
				eventually(t, "the second action runs", func() bool {
					return w.number(`SELECT count(*) FROM step_actions WHERE phase = 'running' AND index = 1`) == 1
				})
			}
			if _, err := w.CancelOperation(t.Context(), w.project, a.Operation.ID, 0); err != nil {
				t.Fatal(err)
			}
			if g != nil { // the work has been interrupted
				close(g.open)
			}
			end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
			if err != nil || end.Operation.Problem == nil || end.Operation.Problem.Code != core.CodeOperationCanceled {
				t.Fatalf("%+v, %v", end.Operation, err)
			}
			got := w.stepResults(a.Operation.ID)
			if len(got) != 3 || got[0].Kept != steps.KeepWorkspace || got[0].Problem != nil || w.state(got[0].Workspace) != core.WorkspaceReady {
				t.Fatalf("%+v", got)
			}
			capturing := strings.HasPrefix(point, runnertest.PointCapture)
			if r := got[1]; capturing != (r.Kept == steps.KeepCheckpoint) || !capturing && r.Problem.Code != core.CodeOperationCanceled {
				t.Errorf("%+v", r)
			}
			if r := got[2]; r.Problem == nil || r.Problem.Code != core.CodeOperationCanceled || r.Workspace != "" {
				t.Errorf("%+v", r)
			}
			eventually(t, "all operations have ended", func() bool {
				return w.number(`SELECT count(*) FROM operations WHERE state IN ('pending', 'running')`) == 0
			})
			if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'ready'`); n != 2 {
				t.Errorf("%d workspaces are ready", n)
			}
			w.consistent()
		})
	}
}

// TestStepInLittleRoom: more actions than there is room for wait for each other, and a step for which there is no room at all fails in its
// actions.
func TestStepInLittleRoom(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *controller.Config, r *runnertest.Config) { r.Capacity = runnerapi.Capacity{Sandboxes: 3} })
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	list := make([]steps.Action, 7)
	for i := range list {
		list[i] = command("inc")
		list[i].Keep = steps.KeepNothing
	}
	for i, r := range w.step(cp.ID, 7, list...) {
		if r.Problem != nil || string(r.Stdout) != "1\n" {
			t.Errorf("action %d: %+v", i, r)
		}
	}
	w.fork(cp.ID, 2)
	for i, r := range w.step(cp.ID, 7, list...) {
		if r.Problem == nil || r.Problem.Code != core.CodeCapacity {
			t.Errorf("without room, action %d: %+v", i, r)
		}
	}
	w.consistent()
}

// TestStepWithinQuotas: the quotas of separate requests count. A quota of workspaces makes the actions wait for each other.
func TestStepWithinQuotas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	if _, err := w.Tenancy.PatchProject(t.Context(), w.admin(), w.project, controller.QuotasPatch{Workspaces: new(int64(2)), Checkpoints: new(int64(2))}, controller.EncryptionPatch{}); err != nil {
		t.Fatal(err)
	}
	got := w.step(cp.ID, 4, command("inc"), command("inc"), command("inc"))
	nodes, refused := 0, 0
	for _, r := range got {
		switch {
		case r.Kept == steps.KeepCheckpoint:
			nodes++
		case r.Problem != nil && r.Problem.Code == core.CodeQuotaExceeded && string(r.Stdout) == "1\n":
			refused++
		}
	}
	if nodes != 1 || refused != 2 {
		t.Errorf("%+v", got)
	}
	w.consistent()
}

// TestStepBounds: what a step keeps is bounded, and so are its actions and the steps of a project.
func TestStepBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	for name, actions := range map[string][]steps.Action{
		"none": {}, "too many": slices.Repeat([]steps.Action{command("inc")}, steps.MaxActions+1), "empty": {{}},
		"too many files":      {{Files: make([]guestclient.PutFile, steps.MaxFiles+1)}},
		"a condition":         {{Files: make([]guestclient.PutFile, 1), OnlyIf: steps.Condition{ExitCode: new(0)}}},
		"its annotation":      {{Files: make([]guestclient.PutFile, 1), Node: steps.Node{Annotations: map[string]json.RawMessage{steps.Annotation: json.RawMessage(`1`)}}}},
		"a node and no node":  {{Files: make([]guestclient.PutFile, 1), Keep: steps.KeepNothing, Node: steps.Node{Name: "a"}}},
		"machines of no node": {{Files: make([]guestclient.PutFile, 1), Keep: steps.KeepNothing, Node: steps.Node{Prepare: prepare.Wanted{Count: 1}}}},
		"the name of a node":  {{Files: make([]guestclient.PutFile, 1), Node: steps.Node{Name: "A"}}},
		"a name of workspace": {{Files: make([]guestclient.PutFile, 1), Name: "A"}},
	} {
		if _, err := w.Step(t.Context(), w.project, cp.ID, actions, 0, controller.ForkRequest{}, 0); core.CategoryOf(err) != core.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	_, err := w.Step(t.Context(), w.project, cp.ID, []steps.Action{command("inc")}, steps.MaxParallel+1, controller.ForkRequest{}, 0)
	wantCode(t, err, core.CodeInvalidField)

	list := make([]steps.Action, 64)
	for i := range list {
		list[i] = command("true")
		list[i].Keep = steps.KeepNothing
	}
	list[0] = command("sh", "-c", "fill 200000; echo; echo 7")
	list[0].Keep = steps.KeepNothing
	a := w.step(cp.ID, 0, list[0])[0]
	b := w.step(cp.ID, steps.MaxParallel, list...)[0]
	if len(a.Stdout) != 64<<10 || len(b.Stdout) != 32<<10 || !a.StdoutTruncated || !b.StdoutTruncated || deref(a.Score) != 7.0 || deref(b.Score) != 7.0 {
		t.Errorf("%d and %d bytes are kept", len(a.Stdout), len(b.Stdout))
	}

	g := w.gate(runnertest.PointFork)
	var once sync.Once
	t.Cleanup(func() { once.Do(func() { close(g.open) }) })
	var last error
	begun := 0
	for range 40 {
		if _, last = w.Step(t.Context(), w.project, cp.ID, []steps.Action{command("sleep", "1000")}, 0, controller.ForkRequest{}, 0); last != nil {
			break
		}
		begun++
	}
	if wantCode(t, last, core.CodeQuotaExceeded); begun != 32 {
		t.Errorf("%d steps of a project run at once", begun)
	}
	once.Do(func() { close(g.open) })
	running, err := w.Operations(t.Context(), w.project, controller.OperationFilter{Page: controller.Page{Limit: 100}, Kinds: []controller.OperationKind{controller.OpStepCheckpoint}, States: []core.OperationState{core.OperationRunning}})
	if err != nil {
		t.Fatal(err)
	}
	for _, op := range running {
		if _, err := w.CancelOperation(t.Context(), w.project, op.ID, wait); err != nil {
			t.Error(err)
		}
	}
	w.consistent()

	// The sweep leaves the newest thousand steps of a project, and none that ended a day ago.
	kept := w.number(`SELECT count(*) FROM step_actions WHERE index = 0`)
	w.sql(`INSERT INTO operations (id, project_id, kind, state, input, lease_owner, lease_epoch, lease_expires_at, started_at)
		SELECT 'op_' || lpad(i::text, 26, '0'), $1, 'step_checkpoint', 'running', '{}', 'x', 1, now() + interval '1 hour', now() FROM generate_series(1, 1000) AS i`, w.project)
	w.sql(`UPDATE operations SET state = 'succeeded', result = '{}', ended_at = now(), lease_expires_at = NULL WHERE id < 'op_00000000000000000000001001'`)
	w.sql(`INSERT INTO step_actions (operation_id, project_id, index, phase, result, ended_at)
		SELECT 'op_' || lpad(i::text, 26, '0'), $1, 0, 'ended', '{}', now() FROM generate_series(1, 1000) AS i`, w.project)
	if err := w.Steps.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := w.number(`SELECT count(*) FROM step_actions WHERE index = 0`); n != 1000 {
		t.Errorf("%d steps are kept", n)
	}
	if n := w.number(`SELECT count(*) FROM step_actions WHERE index = 0 AND operation_id > 'op_00000000000000000000001001'`); n != kept {
		t.Errorf("%d of the %d newest are kept", n, kept)
	}
	w.sql(`UPDATE operations SET ended_at = now() - interval '25 hours' WHERE kind = 'step_checkpoint'`)
	if err := w.Steps.Sweep(t.Context()); err != nil {
		t.Fatal(err)
	}
	if n := w.number(`SELECT count(*) FROM step_actions`); n != 0 {
		t.Errorf("%d actions are kept after a day", n)
	}
}

// TestLongStep: what has not ended after the longest time of a step is taken back.
func TestLongStep(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	quick := command("inc")
	quick.Keep = steps.KeepWorkspace
	a, err := w.Step(t.Context(), w.project, cp.ID, []steps.Action{quick, command("sleep", "1000")}, 1, controller.ForkRequest{}, 0)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second action runs", func() bool {
		return w.number(`SELECT count(*) FROM step_actions WHERE phase = 'running' AND index = 1`) == 1
	})
	w.stop()
	w.sql(`UPDATE operations SET created_at = now() - interval '20 hours' WHERE id = $1`, a.Operation.ID)
	w.Controller, w.stop = w.start(controller.Config{LoopInterval: 20 * time.Millisecond})
	end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
	if err != nil || end.Operation.Problem == nil || end.Operation.Problem.Code != core.CodeTimedOut {
		t.Fatalf("%+v, %v", end.Operation, err)
	}
	got := w.stepResults(a.Operation.ID)
	if len(got) != 2 || got[0].Problem != nil || got[1].Problem == nil || got[1].Problem.Code != core.CodeTimedOut || w.state(got[1].Workspace) != core.WorkspaceTerminated {
		t.Errorf("%+v", got)
	}
	w.consistent()
}
