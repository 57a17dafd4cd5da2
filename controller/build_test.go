package controller_test

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

var smallest = core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}

// archive makes a tar of names and contents.
func archive(t testing.TB, files ...string) io.Reader {
	t.Helper()
	out := new(bytes.Buffer)
	w := tar.NewWriter(out)
	for i := 0; i < len(files); i += 2 {
		if err := w.WriteHeader(&tar.Header{Typeflag: tar.TypeReg, Name: files[i], Mode: 0o644, Size: int64(len(files[i+1]))}); err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(w, files[i+1]); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return out
}

func (w *world) upload(id string, files ...string) {
	w.t.Helper()
	if _, err := w.Uploads.Put(w.t.Context(), w.project, id, archive(w.t, files...)); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) build(s builds.Spec) builds.Image {
	w.t.Helper()
	s.Resources = smallest
	if s.Egress == "" {
		s.Egress = core.EgressDenyAll
	}
	a, err := w.BuildImage(w.t.Context(), w.project, s, wait)
	if err != nil || !a.Done {
		w.t.Fatalf("build: %+v, %v\n%s", a, err, w.buildLog(a.Operation.ID))
	}
	return *a.Result.Image
}

func (w *world) buildLog(id core.OperationID) string {
	w.t.Helper()
	var all strings.Builder
	for at := int64(0); ; {
		part, err := w.Builds.Log(w.t.Context(), w.project, id, at)
		if err != nil {
			w.t.Fatal(err)
		}
		if len(part.Data) == 0 {
			return all.String()
		}
		_, _ = all.Write(part.Data)
		at = part.Next
	}
}

// run runs a program in a workspace and returns its output.
func (w *world) run(id core.WorkspaceID, words ...string) string {
	w.t.Helper()
	out, err := w.Exec(w.t.Context(), w.project, id, controller.ExecRequest{Command: words})
	if err != nil {
		w.t.Fatal(err)
	}
	return string(out.Stdout)
}

const dockerfile = `FROM base
ARG WHO=world
ENV GREETING="hello $WHO" PATH=/opt/bin:$PATH
WORKDIR /srv/app
COPY src/ ./
RUN ["echo", "first"]
RUN ["inc"]
USER root
CMD ["serve"]
EXPOSE 8080
`

// TestBuild builds an image, builds it again from the cache alone, and makes a workspace from it.
func TestBuild(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.upload("ctx", "src/a.txt", "one", "src/deep/b.txt", "two", "other", "x")
	spec := builds.Spec{Name: "app", Dockerfile: dockerfile, Context: "ctx"}
	first := w.build(spec)
	log := w.buildLog(first.Operation)
	for _, want := range []string{"[1/11] FROM base", "RUN [\"echo\", \"first\"]\nfirst\n", "DONE"} {
		if !strings.Contains(log, want) {
			t.Errorf("the log has no %q:\n%s", want, log)
		}
	}
	if c := first.Config; c.Env["GREETING"] != "hello world" || !strings.HasPrefix(c.Env["PATH"], "/opt/bin:/usr/local/sbin") || c.Workdir != "/srv/app" || c.User != "root" ||
		len(c.Cmd) != 1 || len(c.ExposedPorts) != 1 || first.From != "base" {
		t.Errorf("%+v", first)
	}
	before := w.number(`SELECT count(*) FROM workspaces`)
	again := w.build(spec)
	if again.Checkpoint != first.Checkpoint || again.Cached != again.Steps || w.number(`SELECT count(*) FROM workspaces`) != before {
		t.Errorf("built again: %+v; first %+v\n%s", again, first, w.buildLog(again.Operation))
	}
	if n := w.number(`SELECT count(*) FROM workspaces WHERE state <> 'terminated'`); n != 0 {
		t.Errorf("%d workspaces are left", n)
	}
	a, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: "app", Name: "mine", Resources: smallest, Allow: []string{"a.example"}}, wait)
	if err != nil || a.Result.Workspace == nil {
		t.Fatalf("%+v, %v", a, err)
	}
	ws := a.Result.Workspace
	if got := w.run(ws.ID, "cat", "/srv/app/a.txt", "/srv/app/deep/b.txt", "/etc/coppice/workdir"); got != "onetwo/srv/app\n" {
		t.Errorf("the image has %q", got)
	}
	if got := w.run(ws.ID, "cat", "/etc/coppice/env"); !strings.Contains(got, "GREETING=hello world\n") {
		t.Errorf("the environment of sessions: %q", got)
	}
	if got := w.run(ws.ID, "inc"); got != "2\n" {
		t.Errorf("the workspace does not go on from the build: %q", got)
	}
	_, err = w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: "app", Shaped: true, Resources: core.Resources{VCPUs: 2, MemoryMiB: 512, DiskGiB: 1}}, wait)
	if core.CodeOf(err) != core.CodeImageShape {
		t.Errorf("with other resources: %v", err)
	}

	// A file changed: only what comes after its copy is carried out again.
	w.upload("ctx", "src/a.txt", "three")
	third := w.build(spec)
	if third.Checkpoint == first.Checkpoint || third.Cached == 0 || third.Steps-third.Cached != 4 {
		t.Errorf("after a change: %+v\n%s", third, w.buildLog(third.Operation))
	}
	if err := w.DeleteCheckpoint(t.Context(), w.project, third.Checkpoint); core.CodeOf(err) != core.CodeCheckpointInUse {
		t.Errorf("the checkpoint with the name was deleted: %v", err)
	}
	if err := w.Builds.Delete(t.Context(), w.project, "app"); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Builds.Image(t.Context(), w.project, "app"); core.CodeOf(err) != core.CodeImageNotFound {
		t.Errorf("after its removal: %v", err)
	}
	for _, id := range []core.CheckpointID{first.Checkpoint, third.Checkpoint} {
		if err := w.DeleteCheckpoint(t.Context(), w.project, id); err != nil {
			t.Errorf("after the removal of the image: %v", err)
		}
	}
}

// TestBuildSteps builds from steps, with a program that is started, and on an image that was built.
func TestBuildSteps(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.upload("files", "one", "1", "dir/two", "2")
	w.build(builds.Spec{Name: "lower", From: "base", Steps: []builds.Step{
		{Env: map[string]string{"A": "b"}}, {Copy: &builds.CopyStep{Upload: "files", Dest: "/data/"}}, {Copy: &builds.CopyStep{Upload: "files", Path: "one", Dest: "/data/three"}},
	}})
	upper := w.build(builds.Spec{
		Name: "upper", From: "lower", Steps: []builds.Step{{Run: "inc"}, {Workdir: "/data"}},
		Start: &builds.Start{Command: "sleep 1000000"},
	})
	if upper.Config.Env["A"] != "b" || upper.Config.Workdir != "/data" || !upper.Open {
		t.Errorf("%+v", upper)
	}
	a, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: "upper"}, wait)
	if err != nil {
		t.Fatal(err)
	}
	ws := a.Result.Workspace
	if got := w.run(ws.ID, "cat", "/data/one", "/data/dir/two", "/data/three"); got != "121" {
		t.Errorf("%q", got)
	}
	list, err := w.Sessions(t.Context(), w.project, ws.ID, controller.Page{Limit: 10})
	if err != nil {
		t.Fatal(err)
	}
	running := 0
	for _, s := range list {
		if s.Guest.State != controller.GuestExited {
			running++
		}
	}
	if running != 1 {
		t.Errorf("%d programs run in the workspace: %+v", running, list)
	}
	// It began with what it was asked for, although the build had less, and may be given more later.
	if _, err := w.PatchWorkspace(t.Context(), w.project, ws.ID, controller.WorkspacePatch{Add: []string{"b.example"}}); err != nil {
		t.Errorf("more rules: %v", err)
	}
	// Without a policy it may reach nothing, although the build might.
	w.build(builds.Spec{Name: "wide", From: "base", Egress: core.EgressAllowAll})
	a, err = w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: "wide"}, wait)
	if err != nil || a.Result.Workspace.Egress != core.EgressDenyAll {
		t.Errorf("a workspace without a policy: %+v, %v", a.Result.Workspace, err)
	}
	// What was taken of a workspace keeps its limits.
	plain := w.create("plain")
	cp := w.checkpoint(plain.ID)
	bound := w.build(builds.Spec{Name: "bound", From: string(cp.ID), Steps: []builds.Step{{Run: "inc"}}})
	_, err = w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: "bound", Allow: []string{"b.example"}}, wait)
	if bound.Open || core.CodeOf(err) != core.CodeEgressBeyondParent {
		t.Errorf("an image of a workspace's checkpoint, with more rules: %+v, %v", bound, err)
	}
}

// TestBuildFails: the problem says which instruction failed and how, and nothing is left.
func TestBuildFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.upload("files", "one", "1")
	for name, c := range map[string]struct {
		spec builds.Spec
		code core.Code
		says []string
	}{
		"a command":    {builds.Spec{Dockerfile: "FROM base\n\nRUN [\"sh\", \"-c\", \"err oh; exit 3\"]"}, core.CodeBuildFailed, []string{"line 3", "exit status 3", "oh"}},
		"no base":      {builds.Spec{From: "nothing"}, core.CodeImageNotFound, nil},
		"no file":      {builds.Spec{From: "base", Steps: []builds.Step{{Copy: &builds.CopyStep{Upload: "files", Path: "absent", Dest: "/"}}}}, core.CodeFileNotFound, []string{"absent"}},
		"no upload":    {builds.Spec{From: "base", Steps: []builds.Step{{Copy: &builds.CopyStep{Upload: "other", Dest: "/"}}}}, core.CodeUploadNotFound, []string{"other"}},
		"no program":   {builds.Spec{Dockerfile: "FROM base\nRUN [\"no-such-program\"]"}, "COMMAND_NOT_FOUND", []string{"no-such-program"}},
		"a Dockerfile": {builds.Spec{Dockerfile: "FROM base\nHEALTHCHECK NONE"}, core.CodeDockerfileInvalid, []string{"line 2", "HEALTHCHECK"}},
	} {
		c.spec.Name, c.spec.Resources, c.spec.Egress = "app", smallest, core.EgressDenyAll
		a, err := w.BuildImage(t.Context(), w.project, c.spec, wait)
		if core.CodeOf(err) != c.code {
			t.Errorf("%s: %+v, %v", name, a, err)
			continue
		}
		for _, want := range c.says {
			if !strings.Contains(core.MessageOf(err), want) {
				t.Errorf("%s: %q says nothing of %q", name, core.MessageOf(err), want)
			}
		}
		var op *operations.Error
		if errors.As(err, &op) && !strings.Contains(w.buildLog(op.Operation), "ERROR") {
			t.Errorf("%s: the log says nothing: %q", name, w.buildLog(op.Operation))
		}
	}
	if n := w.number(`SELECT count(*) FROM workspaces WHERE state NOT IN ('terminated', 'failed')`); n != 0 {
		t.Errorf("%d workspaces are left", n)
	}
	if _, err := w.Builds.Image(t.Context(), w.project, "app"); core.CodeOf(err) != core.CodeImageNotFound {
		t.Errorf("an image of builds that failed: %v", err)
	}
}

// TestBuildCanceled: what a build has begun ends with it, and what it has made stays in the cache.
func TestBuildCanceled(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	spec := builds.Spec{Name: "app", Dockerfile: "FROM base\nRUN [\"inc\"]\nRUN [\"sleep\", \"100000\"]", Resources: smallest, Egress: core.EgressDenyAll}
	a, err := w.BuildImage(t.Context(), w.project, spec, 0)
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the second command runs", func() bool {
		return w.number(`SELECT count(*) FROM step_actions WHERE index = 2 AND phase = 'running'`) == 1
	})
	if _, err := w.CancelOperation(t.Context(), w.project, a.Operation.ID, wait); err != nil {
		t.Fatal(err)
	}
	if end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait); err != nil || end.Operation.Problem == nil || end.Operation.Problem.Code != core.CodeOperationCanceled {
		t.Errorf("%+v, %v", end, err)
	}
	if n := w.number(`SELECT count(*) FROM workspaces WHERE state <> 'terminated'`); n != 0 {
		t.Errorf("%d workspaces are left", n)
	}
	spec.Dockerfile = "FROM base\nRUN [\"inc\"]"
	if again := w.build(spec); again.Steps-again.Cached != 1 {
		t.Errorf("the cache was not used: %+v\n%s", again, w.buildLog(again.Operation))
	}
}

// TestBuildIsTakenOver stops a controller at each point of a build. Another one ends the build, carries out nothing twice, and leaves nothing.
func TestBuildIsTakenOver(t *testing.T) {
	t.Parallel()
	for _, point := range []string{runnertest.PointTemplate, runnertest.PointFork, runnertest.PointCapture} {
		t.Run(point, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.ShutdownGrace = time.Millisecond })
			w.upload("files", "one", "1")
			g := w.gate(point)
			a, err := w.BuildImage(t.Context(), w.project, builds.Spec{
				Name: "app", From: "base", Resources: smallest, Egress: core.EgressDenyAll,
				Steps: []builds.Step{{Copy: &builds.CopyStep{Upload: "files", Dest: "/"}}, {Run: "inc"}},
			}, 0)
			if err != nil {
				t.Fatal(err)
			}
			<-g.reached
			w.stop()
			close(g.open)
			next, _ := w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
			end, err := next.Operation(t.Context(), w.project, a.Operation.ID, 2*time.Minute)
			if err != nil || !end.Done || end.Operation.Problem != nil || end.Result.Image == nil {
				t.Fatalf("%+v, %v", end, err)
			}
			if n := w.number(`SELECT count(*) FROM workspaces WHERE state <> 'terminated'`); n != 0 {
				t.Errorf("%d workspaces are left", n)
			}
			if n := w.number(`SELECT count(*) FROM checkpoints WHERE kind = 'user' AND state = 'captured'`); n != 4 {
				t.Errorf("%d checkpoints", n)
			}
		})
	}
}

// TestBuildIsTakenOverWithItsBase: a build goes on from the base that it has, whatever the name of the base means by now.
func TestBuildIsTakenOverWithItsBase(t *testing.T) {
	t.Parallel()
	for name, meanwhile := range map[string]string{
		"the name is gone":        `DELETE FROM project_images WHERE name = 'base'`,
		"the base has not ended":  `SET session_replication_role = replica; UPDATE step_actions SET phase = 'pending', result = NULL, ended_at = NULL, request = convert_to('{}', 'UTF8') WHERE index = 0`,
		"the name is of an other": `UPDATE project_images SET checkpoint_id = (SELECT checkpoint_id FROM project_images WHERE name = 'open') WHERE name = 'base'`,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.ShutdownGrace = time.Millisecond })
			plain := w.create("plain")
			if open := w.build(builds.Spec{Name: "open", From: "base", Steps: []builds.Step{{Run: "inc"}}}); !open.Open {
				t.Fatal("an image of the operator's is not open")
			}
			w.build(builds.Spec{Name: "base", From: string(w.checkpoint(plain.ID).ID)})
			g := w.gate(runnertest.PointFork)
			a, err := w.BuildImage(t.Context(), w.project, builds.Spec{
				Name: "app", From: "base", Resources: smallest, Egress: core.EgressDenyAll, Steps: []builds.Step{{Run: "inc"}},
			}, 0)
			if err != nil {
				t.Fatal(err)
			}
			<-g.reached
			w.stop()
			close(g.open)
			w.exec(meanwhile)
			next, _ := w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
			end, err := next.Operation(t.Context(), w.project, a.Operation.ID, 2*time.Minute)
			if err != nil || !end.Done || end.Operation.Problem != nil || end.Result.Image == nil {
				t.Fatalf("%+v, %v", end, err)
			}
			if end.Result.Image.Open {
				t.Error("an image of a workspace's checkpoint is open")
			}
		})
	}
}

// TestBuildBounds: what is too large or too much is refused before anything is made.
func TestBuildBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for name, s := range map[string]builds.Spec{
		"no base":             {},
		"both":                {From: "base", Dockerfile: "FROM base"},
		"many steps":          {From: "base", Steps: make([]builds.Step, builds.MaxSteps+1)},
		"an empty step":       {From: "base", Steps: []builds.Step{{}}},
		"two things in one":   {From: "base", Steps: []builds.Step{{Run: "a", User: "b"}}},
		"a long command":      {From: "base", Steps: []builds.Step{{Run: strings.Repeat("x", 64<<10+1)}}},
		"a variable of lines": {From: "base", Steps: []builds.Step{{Env: map[string]string{"A": "b\nc"}}}},
		"a long start":        {From: "base", Start: &builds.Start{Command: strings.Repeat("x", 64<<10+1)}},
		"no readiness":        {From: "base", Start: &builds.Start{Command: "x", Ready: &builds.Ready{}}},
		"a context for steps": {From: "base", Context: "u"},
	} {
		s.Name, s.Resources, s.Egress = "app", smallest, core.EgressDenyAll
		if _, err := w.BuildImage(t.Context(), w.project, s, wait); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", name, err)
		}
	}
	if n := w.number(`SELECT count(*) FROM operations`); n != 0 {
		t.Errorf("%d operations", n)
	}
	g := w.gate(runnertest.PointTemplate)
	defer close(g.open)
	for range 16 {
		if _, err := w.BuildImage(t.Context(), w.project, builds.Spec{Name: "app", From: "base", Resources: smallest, Egress: core.EgressDenyAll}, 0); err != nil {
			t.Fatal(err)
		}
	}
	if _, err := w.BuildImage(t.Context(), w.project, builds.Spec{Name: "app", From: "base", Resources: smallest, Egress: core.EgressDenyAll}, 0); core.CodeOf(err) != core.CodeQuotaExceeded {
		t.Errorf("a build too many: %v", err)
	}
}
