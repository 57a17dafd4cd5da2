package runner

import (
	"bytes"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// expectation has a pool with a checkpoint that runner a captured and stored, and what the controller's row says of it.
type expectation struct {
	*pool
	a           *fakeRig
	template, c core.CheckpointID
	truth       runnerapi.Expected
}

func newExpectation(t *testing.T) *expectation {
	t.Helper()
	x := &expectation{pool: newSealPool(t)}
	x.a = x.runner(nil)
	x.template = x.a.boot()
	x.c = x.a.capture(x.a.fork(x.template))
	x.sealed(t, x.template, x.c)
	rec, err := x.a.checkpoints.Get(x.c)
	if err != nil {
		t.Fatal(err)
	}
	x.truth = runnerapi.Expected{ProjectID: x.project, Parent: x.template, Image: rec.Image, Class: rec.Class, Resources: rec.Resources}
	return x
}

func (x *expectation) forkFrom(r *fakeRig, sources []runnerapi.Stored, want runnerapi.Expected) error {
	out, err := r.Fork(x.t.Context(), runnerapi.Fork{CheckpointID: x.c, Children: []runnerapi.Child{r.child()}, Sources: sources, Expected: &want})
	if err == nil && out.Children[0].Problem != nil {
		err = out.Children[0].Problem.Err()
	}
	return err
}

// falsehoods are what a row may say that a checkpoint is not.
var falsehoods = map[string]func(*runnerapi.Expected){
	"project":   func(e *runnerapi.Expected) { e.ProjectID = core.NewID[core.ProjectID]() },
	"parent":    func(e *runnerapi.Expected) { e.Parent = "" },
	"image":     func(e *runnerapi.Expected) { e.Image = core.DigestOf(nil) },
	"class":     func(e *runnerapi.Expected) { e.Class.CPUModel = "another" },
	"resources": func(e *runnerapi.Expected) { e.Resources.MemoryMiB *= 2 },
}

// TestCopyIsNotBelieved: a checkpoint that is on the host already is compared with the row of each fork, like one that is fetched.
func TestCopyIsNotBelieved(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	b := x.runner(nil)
	if _, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: x.c, Sources: x.sources(x.c)}); err != nil { // it expects nothing
		t.Fatal(err)
	}
	for name, change := range falsehoods {
		want := x.truth
		change(&want)
		if err := x.forkFrom(b, x.sources(x.c), want); core.CodeOf(err) != core.CodeManifestInvalid {
			t.Errorf("a copy of another %s: %v", name, err)
		}
		if name == "project" {
			continue // the runner that captured it does not know that
		}
		if err := x.forkFrom(x.a, nil, want); core.CodeOf(err) != core.CodeManifestInvalid {
			t.Errorf("a checkpoint that was captured here, of another %s: %v", name, err)
		}
	}
	for _, r := range []*fakeRig{x.a, b} {
		if err := x.forkFrom(r, x.sources(x.c), x.truth); err != nil {
			t.Error(err)
		}
	}
}

// TestCopyWithoutProject: a copy of a runner that did not note the project is compared with it all the same.
func TestCopyWithoutProject(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	b := x.runner(nil)
	if err := x.forkFrom(b, x.sources(x.c), x.truth); err != nil {
		t.Fatal(err)
	}
	b.checkpoints.Inspect(func(st checkpoints.State) {
		old := *st.Records[x.c]
		old.Project = ""
		st.Records[x.c] = &old
	})
	want := x.truth
	falsehoods["project"](&want)
	if err := x.forkFrom(b, x.sources(x.c), want); core.CodeOf(err) != core.CodeManifestInvalid {
		t.Errorf("a copy of another project: %v", err)
	}
	if err := x.forkFrom(b, x.sources(x.c), x.truth); err != nil {
		t.Error(err)
	}
}

// TestCopyOfAnotherManifest: a copy that was fetched by another manifest than the row names is replaced, and refused while something
// uses it. What uses it goes on.
func TestCopyOfAnotherManifest(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	b := x.runner(nil)
	other := x.forgeAs(x.a, x.c, bytes.Repeat([]byte("evil"), 1024), func(*manifest.Header) {})
	child := b.child()
	out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: x.c, Children: []runnerapi.Child{child}, Sources: []runnerapi.Stored{other}})
	if err != nil || out.Children[0].Problem != nil {
		t.Fatalf("%+v, %v", out, err)
	}
	if err := x.forkFrom(b, x.sources(x.c), x.truth); core.CodeOf(err) != core.CodeManifestInvalid {
		t.Errorf("a copy of another manifest, in use: %v", err)
	}
	if s, err := b.Sandbox(child.SandboxID); err != nil || s.State != runnerapi.SandboxReady {
		t.Errorf("the machine that uses it is %+v, %v", s, err)
	}
	if err := b.Destroy(t.Context(), child.SandboxID); err != nil {
		t.Fatal(err)
	}
	if err := x.forkFrom(b, x.sources(x.c), x.truth); err != nil {
		t.Errorf("a copy of another manifest, not in use: %v", err)
	}
	if at, err := b.checkpoints.StoredAt(x.c); err != nil || at.Digest != x.sources(x.c)[0].Digest {
		t.Errorf("the copy is of %+v, %v", at, err)
	}
}

// TestFetchWithOtherExpectations: two callers share a fetch. Each is answered by what it expects.
func TestFetchWithOtherExpectations(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	x := newExpectation(t)
	b := x.runner(nil)
	first, second := make(chan error, 1), make(chan error, 1)
	armed := hang(t, "fetch.begun", func() { first <- x.forkFrom(b, x.sources(x.c), x.truth) })
	want := x.truth
	falsehoods["project"](&want)
	go func() { second <- x.forkFrom(b, x.sources(x.c), want) }()
	eventually.True(t, "the second has joined", func() bool {
		held := 0
		b.checkpoints.Inspect(func(st checkpoints.State) { held = st.Held[x.c] })
		return held == 2
	})
	armed.Release()
	if err := <-first; err != nil {
		t.Errorf("who expects what it is: %v", err)
	}
	if err := <-second; core.CodeOf(err) != core.CodeManifestInvalid {
		t.Errorf("who expects another project: %v", err)
	}
}

// TestForeignAncestor: an ancestor of another project or image is neither brought nor used, and the fetch goes on without it.
func TestForeignAncestor(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	for name, change := range map[string]func(*manifest.Header){
		"project": func(h *manifest.Header) { h.ProjectID = core.NewID[core.ProjectID]() },
		"image":   func(h *manifest.Header) { h.GuestImage = core.DigestOf(nil) },
	} {
		reg := prometheus.NewRegistry()
		b := x.runner(func(c *Config) { c.Metrics = reg })
		root := x.forgeAs(x.a, x.template, []byte("root"), func(h *manifest.Header) {
			h.CheckpointID = core.NewID[core.CheckpointID]()
			change(h)
		})
		if err := x.forkFrom(b, append(x.sources(x.c), root), x.truth); err != nil {
			t.Fatalf("another %s: %v", name, err)
		}
		if _, err := b.checkpoints.Get(root.CheckpointID); core.CodeOf(err) != core.CodeCheckpointNotFound {
			t.Errorf("an ancestor of another %s was brought: %v", name, err)
		}
		if n := testmetrics.One(t, reg, "coppice_runner_ancestors_refused_total"); n != 1 {
			t.Errorf("another %s: %v ancestors were counted", name, n)
		}
		mem, disk, state := content(t, b, x.c)
		wantMem, wantDisk, wantState := content(t, x.a, x.c)
		if !bytes.Equal(mem, wantMem) || !bytes.Equal(disk, wantDisk) || !bytes.Equal(state, wantState) {
			t.Errorf("another %s: the checkpoint is not what it was", name)
		}
	}
}

// TestOldAncestor: a copy of an older runner that nobody may use does not fail the fetch of what descends from it. The fetch goes on without
// it, whether the copy is in use or not.
func TestOldAncestor(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	reg := prometheus.NewRegistry()
	b := x.runner(func(c *Config) {
		empty, err := images.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		c.Images, c.Metrics = empty, reg
	})
	child := b.child()
	out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: x.template, Children: []runnerapi.Child{child}, Sources: x.sources(x.template)})
	if err != nil || out.Children[0].Problem != nil {
		t.Fatalf("%+v, %v", out, err)
	}
	b.checkpoints.Inspect(func(st checkpoints.State) {
		old := *st.Records[x.template]
		old.Project, old.Root = "", ""
		st.Records[x.template] = &old
	})

	at := x.sources(x.c)[0]
	if used, err := b.fetches.UsesAncestor(t.Context(), at, x.sources(x.template)); err != nil || used {
		t.Errorf("a fetch whose memory comes later: the ancestor is used: %v, %v", used, err)
	}
	if err := x.forkFrom(b, x.sources(x.c, x.template), x.truth); err != nil {
		t.Errorf("the ancestor is in use: %v", err)
	}
	if n := testmetrics.One(t, reg, "coppice_runner_ancestors_refused_total"); n != 2 {
		t.Errorf("%v ancestors were counted", n)
	}
	if s, err := b.Sandbox(child.SandboxID); err != nil || s.State != runnerapi.SandboxReady {
		t.Errorf("the machine that uses the ancestor is %+v, %v", s, err)
	}
}

// TestParentIsTheControllers captures a sandbox again of whose last checkpoint the controller knows nothing.
func TestParentIsTheControllers(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	s := x.a.fork(x.template)
	x.a.capture(s)
	x.c = core.NewID[core.CheckpointID]()
	got, err := x.a.Capture(t.Context(), s, runnerapi.Capture{CheckpointID: x.c, Parent: x.template})
	if err != nil || got.Parent != x.template {
		t.Fatalf("%+v, %v", got, err)
	}
	if err := x.forkFrom(x.a, nil, x.truth); err != nil {
		t.Error(err)
	}
	x.sealed(t, x.c)
}
