package controller

import (
	"context"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// callFork asks each runner for its own share of the children. If one of several runners fails,
// only the children of that runner get its problem.
func (c *Controller) callFork(ctx context.Context, plan *forkPlan) ([]runnerapi.ChildResult, error) {
	shares := map[string][]int{} // by endpoint: places in the order asked
	for i, w := range plan.children {
		shares[w.Sandbox.Endpoint] = append(shares[w.Sandbox.Endpoint], i)
	}
	out := make([]runnerapi.ChildResult, len(plan.children))
	if len(shares) == 1 {
		for endpoint, share := range shares {
			if err := c.callShare(ctx, plan, endpoint, share, out); err != nil {
				return nil, err
			}
		}
		return out, nil
	}
	var group sync.WaitGroup
	for endpoint, share := range shares {
		group.Go(func() {
			err := c.callShare(ctx, plan, endpoint, share, out)
			if err == nil {
				return
			}
			c.log.WarnContext(ctx, "a runner did not grow its share of a fork", "checkpoint_id", plan.source.ID, "runner_id", plan.children[share[0]].Sandbox.RunnerID, "err", err)
			for _, i := range share {
				out[i] = runnerapi.ChildResult{SandboxID: plan.children[i].Sandbox.ID, Problem: runnerapi.ProblemOf(err)}
			}
		})
	}
	group.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	return out, nil
}

// callShare asks one runner for some of the children. It repeats the request if the runner could not be reached, and checks every
// answer. A child counts as grown only with a complete reseal of its generation, and with an attestation by the runner that was asked.
func (c *Controller) callShare(ctx context.Context, plan *forkPlan, endpoint string, share []int, out []runnerapi.ChildResult) error {
	req := runnerapi.Fork{CheckpointID: plan.source.ID, Children: make([]runnerapi.Child, len(share)), Sources: plan.source.Sources, Peers: plan.source.Peers, Expected: plan.source.Expected()}
	// A host that joined again is another runner. It may still hold the checkpoint that it captured
	// as the earlier runner, but it cannot attest these bytes. So it must verify them against the
	// manifest, like every runner that has not captured the checkpoint.
	req.Verify = len(req.Sources) > 0 && plan.children[share[0]].Sandbox.RunnerID != plan.source.RunnerID
	if err := c.tell(ctx, plan, share, req.Children); err != nil {
		return err
	}
	for n, i := range share {
		w := plan.children[i]
		if w.Resources.DiskGiB > plan.source.Resources.DiskGiB {
			req.Children[n].DiskGiB = w.Resources.DiskGiB
		}
	}
	// Without the keys a runner can still grow a checkpoint that it has. Another runner reports that it lacks the keys; this is the cause.
	keys, unavailable := c.dataKeys.For(ctx, plan.source.Sources...)
	if unavailable != nil && core.CodeOf(unavailable) != core.CodeKeyUnavailable {
		return unavailable
	}
	req.Keys = keys
	var res runnerapi.ForkResult
	err := c.insist(ctx, func() error {
		var err error
		res, err = c.runners.Fork(ctx, endpoint, req)
		return err
	})
	if core.CodeOf(err) == core.CodeKeyUnavailable && unavailable != nil {
		return unavailable
	}
	if err != nil {
		return err
	}
	if len(res.Children) != len(req.Children) {
		return core.Errorf(core.Internal, core.CodeInternal, "the runner answered a fork of %d with %d children", len(req.Children), len(res.Children))
	}
	for n, i := range share {
		out[i] = res.Children[n]
		problem := refused(req.Children[n], out[i])
		if problem == nil {
			out[i].Attestation, problem = c.accept(plan, plan.children[i], req.Children[n], out[i])
		}
		if problem != nil {
			out[i].Problem, out[i].Attestation = runnerapi.ProblemOf(problem), nil
		}
	}
	return nil
}

// tell describes some of the children for their runner. It issues their grants again, with the present secrets and rules.
func (c *Controller) tell(ctx context.Context, plan *forkPlan, share []int, children []runnerapi.Child) error {
	list := make([]grants.Workspace, len(share))
	for n, i := range share {
		list[n] = plan.children[i].ForGrants()
	}
	bundles, err := c.grants.Bundles(ctx, list, false)
	if err != nil {
		return err
	}
	for n, i := range share {
		w := plan.children[i]
		children[n] = runnerapi.Child{
			SandboxID: w.Sandbox.ID, WorkspaceID: w.ID, Epoch: w.Sandbox.Epoch, Identity: w.Sandbox.Identity, Egress: w.Egress, Rules: bundles[n].Rules, Env: w.Env,
		}
		plan.tell(w, bundles[n].Given)
		if w.Egress != core.EgressDenyAll {
			continue
		}
		if children[n].CA, err = c.secrets.Trusted(ctx, w.ProjectID); err != nil {
			return err
		}
	}
	return nil
}

// refused says why a child is not ready after the runner's answer.
func refused(asked runnerapi.Child, got runnerapi.ChildResult) error {
	switch {
	case got.Problem != nil:
		return got.Problem.Err()
	case got.SandboxID != asked.SandboxID || got.Sandbox == nil:
		return core.Errorf(core.Internal, core.CodeInternal, "the runner did not answer for sandbox %s", asked.SandboxID)
	case got.Sandbox.State != runnerapi.SandboxReady:
		return core.Errorf(core.Unavailable, core.CodeForkFailed, "sandbox %s is %s, not ready", asked.SandboxID, got.Sandbox.State)
	case got.Reseal == nil || !got.Reseal.Complete || got.Reseal.Generation != asked.Identity.Generation:
		return core.Errorf(core.Unavailable, core.CodeResealFailed, "sandbox %s has no complete reseal of its generation; it is not released", asked.SandboxID)
	}
	return nil
}

// insist repeats a call while the runner cannot be reached. The bounded time begins when the runner could first not be reached: if a
// connection breaks late in a long call, this is no reason to give up at once.
func (c *Controller) insist(ctx context.Context, call func() error) error {
	var until time.Time
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		err := call()
		if err == nil || core.CodeOf(err) != core.CodeRunnerUnreachable {
			return err
		}
		if until.IsZero() {
			until = time.Now().Add(c.cfg.RunnerRetry)
		}
		if time.Now().Add(wait).After(until) {
			return err
		}
		if stopped := pace.Pause(ctx, wait); stopped != nil {
			return stopped
		}
	}
}
