package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Suspend checkpoints a workspace and stops it. Its machine does not run after the captured instant, so nothing that it did is lost or
// done twice. It is no error if the workspace is suspended already.
func (c *Controller) Suspend(ctx context.Context, project core.ProjectID, id core.WorkspaceID, wait time.Duration) (Answer, error) {
	w, err := c.Workspace(ctx, project, id)
	if err != nil {
		return Answer{}, err
	}
	if w.State == core.WorkspaceSuspended {
		return Answer{Done: true, Result: Result{Workspace: &w}}, nil
	}
	if w.State == core.WorkspaceCheckpointing {
		if answer, open, err := c.awaitOpen(ctx, w, OpSuspendWorkspace, wait); err != nil || open {
			return answer, err
		}
	}
	return c.capture(ctx, project, OpSuspendWorkspace, id, CheckpointRequest{}, nil, wait)
}

// workSuspend is the work of suspend_workspace.
func (c *Controller) workSuspend(ctx context.Context, t *Task) error {
	defer c.captureEnded(t.op.WorkspaceID)
	plan, err := c.loadCapture(ctx, t)
	if err != nil {
		return err
	}
	got, err := c.stopCaptured(ctx, t, plan)
	if err != nil {
		return c.captureFailed(ctx, t, err)
	}
	return t.finish(ctx, func(ctx context.Context, tx Tx) (Outcome, Result, error) {
		cp, err := tx.CaptureCheckpoint(ctx, plan.checkpoint.ID, plan.checkpoint.RunnerID, got)
		if err != nil {
			return Outcome{}, Result{}, err
		}
		w, err := tx.SuspendWorkspace(ctx, t.op.WorkspaceID, t.in.Epoch, cp)
		if core.CodeOf(err) == core.CodeStateConflict { // terminated or given up meanwhile; the checkpoint counts either way
			w, err = tx.Workspace(ctx, t.op.WorkspaceID)
		}
		return Outcome{Workspace: w.ID, Checkpoint: cp.ID}, Result{Workspace: &w, Checkpoint: &cp}, err
	})
}

// stopCaptured asks the runner for the capture that ends in a stop. The outcome must be known: while the runner cannot be reached, the
// machine may run or not. Only the runner can say, or its silence for longer than the hard lease.
func (c *Controller) stopCaptured(ctx context.Context, t *Task, plan *capturePlan) (runnerapi.Checkpoint, error) {
	for {
		got, err := c.callCapture(ctx, t, plan)
		if core.CodeOf(err) != core.CodeRunnerUnreachable {
			return got, err
		}
		if gone, fenceErr := c.fenced(ctx, plan.checkpoint.RunnerID); fenceErr == nil && gone {
			return got, err
		}
		if err := pace.Pause(ctx, c.cfg.LoopInterval); err != nil {
			return got, err
		}
		list, err := read(ctx, c, System(), func(tx Tx) ([]Sandbox, error) { return tx.Sandboxes(ctx, []core.SandboxID{t.in.Sandbox}) })
		if err == nil && len(list) == 1 { // it may have moved to another address
			plan.checkpoint.Endpoint = list[0].Endpoint
		}
	}
}
