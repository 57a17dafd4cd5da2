// Package forkcall asks runners for the children of a fork, and checks what they answer. It repeats
// calls of runners that cannot be reached for a moment.
package forkcall

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/attestations"
	"github.com/coppice-dev/coppice/controller/datakeys"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Plan has what a fork needs from the rows.
type Plan struct {
	Children []model.Workspace // in the requested order, each with its sandbox and the runner of the sandbox
	Source   model.Checkpoint
	Loaded   bool // the plan is from rows: children may have been forked before, with other rules
}

// Child is a child of a fork after its runner has answered.
type Child struct {
	runnerapi.ChildResult
	Given grants.Given // what the runner is known to have of its rules and grants
}

// Runners calls runners by their endpoint. If a runner cannot be reached, or vanishes during the call, the error has the code
// RUNNER_UNREACHABLE. The call may be repeated: it is idempotent by the ids in it.
type Runners interface {
	Fork(ctx context.Context, endpoint string, f runnerapi.Fork) (runnerapi.ForkResult, error)
}

// Config says how runners are called, and with what.
type Config struct {
	Retry        time.Duration // how long calls of a runner that cannot be reached are repeated
	Keys         *datakeys.Keeper
	Secrets      *secretstore.Keeper
	Grants       *grants.Manager
	Attestations *attestations.Keeper
	Log          *slog.Logger
}

// Caller calls runners. Make it with New.
type Caller struct {
	cfg     Config
	runners Runners
}

// New makes a caller.
func New(cfg Config, runners Runners) *Caller { return &Caller{cfg, runners} }

// Fork asks each runner for its own share of the children, and returns what was sent and what came. If one of several runners fails,
// only the children of that runner get its problem.
func (c *Caller) Fork(ctx context.Context, plan *Plan) ([]Child, error) {
	shares := map[string][]int{} // by endpoint: places in the order asked
	for i, w := range plan.Children {
		shares[w.Sandbox.Endpoint] = append(shares[w.Sandbox.Endpoint], i)
	}
	if len(shares) == 1 {
		return c.share(ctx, plan, plan.Children)
	}
	out := make([]Child, len(plan.Children))
	var group sync.WaitGroup
	for _, share := range shares {
		group.Go(func() {
			children := make([]model.Workspace, len(share))
			for n, i := range share {
				children[n] = plan.Children[i]
			}
			got, err := c.share(ctx, plan, children)
			if err != nil {
				c.cfg.Log.WarnContext(ctx, "a runner did not make its share of a fork", "checkpoint_id", plan.Source.ID, "runner_id", children[0].Sandbox.RunnerID, "err", err)
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

// share asks the one runner of some of the children. It repeats the request if the runner could not be reached, and checks every
// answer. A child counts as forked only with a complete reseal of its generation, and with an attestation by the runner that was asked.
func (c *Caller) share(ctx context.Context, plan *Plan, children []model.Workspace) ([]Child, error) {
	req := runnerapi.Fork{CheckpointID: plan.Source.ID, Sources: plan.Source.Sources, Peers: plan.Source.Peers, Expected: plan.Source.Expected()}
	// A host that joined again is another runner. It may still hold the checkpoint that it captured
	// as the earlier runner, but it cannot attest these bytes. So it must verify them against the
	// manifest, like every runner that has not captured the checkpoint.
	req.Verify = len(req.Sources) > 0 && children[0].Sandbox.RunnerID != plan.Source.RunnerID
	given, err := c.describe(ctx, children, plan.Source, &req)
	if err != nil {
		return nil, err
	}
	// Without the keys a runner can still fork a checkpoint that it has. Another runner reports that it lacks the keys; this is the cause.
	keys, unavailable := c.cfg.Keys.For(ctx, plan.Source.Sources...)
	if unavailable != nil && core.CodeOf(unavailable) != core.CodeKeyUnavailable {
		return nil, unavailable
	}
	req.Keys = keys
	var res runnerapi.ForkResult
	err = c.Insist(ctx, func() error {
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
	out := make([]Child, len(children))
	for n, w := range children {
		out[n].ChildResult = res.Children[n]
		if !plan.Loaded {
			out[n].Given = given[n]
		}
		problem := refused(req.Children[n], res.Children[n])
		if problem == nil {
			out[n].Attestation, problem = c.cfg.Attestations.Accept(ctx, plan.Source, w, req.Children[n], res.Children[n])
		}
		if problem != nil {
			out[n].Problem, out[n].Attestation = runnerapi.ProblemOf(problem), nil
		}
	}
	return out, nil
}

// describe puts the children into the request to their runner, and returns what they are given. It issues their grants again, with the
// present secrets and rules.
func (c *Caller) describe(ctx context.Context, children []model.Workspace, source model.Checkpoint, req *runnerapi.Fork) ([]grants.Given, error) {
	list := make([]grants.Workspace, len(children))
	for n, w := range children {
		list[n] = w.ForGrants()
	}
	bundles, err := c.cfg.Grants.Bundles(ctx, list, false)
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
			if child.CA, err = c.cfg.Secrets.Trusted(ctx, w.ProjectID); err != nil {
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

// Insist repeats a call while the runner cannot be reached. The bounded time begins when the runner could first not be reached: if a
// connection breaks late in a long call, this is no reason to give up at once.
func (c *Caller) Insist(ctx context.Context, call func() error) error {
	var until time.Time
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		err := call()
		if err == nil || core.CodeOf(err) != core.CodeRunnerUnreachable {
			return err
		}
		if until.IsZero() {
			until = time.Now().Add(c.cfg.Retry)
		}
		if time.Now().Add(wait).After(until) {
			return err
		}
		if stopped := pace.Pause(ctx, wait); stopped != nil {
			return stopped
		}
	}
}
