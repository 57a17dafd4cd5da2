package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// captureInput is the input of an operation that captures a workspace.
type captureInput struct {
	Capture core.CheckpointID `json:"capture,omitempty"` // the checkpoint
	Epoch   int64             `json:"epoch,omitempty"`   // of the workspace
	Sandbox core.SandboxID    `json:"sandbox,omitempty"` // of the workspace, in that epoch

	plan *capturePlan
}

// capturePlan has what a capture needs from the rows.
type capturePlan struct {
	workspace  Workspace
	checkpoint Checkpoint
	prepare    bool // machines of the checkpoint are wanted
}

// capturing says which operation captures a workspace, and what it does besides.
type capturing struct {
	kind    OperationKind
	request CheckpointRequest
	forks   bool                                   // the transaction inserts forks of the workspace
	only    func(ctx context.Context, tx Tx) error // a further condition; nil: none
	// as makes the operation's kind of a capture that is inserted, in the same transaction.
	as func(ctx context.Context, tx Tx, in captureInput, attempt int) (kind, error)
}

// capture captures a workspace, and waits for the end.
func (c *Controller) capture(ctx context.Context, project core.ProjectID, id core.WorkspaceID, wait time.Duration, what capturing) (Answer, error) {
	t, err := c.beginCaptureInTurn(ctx, project, id, wait, what)
	if err != nil {
		return Answer{}, err
	}
	return t.Await(ctx, wait)
}

// beginCaptureInTurn begins a capture when no other one of the workspace runs: checkpoints of one workspace take turns.
func (c *Controller) beginCaptureInTurn(ctx context.Context, project core.ProjectID, id core.WorkspaceID, wait time.Duration, what capturing) (*task, error) {
	return c.operations.Queue(ctx, project, wait, func(ctx context.Context) (t *task, err error) {
		err = c.whenReady(ctx, project, id, func() error {
			t, err = c.beginCapture(ctx, project, id, what)
			return err
		})
		return t, err
	})
}

// beginCapture begins a capture of a workspace. The workspace must be ready and meet the further condition, if there is one.
func (c *Controller) beginCapture(ctx context.Context, project core.ProjectID, id core.WorkspaceID, what capturing) (*task, error) {
	op := Operation{ProjectID: project, Kind: what.kind, Step: "capture", WorkspaceID: id}
	return c.begin(ctx, op, func(ctx context.Context, tx Tx, op *Operation, attempt int) (kind, error) {
		if what.forks {
			tx.HoldRules(project)
		}
		w, err := tx.Workspace(ctx, id)
		if err != nil {
			return nil, err
		}
		if w.State != core.WorkspaceReady {
			return nil, w.NotReady()
		}
		if what.only != nil {
			if err := what.only(ctx, tx); err != nil {
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
			Name: what.request.Name, Labels: what.request.Labels, Annotations: what.request.Annotations, Pinned: what.request.Pinned, Image: w.Image, Resources: w.Resources, OperationID: op.ID,
			RunnerID: sandbox.RunnerID, Endpoint: sandbox.Endpoint, Tree: sandbox.Tree, Address: sandbox.Identity.IP.String(), Egress: w.Egress, Allow: w.Rules.Allow, Granted: w.Rules.Granted, Env: w.Env,
		}
		if err := tx.InsertCheckpoint(ctx, cp); err != nil {
			return nil, err
		}
		if err := what.request.Prepare.Set(ctx, tx, project, cp.ID); err != nil {
			return nil, err
		}
		op.CheckpointID = cp.ID
		return what.as(ctx, tx, captureInput{Capture: cp.ID, Epoch: w.Epoch, Sandbox: sandbox.ID, plan: &capturePlan{workspace: w, checkpoint: cp, prepare: what.request.Prepare.Count > 0}}, attempt)
	})
}

func (in *captureInput) made() made { return made{capture: in.Capture} }

// takeBack lets the workspace go on without the capture.
func (in *captureInput) takeBack(ctx context.Context, tx Tx, op Operation) error {
	_, err := tx.CapturedWorkspace(ctx, op.WorkspaceID, in.Epoch, nil)
	return err
}

func (in *captureInput) load(ctx context.Context, t *task) (*capturePlan, error) {
	if in.plan != nil {
		return in.plan, nil
	}
	plan := &capturePlan{}
	err := t.Load(ctx, func(tx Tx) error {
		var err error
		if plan.workspace, err = tx.Workspace(ctx, t.Op().WorkspaceID); err != nil {
			return err
		}
		if plan.checkpoint, err = tx.Checkpoint(ctx, in.Capture); err != nil {
			return err
		}
		sandboxes, err := tx.Sandboxes(ctx, []core.SandboxID{in.Sandbox})
		if err == nil && len(sandboxes) == 1 {
			plan.workspace.Sandbox = sandboxes[0]
			plan.checkpoint.RunnerID, plan.checkpoint.Endpoint = sandboxes[0].RunnerID, sandboxes[0].Endpoint
		}
		return err
	})
	return plan, err
}

// call asks the runner for the capture. how says what it is for.
func (in *captureInput) call(ctx context.Context, c *Controller, t *task, plan *capturePlan, how runnerapi.Capture) (runnerapi.Checkpoint, error) {
	how.CheckpointID, how.Parent = plan.checkpoint.ID, plan.checkpoint.Parent
	var got runnerapi.Checkpoint
	err := c.forks.Insist(ctx, func() error {
		if how.Stop { // after a suspension the machine is gone
			if err := t.CheckLease(ctx); err != nil {
				return err
			}
		}
		var err error
		got, err = c.runners.Capture(ctx, plan.checkpoint.Endpoint, in.Sandbox, how)
		return err
	})
	t.Lap("capture")
	return got, err
}

// record writes a capture that succeeded. The workspace continues, unless it was terminated meanwhile; the checkpoint is valid in
// both cases.
func (in *captureInput) record(ctx context.Context, tx Tx, t *task, plan *capturePlan, got runnerapi.Checkpoint) error {
	cp, err := tx.CaptureCheckpoint(ctx, plan.checkpoint.ID, plan.checkpoint.RunnerID, got)
	if err != nil {
		return err
	}
	cp.Egress, cp.Allow, cp.Env = plan.checkpoint.Egress, plan.checkpoint.Allow, plan.checkpoint.Env
	plan.checkpoint = cp
	_, err = tx.CapturedWorkspace(ctx, t.Op().WorkspaceID, in.Epoch, &cp)
	if core.CodeOf(err) == core.CodeStateConflict {
		return nil
	}
	return err
}

// captureFailed ends an operation whose capture failed. If the runner no longer has the sandbox, the workspace is lost, unless it has another
// sandbox by now. In other cases all is taken back.
func (c *Controller) captureFailed(ctx context.Context, t *task, k kind, sandbox core.SandboxID, problem error) error {
	if core.CodeOf(problem) != core.CodeSandboxNotFound {
		return t.Abandon(ctx, problem)
	}
	workspace := t.Op().WorkspaceID
	why := "its runner has no sandbox " + string(sandbox) + " any more"
	var lost []Workspace
	err := k.made().takeBack(ctx, c, t, problem, func(ctx context.Context, tx Tx) (err error) {
		lost, err = tx.EndWorkspaces(ctx, []EndedWorkspace{{
			ID: workspace, To: core.WorkspaceLost, Sandbox: sandbox, Failure: &Failure{Code: core.CodeSandboxLost, Message: why},
		}})
		return err
	})
	if err == nil && len(lost) > 0 {
		c.log.WarnContext(ctx, "workspace lost", "workspace_id", workspace, "cause", why)
	}
	return err
}

// whenReady runs do when no checkpoint of the workspace is being captured. It runs do again if another capture came first.
func (c *Controller) whenReady(ctx context.Context, project core.ProjectID, id core.WorkspaceID, do func() error) error {
	until := time.Now().Add(c.cfg.CaptureWait)
	for {
		changed := c.captures.Next(id)
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
