package runner

import (
	"context"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// prepareUpTo configures a runner that prepares machines.
func prepareUpTo(n int) func(*Config) { return func(c *Config) { c.Prepare.Max = n } }

// awaitPrepared waits until as many machines of a checkpoint are prepared.
func (r *fakeRig) awaitPrepared(id core.CheckpointID, n int) {
	r.t.Helper()
	eventually.True(r.t, "machines are prepared", func() bool { return r.prepared.Ready(id) == n })
}

// forkInto forks a checkpoint into children, which must become ready.
func (r *fakeRig) forkInto(id core.CheckpointID, children ...runnerapi.Child) []runnerapi.ChildResult {
	r.t.Helper()
	f, err := r.Fork(r.t.Context(), runnerapi.Fork{CheckpointID: id, Children: children})
	if err != nil {
		r.t.Fatal(err)
	}
	for _, c := range f.Children {
		if c.Problem != nil {
			r.t.Fatalf("fork: %+v", c.Problem)
		}
	}
	return f.Children
}

// claimed reports whether a child was made of a prepared machine. One that was has no stage that was done before.
func claimed(t *testing.T, c runnerapi.ChildResult) bool {
	t.Helper()
	var stages []string
	for _, s := range c.Timings {
		stages = append(stages, s.Stage)
	}
	was := slices.Contains(stages, "claim")
	for _, s := range []string{"shell", "disk", "restore", "resume", "connect"} {
		if slices.Contains(stages, s) == was {
			t.Errorf("a child has the stages %v", stages)
		}
	}
	return was
}

// TestPrepared: after a fork, as many machines wait for the next one. Its children are made of them and are like all others, and nothing of the
// identity that the machines had is left.
func TestPrepared(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	r := newFakeRig(t, func(c *Config) { c.Prepare.Max, c.Metrics = 4, registry })
	template := r.boot()
	first := r.forkInto(template, r.child(), r.child())
	for _, c := range first {
		if claimed(t, c) {
			t.Error("a machine was prepared before the first fork")
		}
	}
	r.awaitPrepared(template, 2)
	second := r.forkInto(template, r.child(), r.child(), r.child())
	n := 0
	seen := map[string]bool{}
	for i, c := range append(first, second...) {
		if i >= len(first) && claimed(t, c) {
			n++
		}
		if c.Reseal == nil || !c.Reseal.Complete || c.Reseal.Generation != c.Sandbox.Identity.Generation || c.Sandbox.State != runnerapi.SandboxReady {
			t.Errorf("child %d: %+v, %+v", i, c.Reseal, c.Sandbox)
		}
		for _, step := range c.Reseal.Steps {
			if step.Name == guestapi.StepEntropy || step.Name == guestapi.StepBootID {
				for _, v := range step.Evidence {
					if seen[v] {
						t.Errorf("%s of two guests: %s", step.Name, v)
					}
					seen[v] = true
				}
			}
		}
	}
	if n != 2 {
		t.Errorf("%d of the children were made of prepared machines, want 2", n)
	}
	var ids []core.SandboxID
	for _, c := range append(first, second...) {
		ids = append(ids, c.SandboxID)
	}
	r.awaitPrepared(template, 2) // the usual number is between 2 and 3
	for key, want := range map[string]float64{"taken": 2, "missed": 3, "wasted": 0, "failed": 0} {
		if got := testmetrics.Of(t, registry)["coppice_runner_prepared_total "+key]; got != want {
			t.Errorf("%s: %v, want %v", key, got, want)
		}
	}
	r.wantOnlyOf(ids...)
	// A capture of a child, whose own children are expected.
	c := r.capture(ids[4])
	r.awaitPrepared(c, 1)
	grandchild := r.forkInto(c, r.child())
	if !claimed(t, grandchild[0]) {
		t.Error("the machine that was prepared after the capture was not claimed")
	}
}

// wantOnlyOf is wantOnly when nothing is expected any more, so that no machine is being prepared.
func (r *fakeRig) wantOnlyOf(ids ...core.SandboxID) {
	r.t.Helper()
	eventually.True(r.t, "prepared machines are gone", func() bool {
		for _, c := range r.Checkpoints() {
			r.prepared.Removed(c.ID)
		}
		r.prepared.Purge(r.t.Context())
		free, all := r.slots.Free()
		return all-free == len(ids)
	})
	r.wantOnly(ids...)
}

// TestPreparedMisfits: a machine is claimed only by a fork that asks for what was prepared: the same bytes and the same authority. Machines of two
// authorities wait beside each other.
func TestPreparedMisfits(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	r := newFakeRig(t, func(c *Config) { c.Prepare.Max, c.Metrics = 3, registry })
	template := r.boot()
	with := func(ca string) runnerapi.Child {
		c := r.child()
		c.CA = ca
		return c
	}
	r.forkInto(template, with("one"))
	r.awaitPrepared(template, 1)
	if claimed(t, r.forkInto(template, with("two"))[0]) {
		t.Error("a machine that trusts one authority was claimed for another")
	}
	for range 3 {
		for _, ca := range []string{"one", "two"} {
			r.awaitPrepared(template, 2)
			if !claimed(t, r.forkInto(template, with(ca))[0]) {
				t.Errorf("the machine that trusts authority %s was not claimed", ca)
			}
		}
	}
	if n := testmetrics.Of(t, registry)["coppice_runner_prepared_total wasted"]; n != 0 {
		t.Errorf("%v machines were wasted by two projects that took turns", n)
	}
	r.awaitPrepared(template, 2)
	big := with("two")
	big.DiskGiB = 1
	grown := r.forkInto(template, big)[0]
	if !claimed(t, grown) || grown.Sandbox.Resources.DiskGiB != 1 {
		t.Errorf("with a larger disk: %+v", grown.Sandbox)
	}
	// A rebase replaces the bytes by equal ones, and a copy that was given up may come back: then it is not what was prepared.
	c := r.capture(grown.SandboxID)
	r.awaitPrepared(c, 1)
	if err := r.Rebase(c); err != nil {
		t.Fatal(err)
	}
	if claimed(t, r.forkInto(c, with("two"))[0]) {
		t.Error("a machine was claimed although the checkpoint has other files now")
	}
}

// TestPreparedGivesWay: a fork that needs the place of a prepared machine gets it, also that of a machine that is being prepared.
func TestPreparedGivesWay(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	r := newFakeRig(t, func(c *Config) { c.Prepare.Max, c.MaxSandboxes = 2, 4 })
	one, other := r.boot(), r.boot()
	ids := []core.SandboxID{r.forkInto(one, r.child())[0].SandboxID}
	r.awaitPrepared(one, 1)
	for _, c := range r.forkInto(other, r.child(), r.child(), r.child()) {
		if claimed(t, c) {
			t.Error("a machine of another checkpoint was claimed")
		}
		ids = append(ids, c.SandboxID)
	}
	r.wantOnlyOf(ids...)
	for _, id := range ids[1:] {
		if err := r.Destroy(t.Context(), id); err != nil {
			t.Fatal(err)
		}
	}
	r.wantOnlyOf(ids[0])
	second := r.child()
	ids[1] = second.SandboxID
	hang(t, "prepare.restored", func() {
		_, _ = r.Fork(t.Context(), runnerapi.Fork{CheckpointID: other, Children: []runnerapi.Child{second}})
	})
	ids = ids[:2]
	for _, c := range r.forkInto(other, r.child(), r.child()) { // takes the last places
		ids = append(ids, c.SandboxID)
	}
	r.wantOnlyOf(ids...)
}

// TestPreparedEnds: prepared machines end with their checkpoint, with the runner and when it is fenced.
func TestPreparedEnds(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, prepareUpTo(2))
	template := r.boot()
	s := r.fork(template)
	c := r.capture(s)
	r.awaitPrepared(c, 1)
	r.awaitPrepared(template, 1)
	if err := r.DeleteCheckpoint(c); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "its machine is gone", func() bool { return r.prepared.Ready(c) == 0 && r.driver.Machines() == 2 })
	r.awaitPrepared(template, 1)
	if err := r.Fence(t.Context(), "a test"); err != nil {
		t.Fatal(err)
	}
	r.wantOnly()
	if err := r.Lease().Attempt()(time.Hour); err != nil {
		t.Fatal(err)
	}
	r.fork(template)
	r.awaitPrepared(template, 1)
	r.stop()
	r.wantOnly()
}

// TestPreparationFails: whatever fails while a machine is prepared, nothing of it is left, and forks do without.
func TestPreparationFails(t *testing.T) {
	t.Parallel()
	for _, fault := range []fakevmm.Fault{
		{Step: fakevmm.StepRestore, Kind: fakevmm.Fail},
		{Step: fakevmm.AgentStep("health"), Kind: fakevmm.Fail},
		{Step: fakevmm.AgentStep("reseal"), Kind: fakevmm.Die},
		{Step: fakevmm.ResealStep(guestapi.StepMachineID), Kind: fakevmm.Fail},
		{Step: fakevmm.ResealStep(guestapi.StepHostname), Kind: fakevmm.Lie},
	} {
		t.Run(string(fault.Step), func(t *testing.T) {
			t.Parallel()
			registry := prometheus.NewRegistry()
			r := newFakeRig(t, func(c *Config) { c.Prepare.Max, c.Metrics = 1, registry })
			template := r.boot()
			fault.Skip = 1 // the fork itself
			if fault.Step == fakevmm.AgentStep("health") {
				fault.Skip = 0 // a fork does not ask
			}
			disarm := r.driver.Arm(fault)
			s := r.fork(template)
			eventually.True(t, "a machine was not prepared", func() bool {
				return testmetrics.Of(t, registry)["coppice_runner_prepared_total failed"] == 1
			})
			disarm()
			r.wantOnly(s)
			if claimed(t, r.forkInto(template, r.child())[0]) {
				t.Error("a machine that could not be prepared was claimed")
			}
			r.awaitPrepared(template, 1)
		})
	}
}

// TestClaimFails: a prepared machine that cannot be resumed or has ended is no reason to fail a fork: its child is made of another machine, once. A guest
// that fails its reseal ends the child, as that of any other machine would.
func TestClaimFails(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	fail := func(fault fakevmm.Fault) func(r *fakeRig) (disarm func()) {
		return func(r *fakeRig) func() {
			fault.Times = 1
			return r.driver.Arm(fault)
		}
	}
	for name, c := range map[string]struct {
		arm   func(r *fakeRig) (disarm func())
		fails bool
	}{
		"at the claim": {arm: func(r *fakeRig) func() {
			armed, err := failpoint.Arm("prepare.claimed", failpoint.Action{Kind: failpoint.Fail, Times: 1})
			if err != nil {
				r.t.Fatal(err)
			}
			return func() { armed.Disarm() }
		}},
		"it cannot be resumed":  {arm: fail(fakevmm.Fault{Step: fakevmm.StepResume, Kind: fakevmm.Fail})},
		"it ends when resumed":  {arm: fail(fakevmm.Fault{Step: fakevmm.StepResume, Kind: fakevmm.Die})},
		"it ends in its reseal": {arm: fail(fakevmm.Fault{Step: fakevmm.AgentStep("reseal"), Kind: fakevmm.Die})},
		"a step fails":          {arm: fail(fakevmm.Fault{Step: fakevmm.ResealStep(guestapi.StepMachineID), Kind: fakevmm.Fail}), fails: true},
		"a step lies":           {arm: fail(fakevmm.Fault{Step: fakevmm.ResealStep(guestapi.StepHostname), Kind: fakevmm.Lie}), fails: true},
		"it ended while it waited": {arm: func(r *fakeRig) func() {
			for _, dir := range r.shellDirs() {
				if j, err := journal.Read(dir, r.cfg.ClusterID); err == nil && j.Sandbox == nil {
					r.driver.Crash(*j.Handle)
				}
			}
			return func() {}
		}},
	} {
		t.Run(name, func(t *testing.T) { //nolint:paralleltest // see above
			r := newFakeRig(t, prepareUpTo(1))
			template := r.boot()
			ids := []core.SandboxID{r.fork(template)}
			r.awaitPrepared(template, 1)
			disarm := c.arm(r)
			child := r.child()
			f, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{child}})
			disarm()
			if err != nil {
				t.Fatal(err)
			}
			out := f.Children[0]
			if (out.Problem != nil) != c.fails {
				t.Fatalf("the fork fails: %v; %+v", out.Problem != nil, out.Problem)
			}
			if !c.fails {
				ids = append(ids, child.SandboxID)
				if out.Reseal == nil || !out.Reseal.Complete || out.Reseal.Generation != child.Identity.Generation {
					t.Errorf("it was resealed as %+v", out.Reseal)
				}
			}
			r.wantOnlyOf(ids...)
		})
	}
}

// TestPreparedLeavesRoom: machines are prepared only while slots are left for other shapes, and end when forks leave too few.
func TestPreparedLeavesRoom(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(c *Config) { c.Prepare.Max, c.MaxSandboxes = 16, 16 }) // two of them stay free
	template := r.boot()
	var ids []core.SandboxID
	for range 4 {
		ids = append(ids, r.fork(template))
	}
	children := make([]runnerapi.Child, 8)
	for i := range children {
		children[i] = r.child()
	}
	for _, c := range r.forkInto(template, children...) {
		ids = append(ids, c.SandboxID)
	}
	r.awaitPrepared(template, 2)
	ids = append(ids, r.fork(r.boot())) // of another shape; the template's boot and this child found free slots
	if n, all := r.slots.Free(); n < 1 || all != 16 {
		t.Errorf("%d of %d slots are free", n, all)
	}
	eventually.True(t, "two slots are free again", func() bool { n, _ := r.slots.Free(); return n == 2 && r.prepared.Ready(template) == 1 })
	r.wantOnlyOf(ids...)
}

// TestPreparedForRestore: a restore in place and a resume are forks with the next epoch of their workspace, and take a prepared machine as any other.
func TestPreparedForRestore(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, prepareUpTo(2))
	template := r.boot()
	first := r.child()
	r.forkInto(template, first)
	c := r.capture(first.SandboxID)
	for epoch := range int64(2) { // while the sandbox of the epoch before lives, and after its end
		r.awaitPrepared(c, 1)
		next := r.child()
		next.WorkspaceID, next.Epoch = first.WorkspaceID, epoch+2
		if out := r.forkInto(c, next)[0]; !claimed(t, out) || out.Sandbox.Epoch != next.Epoch {
			t.Errorf("epoch %d of the workspace: %+v", next.Epoch, out.Sandbox)
		}
		if err := r.Destroy(t.Context(), first.SandboxID); err != nil {
			t.Fatal(err)
		}
	}
}

// TestPreparedDrain: on a runner that is drained nothing is prepared.
func TestPreparedDrain(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, prepareUpTo(1))
	template := r.boot()
	ids := []core.SandboxID{r.fork(template)}
	r.awaitPrepared(template, 1)
	r.Drain(true)
	eventually.True(t, "its machine is gone", func() bool { return r.driver.Machines() == 1 })
	ids = append(ids, r.fork(template))
	r.wantOnly(ids...)
	r.Drain(false)
	r.awaitPrepared(template, 1)
}

// shellDirs are the directories with journals.
func (r *fakeRig) shellDirs() []string {
	r.t.Helper()
	files, err := filepath.Glob(filepath.Join(r.cfg.RunDir, "*", journal.File))
	if err != nil {
		r.t.Fatal(err)
	}
	for i, f := range files {
		files[i] = filepath.Dir(f)
	}
	return files
}

// TestPreparedOldAgent: an agent that knows of no provisional reseal is only connected to, and its machine serves a fork with any authority.
func TestPreparedOldAgent(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(c *Config) {
		c.Prepare.Max = 1
		c.Driver = fakevmm.New(fakevmm.Config{Guest: fakevmm.OldAgent(guestapi.FeatureProvisional)})
	})
	r.driver = r.cfg.Driver.(*fakevmm.Driver)
	template := r.boot()
	r.fork(template)
	r.awaitPrepared(template, 1)
	child := r.child()
	child.CA = "any"
	c := r.forkInto(template, child)[0]
	if !claimed(t, c) || c.Reseal.Generation != child.Identity.Generation {
		t.Errorf("%+v", c)
	}
}

// TestCrashInPreparation ends a runner at every step of a preparation, and of the claim of a machine: nothing of the machine is left.
func TestCrashInPreparation(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for _, point := range append(points(t, "prepare."), "ready") {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			r := newFakeRig(t, prepareUpTo(1))
			template := r.boot()
			bystander := r.child()
			before := r.Runner
			fork := func(c runnerapi.Child) {
				_, _ = before.Fork(context.WithoutCancel(t.Context()), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{c}})
			}
			var held []*failpoint.Armed
			switch point {
			case "ready":
				fork(bystander)
				r.awaitPrepared(template, 1)
			case "prepare.claimed":
				fork(bystander)
				r.awaitPrepared(template, 1)
				held = append(held, hang(t, point, func() { fork(r.child()) }))
			default:
				held = append(held, hang(t, point, func() { fork(bystander) }))
			}
			cleanup := r.crash(held...)
			r.start()
			r.wantOnly(bystander.SandboxID)
			cleanup()
			r.fork(template)
			r.awaitPrepared(template, 1)
			r.stop()
			r.wantOnly()
		})
	}
}
