package controller

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// forkWorkspace is the kind fork_workspace: it captures a running workspace and forks others from the capture.
type forkWorkspace struct {
	captureInput
	Children     []childInput `json:"children,omitempty"` // the workspaces
	AllOrNothing bool         `json:"all_or_nothing,omitempty"`

	fork *forkcall.Plan
}

// ForkWorkspace captures a running workspace and forks others from the capture, as one operation.
func (c *Controller) ForkWorkspace(ctx context.Context, project core.ProjectID, id core.WorkspaceID, cp CheckpointRequest, fork ForkRequest, wait time.Duration) (Answer, error) {
	names, err := fork.names()
	if err != nil {
		return Answer{}, err
	}
	return c.capture(ctx, project, id, wait, capturing{
		kind: OpForkWorkspace, request: cp, forks: true,
		as: func(ctx context.Context, tx Tx, in captureInput, attempt int) (kind, error) {
			plan, err := c.insertBeside(ctx, tx, project, in.plan.checkpoint, fork, names, attempt)
			if err != nil {
				return nil, err
			}
			return &forkWorkspace{captureInput: in, Children: childInputs(plan.Children), AllOrNothing: fork.AllOrNothing, fork: plan}, nil
		},
	})
}

// insertBeside inserts the children of a fork of a workspace. Their checkpoint will be captured on the workspace's runner.
func (c *Controller) insertBeside(ctx context.Context, tx Tx, project core.ProjectID, cp Checkpoint, req ForkRequest, names []string, attempt int) (*forkcall.Plan, error) {
	like, err := childOf(cp, req)
	if err != nil {
		return nil, err
	}
	runners, err := c.placeEach(ctx, tx, placement.Request{Count: req.Count, Resources: cp.Resources, Holder: cp.RunnerID}, false)
	if err != nil {
		return nil, err
	}
	children, err := c.insertWorkspaces(ctx, tx, insertion{project: project, runners: runners, names: names, source: &cp, attempt: attempt, ttl: req.TTL, like: like})
	if err == nil {
		err = inherit(ctx, tx, cp, req.Grants, children)
	}
	if err == nil {
		err = inheritPreviews(ctx, tx, cp, children)
	}
	return &forkcall.Plan{Children: children, Source: cp}, err
}

func (k *forkWorkspace) made() made { return made{children: k.Children, capture: k.Capture} }

// takeBack lets the workspace go on without the capture. Once the capture is recorded, the workspace has gone on, and what it does now is
// another operation's, for example a suspension.
func (k *forkWorkspace) takeBack(ctx context.Context, tx Tx, op Operation) error {
	now, err := tx.Operation(ctx, op.ID)
	if err != nil || now.Step == "fork" {
		return err
	}
	return k.captureInput.takeBack(ctx, tx, op)
}

func (k *forkWorkspace) loadFork(ctx context.Context, c *Controller, t *task) (*forkcall.Plan, error) {
	if k.fork != nil {
		return k.fork, nil
	}
	return c.loadChildren(ctx, t, k.Children, k.Capture)
}

// work writes the capture while the runner already forks the children. So the parent is
// ready again at once, and the children do not wait for this.
func (k *forkWorkspace) work(ctx context.Context, c *Controller, t *task) error {
	defer c.captures.Ended(t.Op().WorkspaceID)
	plan, err := k.load(ctx, t)
	if err != nil {
		return err
	}
	fork, err := k.loadFork(ctx, c, t)
	if err != nil {
		return err
	}
	if t.Op().Step == "fork" {
		fork.Source = plan.checkpoint
		return c.runFork(ctx, t, fork, forkOptions{allOrNothing: k.AllOrNothing})
	}
	got, err := k.call(ctx, c, t, plan, runnerapi.Capture{Fork: true})
	if err != nil {
		return c.captureFailed(ctx, t, k, k.Sandbox, err)
	}
	fork.Source.Class = &got.Class // as its row will have it
	recorded := make(chan error, 1)
	go func() { recorded <- k.recordCapture(ctx, c, t, plan, got) }()
	children, err := c.forks.Fork(ctx, fork)
	recordErr := <-recorded
	t.Lap("fork")
	if recordErr != nil {
		return errors.Join(recordErr, err)
	}
	fork.Source = plan.checkpoint
	if err != nil {
		return err
	}
	return c.endFork(ctx, t, fork, children, forkOptions{allOrNothing: k.AllOrNothing})
}

// recordCapture writes the capture and the step, so that the parent continues.
func (k *forkWorkspace) recordCapture(ctx context.Context, c *Controller, t *task, plan *capturePlan, got runnerapi.Checkpoint) error {
	defer c.captures.Ended(t.Op().WorkspaceID)
	defer c.Prepare.SoonIf(plan.prepare, k.Capture)
	return t.Advance(ctx, "fork", func(tx Tx) error { return k.record(ctx, tx, t, plan, got) })
}
