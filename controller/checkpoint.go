package controller

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// CheckpointRequest asks for a checkpoint of a running workspace.
type CheckpointRequest struct {
	Name        string
	Labels      map[string]string
	Annotations map[string]json.RawMessage
	Pinned      bool
}

// capturePlan has what a capture needs from the rows.
type capturePlan struct {
	workspace  Workspace
	checkpoint Checkpoint
	fork       *forkPlan // of a fork of the workspace
}

// CreateCheckpoint captures a running workspace.
func (c *Controller) CreateCheckpoint(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req CheckpointRequest, wait time.Duration) (Answer, error) {
	return c.capture(ctx, project, OpCreateCheckpoint, id, req, nil, wait)
}

// ForkWorkspace captures a running workspace and grows others from the capture, as one operation.
func (c *Controller) ForkWorkspace(ctx context.Context, project core.ProjectID, id core.WorkspaceID, cp CheckpointRequest, fork ForkRequest, wait time.Duration) (Answer, error) {
	return c.capture(ctx, project, OpForkWorkspace, id, cp, &fork, wait)
}

// capture begins when no other capture of the workspace runs: checkpoints of one workspace take turns.
func (c *Controller) capture(ctx context.Context, project core.ProjectID, kind OperationKind, id core.WorkspaceID, req CheckpointRequest, fork *ForkRequest, wait time.Duration) (Answer, error) {
	t, err := c.admit(ctx, project, wait, func(ctx context.Context) (t *Task, err error) {
		err = c.whenReady(ctx, project, id, func() error {
			t, err = c.beginCapture(ctx, project, kind, id, req, fork, nil)
			return err
		})
		return t, err
	})
	if err != nil {
		return Answer{}, err
	}
	return t.await(ctx, wait)
}

// beginCapture begins a capture of a workspace. The workspace must be ready and meet the further condition, if there is one.
func (c *Controller) beginCapture(ctx context.Context, project core.ProjectID, kind OperationKind, id core.WorkspaceID, req CheckpointRequest, fork *ForkRequest, only func(context.Context, Tx) error) (*Task, error) {
	var names []string
	if fork != nil {
		var err error
		if names, err = fork.names(); err != nil {
			return nil, err
		}
	}
	op := Operation{ProjectID: project, Kind: kind, Step: "capture", WorkspaceID: id}
	return c.begin(ctx, InProject(project), op, func(ctx context.Context, tx Tx, op *Operation, in *opInput, attempt int) (any, error) {
		if fork != nil {
			tx.HoldRules(project)
		}
		w, err := tx.Workspace(ctx, id)
		if err != nil {
			return nil, err
		}
		if w.State != core.WorkspaceReady {
			return nil, w.NotReady()
		}
		if only != nil {
			if err := only(ctx, tx); err != nil {
				return nil, err
			}
		}
		c.idle.Used(w)
		sandbox := w.Sandbox
		if w, err = tx.MoveWorkspace(ctx, id, w.Epoch, core.WorkspaceCheckpointing); err != nil {
			return nil, err
		}
		cp := Checkpoint{
			ID: core.NewID[core.CheckpointID](), ProjectID: project, Kind: KindUser, Parent: w.Head, WorkspaceID: id, WorkspaceEpoch: w.Epoch, SandboxID: sandbox.ID,
			Name: req.Name, Labels: req.Labels, Annotations: req.Annotations, Pinned: req.Pinned, Image: w.Image, Resources: w.Resources, OperationID: op.ID,
			RunnerID: sandbox.RunnerID, Endpoint: sandbox.Endpoint, Tree: sandbox.Tree, Address: sandbox.Identity.IP.String(), Egress: w.Egress, Allow: w.Rules.Allow, Granted: w.Rules.Granted, Env: w.Env,
		}
		if err := tx.InsertCheckpoint(ctx, cp); err != nil {
			return nil, err
		}
		op.CheckpointID, in.Capture, in.Epoch, in.Sandbox = cp.ID, cp.ID, w.Epoch, sandbox.ID
		plan := &capturePlan{workspace: w, checkpoint: cp}
		if fork == nil {
			return plan, nil
		}
		in.AllOrNothing = fork.AllOrNothing
		plan.fork, err = c.plantBeside(ctx, tx, project, cp, *fork, names, attempt)
		if err == nil {
			in.Children = childInputs(plan.fork.children)
		}
		return plan, err
	})
}

// plantBeside inserts the children of a fork of a workspace. Their checkpoint will be captured on the workspace's runner.
func (c *Controller) plantBeside(ctx context.Context, tx Tx, project core.ProjectID, cp Checkpoint, req ForkRequest, names []string, attempt int) (*forkPlan, error) {
	like, err := childOf(cp, req)
	if err != nil {
		return nil, err
	}
	runners, err := c.placeEach(ctx, tx, placement.Request{Count: req.Count, Resources: cp.Resources, Holder: cp.RunnerID}, false)
	if err != nil {
		return nil, err
	}
	children, err := c.plant(ctx, tx, planting{project: project, runners: runners, names: names, source: &cp, attempt: attempt, ttl: req.TTL, like: like})
	if err == nil {
		err = inherit(ctx, tx, cp, req.Grants, children)
	}
	return &forkPlan{children: children, source: cp}, err
}

// whenReady runs do when no checkpoint of the workspace is being captured. It runs do again if another capture came first.
func (c *Controller) whenReady(ctx context.Context, project core.ProjectID, id core.WorkspaceID, do func() error) error {
	until := time.Now().Add(c.cfg.CaptureWait)
	for {
		changed := c.captureEnd(id)
		err := do()
		if code := core.CodeOf(err); code != core.CodeWorkspaceNotReady && code != core.CodeStateConflict {
			return err
		}
		w, readErr := c.Workspace(ctx, project, id)
		if readErr != nil {
			return readErr
		}
		// The workspace is ready again, or another request captures it: the next try decides. In another state it will not become ready soon.
		if w.State != core.WorkspaceReady && w.State != core.WorkspaceCheckpointing || time.Now().After(until) {
			return err
		}
		poll := time.NewTimer(50 * time.Millisecond) // for captures of other controllers
		select {
		case <-changed:
		case <-poll.C:
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		poll.Stop()
		if ctx.Err() != nil {
			return err
		}
	}
}

// captureEnd returns a channel that is closed when a capture of the workspace by this controller ends.
func (c *Controller) captureEnd(id core.WorkspaceID) <-chan struct{} {
	c.mu.Lock()
	defer c.mu.Unlock()
	ch, ok := c.released[id]
	if !ok {
		ch = make(chan struct{})
		c.released[id] = ch
	}
	return ch
}

func (c *Controller) captureEnded(id core.WorkspaceID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if ch, ok := c.released[id]; ok {
		close(ch)
		delete(c.released, id)
	}
}

func (c *Controller) loadCapture(ctx context.Context, t *Task) (*capturePlan, error) {
	if plan, ok := t.plan.(*capturePlan); ok {
		return plan, nil
	}
	plan := &capturePlan{}
	err := t.load(ctx, func(tx Tx) error {
		var err error
		if plan.workspace, err = tx.Workspace(ctx, t.op.WorkspaceID); err != nil {
			return err
		}
		if plan.checkpoint, err = tx.Checkpoint(ctx, t.in.Capture); err != nil {
			return err
		}
		sandboxes, err := tx.Sandboxes(ctx, []core.SandboxID{t.in.Sandbox})
		if err == nil && len(sandboxes) == 1 {
			plan.workspace.Sandbox = sandboxes[0]
			plan.checkpoint.RunnerID, plan.checkpoint.Endpoint = sandboxes[0].RunnerID, sandboxes[0].Endpoint
		}
		return err
	})
	if err != nil || t.op.Kind != OpForkWorkspace {
		return plan, err
	}
	plan.fork, err = c.loadFork(ctx, t)
	return plan, err
}

// callCapture asks the runner for the capture.
func (c *Controller) callCapture(ctx context.Context, t *Task, plan *capturePlan) (runnerapi.Checkpoint, error) {
	var got runnerapi.Checkpoint
	err := c.insist(ctx, func() error {
		if t.op.Kind == OpSuspendWorkspace { // after a suspension the machine is gone
			if err := t.hold(ctx); err != nil {
				return err
			}
		}
		var err error
		got, err = c.runners.Capture(ctx, plan.checkpoint.Endpoint, t.in.Sandbox, runnerapi.Capture{
			CheckpointID: plan.checkpoint.ID, Stop: t.op.Kind == OpSuspendWorkspace, Fork: t.op.Kind == OpForkWorkspace,
			Parent: plan.checkpoint.Parent,
		})
		return err
	})
	t.watch.Lap("capture")
	return got, err
}

// record writes a capture that succeeded. The workspace continues, unless it was terminated meanwhile; the checkpoint is valid in
// both cases.
func (plan *capturePlan) record(ctx context.Context, tx Tx, t *Task, got runnerapi.Checkpoint) error {
	cp, err := tx.CaptureCheckpoint(ctx, plan.checkpoint.ID, plan.checkpoint.RunnerID, got)
	if err != nil {
		return err
	}
	cp.Egress, cp.Allow, cp.Env = plan.checkpoint.Egress, plan.checkpoint.Allow, plan.checkpoint.Env
	plan.checkpoint = cp
	_, err = tx.CapturedWorkspace(ctx, t.op.WorkspaceID, t.in.Epoch, &cp)
	if core.CodeOf(err) == core.CodeStateConflict {
		return nil
	}
	return err
}

// workCapture is the work of create_checkpoint.
func (c *Controller) workCapture(ctx context.Context, t *Task) error {
	defer c.captureEnded(t.op.WorkspaceID)
	plan, err := c.loadCapture(ctx, t)
	if err != nil {
		return err
	}
	got, err := c.callCapture(ctx, t, plan)
	if err != nil {
		return c.captureFailed(ctx, t, err)
	}
	return t.finish(ctx, func(ctx context.Context, tx Tx) (Outcome, Result, error) {
		if err := plan.record(ctx, tx, t, got); err != nil {
			return Outcome{}, Result{}, err
		}
		cp := plan.checkpoint
		return Outcome{Checkpoint: cp.ID}, Result{Checkpoint: &cp}, nil
	})
}

// captureFailed abandons a capture. If the runner no longer has the sandbox, the workspace is lost, unless it has another sandbox by
// now.
func (c *Controller) captureFailed(ctx context.Context, t *Task, problem error) error {
	if core.CodeOf(problem) != core.CodeSandboxNotFound {
		return c.abandon(ctx, t, problem)
	}
	why := "its runner has no sandbox " + string(t.in.Sandbox) + " any more"
	var lost []Workspace
	err := c.abandonWith(ctx, t, problem, func(ctx context.Context, tx Tx) (err error) {
		lost, err = tx.EndWorkspaces(ctx, []EndedWorkspace{{
			ID: t.op.WorkspaceID, To: core.WorkspaceLost, Sandbox: t.in.Sandbox, Failure: &Failure{Code: core.CodeSandboxLost, Message: why},
		}})
		return err
	})
	if err == nil && len(lost) > 0 {
		c.log.WarnContext(ctx, "workspace lost", "workspace_id", t.op.WorkspaceID, "cause", why)
	}
	return err
}

// workForkWorkspace is the work of fork_workspace. It writes the capture while the runner already grows the children. So the parent is
// ready again at once, and the children do not wait for this.
func (c *Controller) workForkWorkspace(ctx context.Context, t *Task) error {
	defer c.captureEnded(t.op.WorkspaceID)
	plan, err := c.loadCapture(ctx, t)
	if err != nil {
		return err
	}
	if t.op.Step == "fork" {
		plan.fork.source = plan.checkpoint
		return c.grow(ctx, t, plan.fork)
	}
	got, err := c.callCapture(ctx, t, plan)
	if err != nil {
		return c.captureFailed(ctx, t, err)
	}
	plan.fork.source.Class = &got.Class // as its row will have it
	recorded := make(chan error, 1)
	go func() { recorded <- c.recordCapture(ctx, t, plan, got) }()
	grown, err := c.callFork(ctx, plan.fork)
	recordErr := <-recorded
	t.watch.Lap("fork")
	if recordErr != nil {
		return errors.Join(recordErr, err)
	}
	t.op.Step = "fork"
	plan.fork.source = plan.checkpoint
	if err != nil {
		return err
	}
	return c.endGrown(ctx, t, plan.fork, grown)
}

// recordCapture writes the capture and the step, so that the parent continues.
func (c *Controller) recordCapture(ctx context.Context, t *Task, plan *capturePlan, got runnerapi.Checkpoint) error {
	defer c.captureEnded(t.op.WorkspaceID)
	recorded := func(now Operation) bool { return now.Step == "fork" }
	return t.insistTx(ctx, recorded, func(tx Tx) error {
		if err := tx.StepOperation(ctx, t.op, "fork"); err != nil {
			return err
		}
		return plan.record(ctx, tx, t, got)
	})
}
