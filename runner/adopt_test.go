package runner

import (
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// hang arms a point and returns once begin has come to it.
func hang(t *testing.T, point string, begin func()) *failpoint.Armed {
	t.Helper()
	armed, err := failpoint.Arm(point, failpoint.Action{Kind: failpoint.Hang, Times: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(armed.Disarm)
	go begin()
	select {
	case <-armed.Reached():
	case <-time.After(time.Minute):
		t.Fatalf("%s was not reached", point)
	}
	return armed
}

// points are the failpoints of this package with a prefix.
func points(t *testing.T, prefix string) []string {
	t.Helper()
	var out []string
	for _, name := range failpoint.Names() {
		if strings.HasPrefix(name, prefix) {
			out = append(out, name)
		}
	}
	if len(out) < 5 {
		t.Fatalf("there are %d failpoints %q", len(out), prefix)
	}
	return out
}

// TestCrashInFork ends a runner at every step of a fork: the sandbox that was ready goes on, the one that was being made is gone whole
// unless it was ready, nothing else is left, and the same fork can be asked for again.
func TestCrashInFork(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for _, point := range append(points(t, "shell."), points(t, "fork.")...) {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			r := newFakeRig(t, func(*Config) {})
			template := r.boot()
			bystander := r.fork(template)
			req := runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{r.child()}}
			id := req.Children[0].SandboxID
			before := r.Runner
			armed := hang(t, point, func() { _, _ = before.Fork(context.WithoutCancel(t.Context()), req) })
			cleanup := r.crash(armed)
			r.start()
			if point == "fork.ready" {
				r.wantOnly(bystander, id)
			} else {
				r.wantOnly(bystander)
			}
			if d := len(r.dead); d != 0 {
				t.Errorf("%d sandboxes are reported dead", d)
			}
			if point != "fork.ready" {
				cleanup()
			}
			out, err := r.Fork(t.Context(), req)
			if err != nil || out.Children[0].Problem != nil || out.Children[0].Reseal == nil || !out.Children[0].Reseal.Complete {
				t.Fatalf("the fork was asked for again: %+v, %v", out, err)
			}
			r.wantOnly(bystander, id)
			r.stop()
			r.wantOnly()
			cleanup()
		})
	}
}

// TestCrashInCapture ends a runner at every step of a capture: the sandbox goes on with fresh entropy, the capture has failed unless it
// was published, and its files are gone.
func TestCrashInCapture(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for _, point := range points(t, "capture.") {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			r := newFakeRig(t, func(*Config) {})
			s := r.fork(r.boot())
			head := r.capture(s)
			req := runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()}
			before := r.Runner
			armed := hang(t, point, func() { _, _ = before.Capture(context.WithoutCancel(t.Context()), s, req) })
			cleanup := r.crash(armed)
			began := time.Now()
			r.start()
			t.Logf("taken over after %s", time.Since(began).Round(time.Millisecond))
			r.wantOnly(s)
			got, err := r.Capture(t.Context(), s, req)
			if point == "capture.published" {
				if err != nil || got.Parent != head {
					t.Fatalf("the capture was asked for again: %+v, %v", got, err)
				}
				head = got.ID
			} else if core.CodeOf(err) != core.CodeRunnerLost {
				t.Errorf("the capture was asked for again: %+v, %v", got, err)
			}
			next, err := r.Capture(t.Context(), s, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
			if err != nil || next.Parent != head {
				t.Fatalf("the next capture: %+v, %v; want parent %s", next, err, head)
			}
			child := r.fork(next.ID)
			// What was cut short stays so after another restart.
			again := r.crash()
			r.start()
			r.wantOnly(s, child)
			if _, err := r.Capture(t.Context(), s, req); point != "capture.published" && core.CodeOf(err) != core.CodeRunnerLost {
				t.Errorf("the capture was asked for after another restart: %v", err)
			}
			r.stop()
			r.wantOnly()
			cleanup()
			again()
		})
	}
}

// TestCrashInSuspension: a sandbox that ends with its capture does not run again once that is published, and goes on before.
func TestCrashInSuspension(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for _, point := range []string{"capture.cloned", "capture.published"} {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			r := newFakeRig(t, func(*Config) {})
			s := r.fork(r.boot())
			req := runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID](), Stop: true}
			before := r.Runner
			armed := hang(t, point, func() { _, _ = before.Capture(context.WithoutCancel(t.Context()), s, req) })
			cleanup := r.crash(armed)
			r.start()
			if point == "capture.published" {
				r.wantOnly()
				if _, err := r.Capture(t.Context(), s, req); err != nil {
					t.Errorf("the suspension was asked for again: %v", err)
				}
				r.wantOnly(r.fork(req.CheckpointID))
			} else {
				r.wantOnly(s)
			}
			r.stop()
			cleanup()
		})
	}
}

// TestCrashElsewhere ends a runner in the middle of what makes no sandbox: nothing of it is left.
func TestCrashElsewhere(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	t.Run("template", func(t *testing.T) { //nolint:paralleltest // see above
		r := newFakeRig(t, func(*Config) {})
		before := r.Runner
		armed := hang(t, "template.after_base", func() {
			_, _ = before.Template(context.WithoutCancel(t.Context()), runnerapi.Template{
				CheckpointID: core.NewID[core.CheckpointID](), Image: r.image.Digest, Resources: core.Resources{VCPUs: 1, MemoryMiB: fakeMiB},
			})
		})
		cleanup := r.crash(armed)
		r.start()
		r.wantOnly()
		if left, err := r.bases.List(); err != nil || len(left) > 0 {
			t.Errorf("bases are left: %v, %v", left, err)
		}
		cleanup()
		r.fork(r.boot())
	})
	t.Run("warm shells", func(t *testing.T) { //nolint:paralleltest // see above
		r := newFakeRig(t, func(c *Config) { c.Warm = 2 })
		s := r.fork(r.boot())
		for deadline := time.After(time.Minute); r.driver.Machines() < 3; {
			select {
			case <-deadline:
				t.Fatal("no shells were made")
			case <-time.After(time.Millisecond):
			}
		}
		cleanup := r.crash()
		r.start()
		r.wantOnly(s)
		cleanup()
	})
}

// TestNotTakenOver: what cannot be gone on with is taken down whole and reported dead, with the cause.
func TestNotTakenOver(t *testing.T) {
	t.Parallel()
	edit := func(change func(j map[string]any)) func(*fakeRig, *sandbox) {
		return func(r *fakeRig, s *sandbox) {
			path := filepath.Join(s.runDir, journal.File)
			b, err := os.ReadFile(path)
			if err != nil {
				r.t.Fatal(err)
			}
			var j map[string]any
			if err := json.Unmarshal(b, &j); err != nil {
				r.t.Fatal(err)
			}
			change(j)
			if b, err = json.Marshal(j); err == nil {
				err = os.WriteFile(path, b, 0o600)
			}
			if err != nil {
				r.t.Fatal(err)
			}
		}
	}
	for name, c := range map[string]struct {
		spoil  func(r *fakeRig, s *sandbox)
		silent bool // there is nothing to report it by: the controller misses it
		want   string
	}{
		"VMM is gone":            {spoil: func(r *fakeRig, s *sandbox) { r.driver.Crash(*s.Handle) }, want: "its VMM had ended meanwhile"},
		"disk is gone":           {spoil: func(_ *fakeRig, s *sandbox) { _ = os.Remove(filepath.Join(s.dir, checkpoints.OverlayFile)) }, want: "not taken over when its runner"},
		"namespace is gone":      {spoil: func(_ *fakeRig, s *sandbox) { _ = s.ns.Release(t.Context()) }, want: "not taken over when its runner"},
		"namespace is another's": {spoil: func(_ *fakeRig, s *sandbox) { _ = s.ns.Assign(t.Context(), core.Identity{Hostname: "x"}) }, want: "not taken over when its runner"},
		"VMM is unknown":         {spoil: edit(func(j map[string]any) { j["handle"].(map[string]any)["driver"] = "nested" }), want: `its VMM is "nested", which this runner does not know`},
		"place is beyond":        {spoil: edit(func(j map[string]any) { j["slot"] = 1000 }), want: "its place, number 1000"},
		"lease is over":          {spoil: func(r *fakeRig, _ *sandbox) { _ = r.lease.Attempt()(time.Nanosecond) }, want: "no word from the controller"},
		"journal is damaged": {spoil: func(_ *fakeRig, s *sandbox) {
			_ = os.WriteFile(filepath.Join(s.runDir, journal.File), []byte("{\"ver"), 0o600)
		}, silent: true},
		"journal is gone":         {spoil: func(_ *fakeRig, s *sandbox) { _ = os.RemoveAll(s.runDir) }, silent: true},
		"journal is of a later":   {spoil: edit(func(j map[string]any) { j["version"] = 2 }), silent: true},
		"journal is of last boot": {spoil: edit(func(j map[string]any) { j["boot"] = "yesterday" }), silent: true},
		"guest hangs after a capture": {spoil: func(r *fakeRig, s *sandbox) {
			edit(func(j map[string]any) { j["sandbox"].(map[string]any)["capture"] = core.NewID[core.CheckpointID]() })(r, s)
			r.driver.Arm(fakevmm.Fault{Step: fakevmm.AgentStep("reseed"), Kind: fakevmm.Hang, Sandbox: s.ID})
		}, want: "not taken over when its runner"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newFakeRig(t, func(c *Config) {
				if strings.HasPrefix(name, "guest hangs") {
					c.GuestTimeout = 5 * time.Second // enough for the other guest, on a busy machine too
				}
			})
			template := r.boot()
			id, other := r.fork(template), r.fork(template)
			s, err := r.find(id)
			if err != nil {
				t.Fatal(err)
			}
			cleanup := r.crash()
			c.spoil(r, s)
			r.start()
			if name == "lease is over" {
				r.wantOnly()
			} else {
				r.wantOnly(other)
			}
			got, err := r.Sandbox(id)
			if c.silent {
				if core.CodeOf(err) != core.CodeSandboxNotFound {
					t.Errorf("it is %+v, %v", got, err)
				}
			} else if err != nil || got.State != runnerapi.SandboxDead || !strings.Contains(got.Exit, c.want) {
				t.Errorf("it is %+v, %v, want one that is dead because %q", got, err, c.want)
			}
			cleanup()
		})
	}
}

// TestOthersAreNotTouched: a runner refuses the directories of another cluster and those that another runner has, and what another
// cluster has on the host goes on.
func TestOthersAreNotTouched(t *testing.T) {
	t.Parallel()
	a := newFakeRig(t, func(c *Config) { c.ClusterID = "a" })
	b := newFakeRig(t, func(c *Config) { c.ClusterID, c.Driver = "b", a.driver })
	first := a.fork(a.boot())
	second := b.fork(b.boot())
	if _, err := New(t.Context(), a.cfg); core.CategoryOf(err) != core.Conflict {
		t.Errorf("two runners on one directory: %v", err)
	}
	cleanup := a.crash()
	wrong := a.cfg
	wrong.ClusterID = "c"
	if _, err := New(t.Context(), wrong); core.CategoryOf(err) != core.FailedPrecondition {
		t.Errorf("a runner of cluster c on the directories of a: %v", err)
	}
	stray, err := a.find(first)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.RemoveAll(stray.runDir); err != nil { // nothing but its mark leads to the machine of a
		t.Fatal(err)
	}
	a.start()
	if _, err := b.find(second); err != nil {
		t.Error(err)
	}
	if n := a.driver.Machines(); n != 1 {
		t.Errorf("there are %d machines, want that of b", n)
	}
	cleanup()
}

// TestLeave: a runner that is told to leaves its sandboxes for the next, with their ports, and takes its idle shells down.
func TestLeave(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(c *Config) { c.Leave, c.Warm = true, 1 })
	s := r.fork(r.boot())
	r.stop()
	if n := r.driver.Machines(); n != 1 {
		t.Errorf("there are %d machines, want one", n)
	}
	r.cfg.Leave = false
	r.start()
	r.cfg.Leave = true
	if _, err := r.find(s); err != nil {
		t.Fatal(err)
	}
	if err := r.Destroy(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

// TestLease ends sandboxes when the controller is silent, and takes no work until it is heard again.
func TestLease(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(*Config) {})
	template := r.boot()
	ids := []core.SandboxID{r.fork(template), r.fork(template)}
	if err := r.lease.Attempt()(time.Minute); err != nil {
		t.Fatal(err)
	}
	if r.lease.Expired() {
		t.Error("the lease is over within its time")
	}
	early := r.lease.Attempt() // what is answered late counts from its beginning
	if err := early(10 * time.Millisecond); err != nil {
		t.Fatal(err)
	}
	deadline := time.After(time.Minute)
	for _, id := range ids {
		for {
			s, err := r.Sandbox(id)
			if err != nil {
				t.Fatal(err)
			}
			if s.State == runnerapi.SandboxDead {
				if !strings.Contains(s.Exit, "no word from the controller") {
					t.Errorf("the cause is %q", s.Exit)
				}
				break
			}
			select {
			case <-deadline:
				t.Fatal("the sandboxes of a silent runner live on")
			case <-time.After(time.Millisecond):
			}
		}
	}
	if _, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{r.child()}}); core.CodeOf(err) != core.CodeRunnerUnreachable {
		t.Errorf("a fork without a lease: %v", err)
	}
	if err := r.lease.Attempt()(time.Minute); err != nil {
		t.Fatal(err)
	}
	r.Forget(ids...)
	r.wantOnly(r.fork(template))
}

// TestFenceDuringWork: a fence does not wait for what is being done with a sandbox, and nothing new is made.
func TestFenceDuringWork(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	r := newFakeRig(t, func(*Config) {})
	template := r.boot()
	ready := r.fork(template)
	child := r.child()
	done := make(chan runnerapi.ForkResult, 1)
	armed := hang(t, "fork.connected", func() {
		out, err := r.Fork(context.WithoutCancel(t.Context()), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{child}})
		if err != nil {
			t.Error(err)
		}
		done <- out
	})
	fenced := make(chan error, 1)
	go func() { fenced <- r.Fence(context.WithoutCancel(t.Context()), "it was told so") }()
	for deadline := time.After(time.Minute); r.driver.Machines() > 0; {
		select {
		case <-deadline:
			t.Fatal("machines live on after a fence")
		case <-time.After(time.Millisecond):
		}
	}
	armed.Release()
	if err := <-fenced; err != nil {
		t.Error(err)
	}
	if out := <-done; out.Children[0].Problem == nil {
		t.Error("a fork succeeded through a fence")
	}
	if s, err := r.Sandbox(ready); err != nil || s.Exit != "it was told so" {
		t.Errorf("%+v, %v", s, err)
	}
	r.wantOnly()
}

var _ vmm.Driver = (*fakevmm.Driver)(nil)
