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
		r.slots.mu.Lock()
		defer r.slots.mu.Unlock()
		return len(slices.DeleteFunc(slices.Clone(r.slots.used), func(used bool) bool { return !used })) == len(ids)
	})
	r.wantOnly(ids...)
}

// TestPreparedMisfits: a machine is claimed only by a fork that asks for what was prepared: the same bytes and the same authority.
func TestPreparedMisfits(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, prepareUpTo(2))
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
	r.awaitPrepared(template, 1)
	if !claimed(t, r.forkInto(template, with("two"))[0]) {
		t.Error("a machine that trusts the same authority was not claimed")
	}
	r.awaitPrepared(template, 1)
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
	r := newFakeRig(t, func(c *Config) { c.Prepare.Max, c.MaxSandboxes = 2, 3 })
	one, other := r.boot(), r.boot()
	ids := []core.SandboxID{r.forkInto(one, r.child())[0].SandboxID}
	r.awaitPrepared(one, 1)
	for _, c := range r.forkInto(other, r.child(), r.child()) {
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
	ids[2] = r.forkInto(other, r.child())[0].SandboxID // takes the last place
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

// TestClaimFails: a child whose prepared machine fails it is destroyed, as any other.
func TestClaimFails(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	r := newFakeRig(t, prepareUpTo(1))
	template := r.boot()
	s := r.fork(template)
	r.awaitPrepared(template, 1)
	armed, err := failpoint.Arm("prepare.claimed", failpoint.Action{Kind: failpoint.Fail, Times: 1})
	if err != nil {
		t.Fatal(err)
	}
	defer armed.Disarm()
	f, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{r.child()}})
	if err != nil || f.Children[0].Problem == nil || f.Children[0].Problem.Code != core.CodeForkFailed {
		t.Errorf("%+v, %v", f, err)
	}
	r.wantOnlyOf(s)
	// One that has ended while it waited is no failure: the fork does without.
	r.fork(template)
	r.awaitPrepared(template, 1)
	for _, dir := range r.shellDirs() {
		if j, err := journal.Read(dir, r.cfg.ClusterID); err == nil && j.Sandbox == nil {
			r.driver.Crash(*j.Handle)
		}
	}
	r.forkInto(template, r.child())
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
