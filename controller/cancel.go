package controller

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// OperationFilter selects operations; zero fields do not filter. Newest first.
type OperationFilter struct {
	Page
	Kinds       []OperationKind
	States      []core.OperationState
	WorkspaceID core.WorkspaceID
	Checkpoint  core.CheckpointID
	// CanceledOf wants running operations that are to be canceled and can be at their present step, of one owner of leases.
	CanceledOf string
}

// Operations lists the operations of a project, newest first, without their results.
func (c *Controller) Operations(ctx context.Context, project core.ProjectID, f OperationFilter) ([]Operation, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]Operation, error) { return tx.Operations(ctx, f) })
}

// newestOf returns the newest operation of a kind on a workspace.
func newestOf(ctx context.Context, tx Tx, id core.WorkspaceID, kind OperationKind) (Operation, error) {
	list, err := tx.Operations(ctx, OperationFilter{Page: Page{Limit: 1}, WorkspaceID: id, Kinds: []OperationKind{kind}})
	if err == nil && len(list) == 0 {
		err = core.Errorf(core.NotFound, core.CodeOperationNotFound, "there is no %s of workspace %s", kind, id)
	}
	if err != nil {
		return Operation{}, err
	}
	return list[0], nil
}

// cancelable are the kinds of operations that can be canceled: they make workspaces, and to undo that changes nothing that was there before.
var cancelable = map[OperationKind]bool{OpCreateWorkspace: true, OpForkCheckpoint: true, OpForkWorkspace: true, OpRestoreCheckpoint: true}

// errCanceled ends the work on an operation that somebody has canceled.
var errCanceled = core.Errorf(core.Conflict, core.CodeOperationCanceled, "the operation was canceled")

// CancelOperation ends an operation before its time: what it has begun is undone, and it fails with OPERATION_CANCELED. The capture of a
// fork of a workspace is finished first. It is no error if the operation has ended.
func (c *Controller) CancelOperation(ctx context.Context, project core.ProjectID, id core.OperationID, wait time.Duration) (Answer, error) {
	op, err := read(ctx, c, InProject(project), func(tx Tx) (Operation, error) {
		op, err := tx.Operation(ctx, id)
		switch {
		case err != nil || op.State.Done():
			return op, err
		case !cancelable[op.Kind]:
			return op, core.Errorf(core.FailedPrecondition, core.CodeNotCancelable, "operation %s is a %s, which cannot be canceled; wait for its end", id, op.Kind)
		}
		return op, tx.CancelOperation(ctx, id)
	})
	if err != nil {
		return Answer{}, err
	}
	if !op.State.Done() {
		select {
		case c.wake <- struct{}{}:
		default:
		}
	}
	return c.Operation(ctx, project, id, wait)
}

// interruptCanceled ends the work on this controller's operations that are to be canceled.
func (c *Controller) interruptCanceled(ctx context.Context) error {
	list, err := read(ctx, c, System(), func(tx Tx) ([]Operation, error) {
		return tx.Operations(ctx, OperationFilter{Page: Page{Limit: claimBatch}, CanceledOf: c.owner})
	})
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, op := range list {
		if t := c.running[op.ID]; t != nil {
			t.cancel(errCanceled)
		}
	}
	return err
}

// undone abandons an operation whose work was interrupted because it was canceled. going is a context that has not ended with the work.
func (t *Task) undone(going, work context.Context, err error) error {
	if err == nil || errors.Is(err, ErrLeaseLost) || !errors.Is(context.Cause(work), errCanceled) {
		return err
	}
	return t.c.abandon(going, t, errCanceled)
}
