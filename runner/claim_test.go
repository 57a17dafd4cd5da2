package runner

import (
	"context"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// claim is a fork that hangs in the claim of a prepared machine, which will fail.
type claim struct {
	*fakeRig
	child runnerapi.Child
	held  *failpoint.Armed
	out   chan runnerapi.ChildResult
}

// holdClaim begins a fork and holds it at a failpoint: prepare.claimed, or one in the making of the other machine after the claim has failed.
func holdClaim(t *testing.T, point string, fault fakevmm.Fault) *claim {
	t.Helper()
	r := newFakeRig(t, prepareUpTo(1))
	template := r.boot()
	if err := r.Destroy(t.Context(), r.fork(template)); err != nil {
		t.Fatal(err)
	}
	r.awaitPrepared(template, 1)
	fault.Times = 1
	disarm := r.driver.Arm(fault)
	t.Cleanup(disarm)
	c := &claim{fakeRig: r, child: r.child(), out: make(chan runnerapi.ChildResult, 1)}
	c.held = hang(t, point, func() {
		f, err := r.Fork(context.WithoutCancel(t.Context()), runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{c.child}})
		if err != nil {
			t.Error(err)
			close(c.out)
			return
		}
		c.out <- f.Children[0]
	})
	return c
}

// wantNone lets the fork continue, which must fail and leave nothing.
func (c *claim) wantNone() {
	c.t.Helper()
	c.held.Disarm()
	if out := <-c.out; out.Problem == nil {
		c.t.Fatal("the fork of a sandbox that was ended meanwhile did not fail")
	}
	if _, err := c.find(c.child.SandboxID); err == nil {
		c.t.Error("the sandbox is still there")
	}
	c.wantOnlyOf()
}

// claims are the moments of a claim that fails: the machine that was prepared is still there, or another one is being made for it.
var claims = map[string]fakevmm.Fault{
	"prepare.claimed": {Step: fakevmm.AgentStep("reseal"), Kind: fakevmm.Die},
	"shell.made":      {Step: fakevmm.StepResume, Kind: fakevmm.Fail},
}

// TestDestroyInClaim: a sandbox that is destroyed while its prepared machine is being claimed is gone when Destroy returns. It is not made again.
func TestDestroyInClaim(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for point, fault := range claims {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			c := holdClaim(t, point, fault)
			destroyed := make(chan error, 1)
			go func() { destroyed <- c.Destroy(context.WithoutCancel(t.Context()), c.child.SandboxID) }()
			eventually.True(t, "it is being destroyed", func() bool {
				s, err := c.find(c.child.SandboxID)
				return err != nil || s.destroyed.Load()
			})
			select {
			case err := <-destroyed:
				t.Errorf("Destroy did not wait for the fork: %v", err)
				destroyed <- nil
			default:
			}
			c.held.Disarm()
			if err := <-destroyed; err != nil {
				t.Error(err)
			}
			c.wantNone()
		})
	}
}

// TestFenceInClaim: likewise, a sandbox that was ended because the lease had expired is not made again, even if there is a lease again.
func TestFenceInClaim(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for point, fault := range claims {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			c := holdClaim(t, point, fault)
			fenced := make(chan error, 1)
			go func() { fenced <- c.Fence(context.WithoutCancel(t.Context()), "a test") }()
			eventually.True(t, "it is being ended", func() bool {
				s, err := c.find(c.child.SandboxID)
				return err != nil || s.doomed()
			})
			if err := c.Lease().Attempt()(time.Hour); err != nil {
				t.Fatal(err)
			}
			c.held.Disarm()
			if err := <-fenced; err != nil {
				t.Error(err)
			}
			c.wantNone()
		})
	}
}

// TestRepeatInClaim: a request that is repeated while the other machine is made gets the sandbox that becomes of it.
func TestRepeatInClaim(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	c := holdClaim(t, "shell.made", claims["shell.made"])
	again := make(chan runnerapi.ChildResult, 1)
	former, err := c.find(c.child.SandboxID)
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		s, report, err := former.forkedBefore(context.WithoutCancel(t.Context()))
		out := runnerapi.ChildResult{Reseal: report}
		if err != nil {
			out.Problem = runnerapi.ProblemOf(err)
		} else {
			info := s.snapshot()
			out.Sandbox = &info
		}
		again <- out
	}()
	c.held.Disarm()
	for _, out := range []runnerapi.ChildResult{<-c.out, <-again} {
		if out.Problem != nil || out.Sandbox.State != runnerapi.SandboxReady || out.Reseal == nil || !out.Reseal.Complete {
			t.Errorf("%+v", out)
		}
	}
	c.wantOnlyOf(c.child.SandboxID)
}

// TestClaimUses: what a machine has used is the workspace's from the guest's answer to the fork on. Until then, the machine may be replaced.
func TestClaimUses(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	c := holdClaim(t, "prepare.claimed", claims["prepare.claimed"])
	if _, charged := c.charged()[c.child.SandboxID]; charged {
		t.Error("the workspace is charged for a machine that may never be its own")
	}
	before, err := c.find(c.child.SandboxID)
	if err != nil {
		t.Fatal(err)
	}
	c.held.Disarm()
	if out := <-c.out; out.Problem != nil {
		t.Fatalf("%+v", out.Problem)
	}
	if h, charged := c.charged()[c.child.SandboxID]; !charged || h == before.machine.Handle() {
		t.Errorf("the workspace is charged for %+v", h)
	}
	c.wantOnlyOf(c.child.SandboxID)
}

// TestClaimsAlwaysFail: where no machine can be claimed, they do not count as hits, and the forecast gives up.
func TestClaimsAlwaysFail(t *testing.T) {
	t.Parallel()
	registry := prometheus.NewRegistry()
	r := newFakeRig(t, func(c *Config) { c.Prepare.Max, c.Metrics = 1, registry })
	template := r.boot()
	ids := []core.SandboxID{r.fork(template)}
	r.awaitPrepared(template, 1)
	disarm := r.driver.Arm(fakevmm.Fault{Step: fakevmm.StepResume, Kind: fakevmm.Fail, Times: 1})
	ids = append(ids, r.fork(template))
	disarm()
	got := testmetrics.Of(t, registry)
	if taken, failed := got["coppice_runner_prepared_total taken"], got["coppice_runner_prepared_total failed"]; taken != 0 || failed != 1 {
		t.Errorf("%v machines were taken and %v have failed", taken, failed)
	}
	last := r.forkInto(template, r.child())[0]
	if claimed(t, last) { // a first machine in vain is a reason for a pause
		t.Error("a machine was prepared again at once")
	}
	r.wantOnlyOf(append(ids, last.SandboxID)...)
}
