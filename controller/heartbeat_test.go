package controller_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

func TestHeartbeatDropsGarbage(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	stray, strayCP := core.NewID[core.SandboxID](), core.NewID[core.CheckpointID]()
	beat := w.runner.NextBeat(w.epoch)
	beat.Sandboxes = append(beat.Sandboxes, runnerapi.Sandbox{ID: stray, State: runnerapi.SandboxReady}, runnerapi.Sandbox{ID: core.NewID[core.SandboxID](), State: runnerapi.SandboxDead})
	beat.Checkpoints = append(beat.Checkpoints, strayCP)
	out, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), beat)
	if err != nil || len(out.DropSandboxes) != 1 || out.DropSandboxes[0] != stray || len(out.DropCheckpoints) != 0 || len(out.StrayCheckpoints) != 1 || out.StrayCheckpoints[0] != strayCP || out.TTLSeconds <= 0 {
		t.Errorf("%+v, %v", out, err)
	}
	if w.state(ws.ID) != core.WorkspaceReady {
		t.Error("the workspace suffered")
	}
	if err := w.DeleteCheckpoint(t.Context(), w.project, cp.ID); err != nil {
		t.Fatal(err)
	}
	w.consistent()
}

// TestHeartbeatSparesWhatIsUnderWay beats in the middle of a fork, a capture and a restore.
func TestHeartbeatSparesWhatIsUnderWay(t *testing.T) {
	t.Parallel()
	for name, kind := range kinds() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ws := w.create("main")
			cp := w.checkpoint(ws.ID)
			w.beat()
			g := w.gate(kind.point + runnertest.Done)
			a, err := kind.start(w, ws, cp)
			if err != nil {
				t.Fatal(err)
			}
			<-g.reached
			for range 3 {
				if out := w.beat(); len(out.DropSandboxes)+len(out.DropCheckpoints)+len(out.StrayCheckpoints) != 0 && !strings.Contains(name, "dropping") {
					t.Errorf("told to drop what is under way: %+v", out)
				}
			}
			close(g.open)
			end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
			if err != nil || end.Operation.State != core.OperationSucceeded {
				t.Errorf("%+v, %v", end.Operation, err)
			}
			w.consistent()
		})
	}
}

func TestLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	crashed, vanished, fine := w.create("crashed"), w.create("vanished"), w.create("fine")
	w.beat()
	w.runner.Crash(crashed.Sandbox.ID, "qemu was killed by signal 9\x1b[2J")
	w.runner.Vanish(vanished.Sandbox.ID)
	w.beat()
	for _, c := range []struct {
		ws   controller.Workspace
		want core.WorkspaceState
		why  string
	}{{crashed, core.WorkspaceLost, "signal 9?[2J"}, {vanished, core.WorkspaceLost, "has no sandbox"}, {fine, core.WorkspaceReady, ""}} {
		got, err := w.Workspace(t.Context(), w.project, c.ws.ID)
		if err != nil || got.State != c.want || c.why != "" && (got.Failure.Code != core.CodeSandboxLost || !strings.Contains(got.Failure.Message, c.why)) {
			t.Errorf("%s: %+v, %v", c.ws.Name, got, err)
		}
	}
	_, err := w.CreateCheckpoint(t.Context(), w.project, crashed.ID, controller.CheckpointRequest{}, wait)
	wantCode(t, err, core.CodeWorkspaceNotReady)
	if a, err := w.Terminate(t.Context(), w.project, crashed.ID, wait); err != nil || a.Result.Workspace.State != core.WorkspaceTerminated {
		t.Errorf("a lost workspace can be put away: %+v, %v", a, err)
	}
	w.create("vanished") // the name is free
	w.consistent()
}

// TestStalled: a workspace whose machine stands still says so and why, whatever else it is, until that is over; each change is an event.
func TestStalled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws, other := w.create("waits"), w.create("runs")
	w.beat()
	seen := stream(t, w.Controller, w.project, "", events.Filter{Types: []string{"workspace"}}, -1)
	get := func(id core.WorkspaceID) controller.Workspace {
		t.Helper()
		got, err := w.Workspace(t.Context(), w.project, id)
		if err != nil || got.State != core.WorkspaceReady {
			t.Fatalf("%+v, %v", got, err)
		}
		return got
	}
	since := time.Now().Add(-time.Minute)
	w.runner.Stall(ws.Sandbox.ID, &runnerapi.Stall{Since: since, Problem: runnerapi.Problem{Category: core.Unavailable, Code: core.CodeStoreUnavailable, Message: "no answer\x1b"}})
	for range 2 {
		w.beat()
	}
	if got := get(ws.ID).Stall; !got.Since.Equal(since.Truncate(time.Microsecond)) || got.Code != core.CodeStoreUnavailable || got.Message != "no answer?" {
		t.Errorf("%+v", got)
	}
	if got := get(other.ID).Stall; got != (controller.Stall{}) {
		t.Errorf("the other: %+v", got)
	}
	w.runner.Stall(ws.Sandbox.ID, nil)
	for range 2 {
		w.beat()
	}
	if got := get(ws.ID).Stall; got != (controller.Stall{}) {
		t.Errorf("when it is over: %+v", got)
	}
	list := collect(t, seen, 2)
	if diff := cmp.Diff([]string{"workspace.stalled", "workspace.unstalled"}, types(list)); diff != "" || list[0].WorkspaceID != ws.ID || !strings.Contains(string(list[0].Data), "STORE_UNAVAILABLE") {
		t.Errorf("%+v\n%s", list, diff)
	}
	if rest, err := seen.Next(t.Context(), false); err != nil || len(rest) > 0 {
		t.Errorf("then %v, %v", types(rest), err)
	}
	// What ends while it stands still is lost like any other.
	w.runner.Stall(ws.Sandbox.ID, &runnerapi.Stall{Since: since, Problem: runnerapi.Problem{Code: core.CodeStoreUnavailable, Message: "no answer"}})
	w.beat()
	w.runner.Crash(ws.Sandbox.ID, "killed")
	w.beat()
	if got, err := w.Workspace(t.Context(), w.project, ws.ID); err != nil || got.State != core.WorkspaceLost || got.Stall != (controller.Stall{}) {
		t.Errorf("%+v, %v", got, err)
	}
	w.consistent()
}

// TestNotSettledIsNotLost sends a heartbeat that was taken before a workspace became ready.
func TestNotSettledIsNotLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	old := w.runner.NextBeat(w.epoch)
	ws := w.create("main")
	if _, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), old); err != nil {
		t.Fatal(err)
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("it is %s", got)
	}
	missing := w.runner.NextBeat(w.epoch) // the answer was lost
	missing.Sandboxes = nil
	if _, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), missing); err != nil {
		t.Fatal(err)
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("after a lost answer it is %s", got)
	}
	next := w.runner.NextBeat(w.epoch)
	next.Sandboxes, next.Answered = nil, missing.Number
	if _, err := w.Fleet().Heartbeat(t.Context(), w.runner.ID(), next); err != nil {
		t.Fatal(err)
	}
	if got := w.state(ws.ID); got != core.WorkspaceLost {
		t.Errorf("missing after an answer, it is %s", got)
	}
}

// TestCaptureOfLostSandbox hears from the runner itself that the sandbox is gone.
func TestCaptureOfLostSandbox(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	w.runner.Vanish(ws.Sandbox.ID)
	_, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, wait)
	wantCode(t, err, core.CodeSandboxNotFound)
	// The cause is the one that a heartbeat would have given, had it come first.
	got, err := w.Workspace(t.Context(), w.project, ws.ID)
	if err != nil || got.State != core.WorkspaceLost || got.Failure == nil || got.Failure.Code != core.CodeSandboxLost {
		t.Errorf("it is %+v, %v", got, err)
	}
	w.consistent()
}

func TestSilentRunner(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.RunnerFence = time.Hour })
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 minute'`)
	if got, err := w.Workspace(t.Context(), w.project, ws.ID); err != nil || !got.Unknown || got.State != core.WorkspaceReady {
		t.Errorf("%+v, %v", got, err)
	}
	_, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
	wantCode(t, err, core.CodeRunnerUnreachable)
	wantCode(t, w.Ready(t.Context()), core.CodeNoRunner)
	w.sql(`UPDATE runners SET lease_expires_at = now() - interval '2 hours'`)
	eventually(t, "it is lost with its runner", func() bool { return w.state(ws.ID) == core.WorkspaceLost })
	got, err := w.Workspace(t.Context(), w.project, ws.ID)
	if err != nil || got.Failure.Code != core.CodeRunnerLost {
		t.Errorf("%+v, %v", got, err)
	}
	// A zombie's heartbeat is refused; it registers again and is told to drop what was given up.
	_, err = w.Fleet().Heartbeat(t.Context(), w.runner.ID(), runnerapi.Heartbeat{LeaseEpoch: w.epoch, Info: w.runner.Info(), Sandboxes: w.runner.Sandboxes()})
	wantCode(t, err, core.CodeRunnerLost)
	w.register()
	if out := w.beat(); len(out.DropSandboxes) != 1 || out.DropSandboxes[0] != ws.Sandbox.ID {
		t.Errorf("%+v", out)
	}
	w.register()
	w.fork(cp.ID, 1) // its checkpoints are still there
}

func TestExpiry(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	keep := w.create("keep")
	a, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}, TTL: time.Hour}, wait)
	if err != nil {
		t.Fatal(err)
	}
	w.sql(`UPDATE workspaces SET expires_at = expires_at - interval '1 hour' WHERE id = $1`, a.Result.Workspace.ID)
	eventually(t, "it expires", func() bool { return w.state(a.Result.Workspace.ID) == core.WorkspaceTerminated })
	if got := w.state(keep.ID); got != core.WorkspaceReady {
		t.Errorf("the other is %s", got)
	}
	w.consistent()
}

func TestRegisterRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	info := w.runner.Info()
	for name, c := range map[string]struct {
		change func(*runnerapi.Register)
		want   core.Code
	}{
		"version":  {func(r *runnerapi.Register) { r.Info.Version++ }, core.CodeUnsupported},
		"id":       {func(r *runnerapi.Register) { r.Info.RunnerID = "x" }, core.CodeInvalidID},
		"endpoint": {func(r *runnerapi.Register) { r.Endpoint = "" }, core.CodeInvalidField},
	} {
		reg := runnerapi.Register{Info: info, Endpoint: "http://x"}
		c.change(&reg)
		_, err := w.Fleet().Register(t.Context(), reg)
		if core.CodeOf(err) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}
