package controller

import (
	"context"

	"github.com/coppice-dev/coppice/core"
)

// abandon ends an operation as failed and undoes what its admission began: workspaces that it should make are failed, a capture
// is failed, and the workspace that it acted on gets its old state. Runners drop what they may have of the operation.
func (c *Controller) abandon(ctx context.Context, t *Task, problem error) error {
	return c.abandonWith(ctx, t, problem, func(ctx context.Context, tx Tx) error { return c.takeBack(ctx, tx, t) })
}

// abandonWith is abandon, except that settle writes the new state of the workspace that the operation
// acted on.
func (c *Controller) abandonWith(ctx context.Context, t *Task, problem error, settle func(ctx context.Context, tx Tx) error) error {
	ids := make([]core.SandboxID, 0, len(t.in.Children)+1)
	ended := make([]EndedWorkspace, len(t.in.Children))
	for i, child := range t.in.Children {
		ended[i] = EndedWorkspace{ID: child.Workspace, To: core.WorkspaceFailed, Failure: failureOf(problem)}
		ids = append(ids, child.Sandbox)
	}
	if t.in.Next != "" {
		ids = append(ids, t.in.Next)
	}
	err := t.fail(ctx, problem, func(ctx context.Context, tx Tx) (Outcome, Result, error) {
		if len(ended) > 0 {
			if _, err := tx.EndWorkspaces(ctx, ended); err != nil {
				return Outcome{}, Result{}, err
			}
		}
		if t.in.Capture != "" {
			if err := tx.FailCheckpoint(ctx, t.in.Capture, *failureOf(problem)); err != nil {
				return Outcome{}, Result{}, err
			}
		}
		return Outcome{}, Result{}, settle(ctx, tx)
	})
	if err == nil {
		c.drop(ctx, ids...)
	}
	return err
}

// takeBack returns the workspace that an operation acted on to its old state, unless it has changed to another state meanwhile.
func (c *Controller) takeBack(ctx context.Context, tx Tx, t *Task) error {
	var err error
	switch t.op.Kind {
	case OpCreateCheckpoint, OpForkWorkspace, OpSuspendWorkspace:
		_, err = tx.CapturedWorkspace(ctx, t.op.WorkspaceID, t.in.Epoch, nil)
	case OpRestoreWorkspace:
		if err = tx.EndSandboxes(ctx, []core.SandboxID{t.in.Next}); err != nil {
			return err
		}
		_, err = tx.ReturnWorkspace(ctx, t.op.WorkspaceID, t.in.Epoch)
	case OpResumeWorkspace:
		if err = tx.EndSandboxes(ctx, []core.SandboxID{t.in.Next}); err != nil {
			return err
		}
		_, err = tx.MoveWorkspace(ctx, t.op.WorkspaceID, t.in.Epoch, core.WorkspaceSuspended)
	case OpPruneCheckpoints, OpCreateWorkspace, OpCreateTemplate, OpForkCheckpoint, OpRestoreCheckpoint, OpTerminateWorkspace:
	}
	if core.CodeOf(err) == core.CodeStateConflict {
		return nil
	}
	return err
}
