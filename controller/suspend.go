package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// suspendWorkspace is the kind suspend_workspace: a capture that ends with a stop.
type suspendWorkspace struct{ captureInput }

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
		if answer, open, err := c.operations.Newest(ctx, project, id, OpSuspendWorkspace, wait); err != nil || open {
			return answer, err
		}
	}
	return c.capture(ctx, project, id, wait, suspension(nil))
}

// suspension is the capture of a suspension, with a further condition.
func suspension(only func(ctx context.Context, tx Tx) error) capturing {
	return capturing{kind: OpSuspendWorkspace, only: only, as: func(_ context.Context, _ Tx, in captureInput, _ int) (kind, error) {
		return &suspendWorkspace{in}, nil
	}}
}

func (k *suspendWorkspace) work(ctx context.Context, c *Controller, t *task) error {
	defer c.captures.Ended(t.Op().WorkspaceID)
	plan, err := k.load(ctx, t)
	if err != nil {
		return err
	}
	got, err := k.stopCaptured(ctx, c, t, plan)
	if err != nil {
		return c.captureFailed(ctx, t, k, k.Sandbox, err)
	}
	return t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		cp, err := tx.CaptureCheckpoint(ctx, plan.checkpoint.ID, plan.checkpoint.RunnerID, got)
		if err != nil {
			return nil, Result{}, err
		}
		w, err := tx.SuspendWorkspace(ctx, t.Op().WorkspaceID, k.Epoch, cp)
		if core.CodeOf(err) == core.CodeStateConflict { // terminated or given up meanwhile; the checkpoint counts either way
			w, err = tx.Workspace(ctx, t.Op().WorkspaceID)
		}
		return Outcome{Workspace: w.ID, Checkpoint: cp.ID}, Result{Workspace: &w, Checkpoint: &cp}, err
	})
}

// stopCaptured asks the runner for the capture that ends in a stop. The outcome must be known: while the runner cannot be reached, the
// machine may run or not. Only the runner can say, or its silence for longer than the hard lease.
func (k *suspendWorkspace) stopCaptured(ctx context.Context, c *Controller, t *task, plan *capturePlan) (runnerapi.Checkpoint, error) {
	for {
		got, err := k.call(ctx, c, t, plan, runnerapi.Capture{Stop: true})
		if core.CodeOf(err) != core.CodeRunnerUnreachable {
			return got, err
		}
		if gone, fenceErr := c.fleet.Fenced(ctx, plan.checkpoint.RunnerID); fenceErr == nil && gone {
			return got, err
		}
		if err := pace.Pause(ctx, c.cfg.LoopInterval); err != nil {
			return got, err
		}
		list, err := read(ctx, c, System(), func(tx Tx) ([]Sandbox, error) { return tx.Sandboxes(ctx, []core.SandboxID{k.Sandbox}) })
		if err == nil && len(list) == 1 { // it may have moved to another address
			plan.checkpoint.Endpoint = list[0].Endpoint
		}
	}
}
