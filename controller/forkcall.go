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

// grownChild is a child of a fork after its runner has answered.
type grownChild struct {
	runnerapi.ChildResult
	given grants.Given // what the runner is known to have of its rules and grants
}

// callFork asks each runner for its own share of the children, and returns what was sent and what came. If one of several runners fails,
// only the children of that runner get its problem.
func (c *Controller) callFork(ctx context.Context, plan *forkPlan) ([]grownChild, error) {
	shares := map[string][]int{} // by endpoint: places in the order asked
	for i, w := range plan.children {
		shares[w.Sandbox.Endpoint] = append(shares[w.Sandbox.Endpoint], i)
	}
	if len(shares) == 1 {
		return c.callShare(ctx, plan, plan.children)
	}
	out := make([]grownChild, len(plan.children))
	var group sync.WaitGroup
	for _, share := range shares {
		group.Go(func() {
			children := make([]Workspace, len(share))
			for n, i := range share {
				children[n] = plan.children[i]
			}
			got, err := c.callShare(ctx, plan, children)
			if err != nil {
				c.log.WarnContext(ctx, "a runner did not grow its share of a fork", "checkpoint_id", plan.source.ID, "runner_id", children[0].Sandbox.RunnerID, "err", err)
			}
			for n, i := range share { // no other share has this place
				if err != nil {
					out[i].ChildResult = runnerapi.ChildResult{SandboxID: children[n].Sandbox.ID, Problem: runnerapi.ProblemOf(err)}
					continue
				}
				out[i] = got[n]
			}
		})
	}
	group.Wait()
	if err := context.Cause(ctx); err != nil {
		return nil, err
	}
	return out, nil
}

// callShare asks the one runner of some of the children. It repeats the request if the runner could not be reached, and checks every
// answer. A child counts as grown only with a complete reseal of its generation, and with an attestation by the runner that was asked.
func (c *Controller) callShare(ctx context.Context, plan *forkPlan, children []Workspace) ([]grownChild, error) {
	req := runnerapi.Fork{CheckpointID: plan.source.ID, Sources: plan.source.Sources, Peers: plan.source.Peers, Expected: plan.source.Expected()}
	// A host that joined again is another runner. It may still hold the checkpoint that it captured
	// as the earlier runner, but it cannot attest these bytes. So it must verify them against the
	// manifest, like every runner that has not captured the checkpoint.
	req.Verify = len(req.Sources) > 0 && children[0].Sandbox.RunnerID != plan.source.RunnerID
	given, err := c.describe(ctx, children, plan.source, &req)
	if err != nil {
		return nil, err
	}
	// Without the keys a runner can still grow a checkpoint that it has. Another runner reports that it lacks the keys; this is the cause.
	keys, unavailable := c.dataKeys.For(ctx, plan.source.Sources...)
	if unavailable != nil && core.CodeOf(unavailable) != core.CodeKeyUnavailable {
		return nil, unavailable
	}
	req.Keys = keys
	var res runnerapi.ForkResult
	err = c.insist(ctx, func() error {
		var err error
		res, err = c.runners.Fork(ctx, children[0].Sandbox.Endpoint, req)
		return err
	})
	if core.CodeOf(err) == core.CodeKeyUnavailable && unavailable != nil {
		return nil, unavailable
	}
	if err != nil {
		return nil, err
	}
	if len(res.Children) != len(req.Children) {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the runner answered a fork of %d with %d children", len(req.Children), len(res.Children))
	}
	out := make([]grownChild, len(children))
	for n, w := range children {
		out[n].ChildResult = res.Children[n]
		if !plan.loaded {
			out[n].given = given[n]
		}
		problem := refused(req.Children[n], res.Children[n])
		if problem == nil {
			out[n].Attestation, problem = c.attestations.Accept(ctx, plan.source, w, req.Children[n], res.Children[n])
		}
		if problem != nil {
			out[n].Problem, out[n].Attestation = runnerapi.ProblemOf(problem), nil
		}
	}
	return out, nil
}

// describe puts the children into the request to their runner, and returns what they are given. It issues their grants again, with the
// present secrets and rules.
func (c *Controller) describe(ctx context.Context, children []Workspace, source Checkpoint, req *runnerapi.Fork) ([]grants.Given, error) {
	list := make([]grants.Workspace, len(children))
	for n, w := range children {
		list[n] = w.ForGrants()
	}
	bundles, err := c.grants.Bundles(ctx, list, false)
	if err != nil {
		return nil, err
	}
	given := make([]grants.Given, len(children))
	for n, w := range children {
		child := runnerapi.Child{
			SandboxID: w.Sandbox.ID, WorkspaceID: w.ID, Epoch: w.Sandbox.Epoch, Identity: w.Sandbox.Identity, Egress: w.Egress, Rules: bundles[n].Rules, Env: w.Env,
		}
		if w.Resources.DiskGiB > source.Resources.DiskGiB {
			child.DiskGiB = w.Resources.DiskGiB
		}
		if w.Egress == core.EgressDenyAll {
			if child.CA, err = c.secrets.Trusted(ctx, w.ProjectID); err != nil {
				return nil, err
			}
		}
		req.Children, given[n] = append(req.Children, child), bundles[n].Given
	}
	return given, nil
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
