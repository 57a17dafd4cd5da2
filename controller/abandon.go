package controller

import (
	"context"

	"github.com/coppice-dev/coppice/core"
)

// abandon ends an operation as failed and undoes what its admission began: workspaces that it should make are failed, a capture
// is failed, and the workspace that it acted on gets its old state. Runners drop what they may have of the operation.
func (c *Controller) abandon(ctx context.Context, t *Task, problem error) error {
	return c.abandonWith(ctx, t, problem, func(ctx context.Context, tx Tx) error {
		err := t.kind.takeBack(ctx, tx, t)
		if core.CodeOf(err) == core.CodeStateConflict {
			return nil
		}
		return err
	})
}

// abandonWith is abandon, except that settle writes the new state of the workspace that the operation
// acted on.
func (c *Controller) abandonWith(ctx context.Context, t *Task, problem error, settle func(ctx context.Context, tx Tx) error) error {
	began := t.kind.made()
	ids := make([]core.SandboxID, 0, len(began.children)+1)
	ended := make([]EndedWorkspace, len(began.children))
	for i, child := range began.children {
		ended[i] = EndedWorkspace{ID: child.Workspace, To: core.WorkspaceFailed, Failure: failureOf(problem)}
		ids = append(ids, child.Sandbox)
	}
	if began.next != "" {
		ids = append(ids, began.next)
	}
	err := t.fail(ctx, problem, func(ctx context.Context, tx Tx) (Outcome, Result, error) {
		if len(ended) > 0 {
			if _, err := tx.EndWorkspaces(ctx, ended); err != nil {
				return Outcome{}, Result{}, err
			}
		}
		if began.capture != "" {
			if err := tx.FailCheckpoint(ctx, began.capture, *failureOf(problem)); err != nil {
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
