package controller_test

import (
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func (w *world) stepIn(ws controller.Workspace, when steps.When, a steps.Action) steps.Result {
	w.t.Helper()
	got, err := w.StepWorkspace(w.t.Context(), w.project, ws.ID, when, a, wait)
	if err != nil || !got.Done || len(got.Result.Steps) != 1 {
		w.t.Fatalf("step: %+v, %v", got, err)
	}
	r := got.Result.Steps[0]
	if r.Problem != nil || r.Workspace != ws.ID || (r.Kept == steps.KeepCheckpoint) != (r.Checkpoint != "") {
		w.t.Errorf("%+v", r)
	}
	return r
}

// TestStepWorkspace: a step of a workspace makes a checkpoint when it should. The workspace goes on, and the next checkpoint descends from it.
func TestStepWorkspace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	parent := core.CheckpointID("")
	write := command("inc")
	write.Files = []guestclient.PutFile{{Path: "/workspace/in", Content: []byte("0.5\n")}}
	named := command("cat", "/workspace/in")
	named.Node = steps.Node{Name: "kept", Labels: map[string]string{"a": "b"}}
	for i, c := range []struct {
		when  steps.When
		do    steps.Action
		keeps bool
		exit  int
	}{
		{steps.OnSuccess, command("sh", "-c", "inc; exit 3"), false, 3},
		{steps.OnSuccess, command("inc"), true, 0},
		{steps.OnChange, command("echo", "nothing changes"), false, 0},
		{steps.OnChange, command("sh", "-c", "err oh; exit 4"), false, 4},
		{steps.OnChange, command("sh", "-c", "inc; exit 5"), true, 5},
		{steps.OnChange, write, true, 0},
		{"", named, true, 0},
		{steps.Always, command("sh", "-c", "exit 6"), true, 6},
		{steps.Always, steps.Action{Files: write.Files}, true, 0},
	} {
		r := w.stepIn(ws, c.when, c.do)
		if (r.Kept == steps.KeepCheckpoint) != c.keeps || r.ExitCode != nil && *r.ExitCode != c.exit || (r.ExitCode == nil) != (c.do.Command == nil) {
			t.Errorf("%d: %+v", i, r)
		}
		if r.Unchanged != (c.when == steps.OnChange && !c.keeps) {
			t.Errorf("%d: unchanged %v", i, r.Unchanged)
		}
		if !c.keeps {
			continue
		}
		node, err := w.Tree.Checkpoint(t.Context(), w.project, r.Checkpoint)
		if err != nil || parent != "" && node.Parent != parent || node.Annotations[steps.Annotation] == nil || node.Name != c.do.Node.Name {
			t.Errorf("%d: %+v, %v", i, node, err)
		}
		parent = r.Checkpoint
	}
	if state := w.state(ws.ID); state != core.WorkspaceReady {
		t.Errorf("the workspace is %s", state)
	}
	out, err := w.Exec(t.Context(), w.project, w.fork(parent, 1)[0].ID, controller.ExecRequest{Command: []string{"inc"}})
	if err != nil || string(out.Stdout) != "5\n" { // incremented four times
		t.Errorf("%q, %v", out.Stdout, err)
	}
	if n := w.number(`SELECT count(*) FROM step_actions WHERE request IS NOT NULL`); n != 0 {
		t.Errorf("%d requests of actions that have ended are kept", n)
	}
	w.consistent()
}

// TestStepWorkspaceFails: a step whose program does not run fails as a whole, and makes no checkpoint. The workspace goes on.
func TestStepWorkspaceFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	before := w.number(`SELECT count(*) FROM checkpoints`)
	a, err := w.StepWorkspace(t.Context(), w.project, ws.ID, steps.Always, command("no-such-program"), wait)
	if core.CodeOf(err) != guestapi.CodeCommandNotFound || core.CategoryOf(err) == core.Internal {
		t.Errorf("%+v, %v", a, err)
	}
	for _, c := range []struct {
		when steps.When
		do   steps.Action
	}{
		{"sometimes", command("inc")},
		{steps.Always, steps.Action{}},
		{steps.OnSuccess, steps.Action{Files: []guestclient.PutFile{{Path: "/a"}}}},
	} {
		if _, err := w.StepWorkspace(t.Context(), w.project, ws.ID, c.when, c.do, wait); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s %+v: %v", c.when, c.do, err)
		}
	}
	if n := w.number(`SELECT count(*) FROM checkpoints`); n != before || w.state(ws.ID) != core.WorkspaceReady {
		t.Errorf("%d checkpoints, before %d; the workspace is %s", n, before, w.state(ws.ID))
	}
	if _, err := w.Terminate(t.Context(), w.project, ws.ID, wait); err != nil {
		t.Fatal(err)
	}
	if _, err := w.StepWorkspace(t.Context(), w.project, ws.ID, steps.Always, command("inc"), wait); err == nil {
		t.Error("a step of a workspace that is terminated began")
	}
	w.consistent()
}

// TestCanceledStepWorkspace: a step that is canceled makes no checkpoint, and the workspace goes on.
func TestCanceledStepWorkspace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	before := w.number(`SELECT count(*) FROM checkpoints`)
	a, err := w.StepWorkspace(t.Context(), w.project, ws.ID, steps.Always, command("sleep", "1000"), 0)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the program runs", func() bool { return w.number(`SELECT count(*) FROM sessions`) == 1 })
	if got, err := w.CancelOperation(t.Context(), w.project, a.Operation.ID, wait); err != nil || got.Operation.Problem == nil || got.Operation.Problem.Code != core.CodeOperationCanceled {
		t.Errorf("%+v, %v", got, err)
	}
	if n := w.number(`SELECT count(*) FROM checkpoints`); n != before || w.state(ws.ID) != core.WorkspaceReady {
		t.Errorf("%d checkpoints, before %d; the workspace is %s", n, before, w.state(ws.ID))
	}
	w.consistent()
}

// TestStepWorkspaceBounds: steps of workspaces are bounded for a project, apart from its other steps.
func TestStepWorkspaceBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	begun := func(from, to int) {
		w.sql(`INSERT INTO operations (id, project_id, kind, state, step, input, lease_owner, lease_expires_at, lease_epoch, created_at, started_at)
			SELECT 'op_' || n, project_id, 'step_workspace', 'running', 'act', '{}', 'another', now() + interval '1 hour', 1, now(), now()
			FROM workspaces, generate_series($2::int, $3::int) n WHERE id = $1`, ws.ID, from, to)
	}
	begun(1, 255)
	w.stepIn(ws, steps.Always, command("inc"))
	begun(256, 256)
	if _, err := w.StepWorkspace(t.Context(), w.project, ws.ID, steps.Always, command("inc"), wait); core.CodeOf(err) != core.CodeQuotaExceeded {
		t.Error(err)
	}
	w.step(w.checkpoint(ws.ID).ID, 1, command("inc"))
}

// TestStepOfSuspendedWorkspace: the files of a step resume a workspace with auto-resume, as its command does.
func TestStepOfSuspendedWorkspace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	on := true
	if _, err := w.PatchWorkspace(t.Context(), w.project, ws.ID, controller.WorkspacePatch{AutoResume: &on}); err != nil {
		t.Fatal(err)
	}
	files := []guestclient.PutFile{{Path: "/workspace/in", Content: []byte("0.5\n")}}
	for _, do := range []steps.Action{{Files: files}, {Files: files, Command: command("inc").Command}, command("inc")} {
		w.suspend(ws.ID)
		if r := w.stepIn(ws, steps.Always, do); r.Kept != steps.KeepCheckpoint {
			t.Errorf("%+v", r)
		}
	}
	w.consistent()
}
