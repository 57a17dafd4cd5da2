package operations

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// errCanceled ends the work on an operation that somebody has canceled.
var errCanceled = core.Errorf(core.Conflict, core.CodeOperationCanceled, "the operation was canceled")

// Cancel ends an operation before its time: what it has begun is undone, and it fails with OPERATION_CANCELED. Cancel waits up to wait for
// that. It is no error if the operation has ended.
func (e *Engine[T, R]) Cancel(ctx context.Context, project core.ProjectID, id core.OperationID, wait time.Duration) (Answer[R], error) {
	var op Operation
	err := e.store.InTx(ctx, model.InProject(project), func(tx T) (err error) {
		op, err = tx.Operation(ctx, id)
		switch {
		case err != nil || op.State.Done():
			return err
		case !e.cfg.Cancelable(op.Kind):
			return core.Errorf(core.FailedPrecondition, core.CodeNotCancelable, "operation %s is a %s, which cannot be canceled; wait for its end", id, op.Kind)
		}
		return tx.CancelOperation(ctx, id)
	})
	if err != nil {
		return Answer[R]{}, err
	}
	if !op.State.Done() {
		if op.LeaseOwner == e.owner && e.cfg.Interruptible(op) {
			e.interrupt(id)
		}
		select {
		case e.wake <- struct{}{}:
		default:
		}
	}
	return e.Operation(ctx, project, id, wait)
}

func (e *Engine[T, R]) interrupt(id core.OperationID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if t := e.running[id]; t != nil {
		t.cancel(errCanceled)
	}
}

// interruptCanceled ends the work on this engine's operations that are to be canceled.
func (e *Engine[T, R]) interruptCanceled(ctx context.Context) error {
	var list []Operation
	err := e.store.InTx(ctx, model.System(), func(tx T) (err error) {
		list, err = tx.Operations(ctx, Filter{Page: model.Page{Limit: claimBatch}, CanceledOf: e.owner})
		return err
	})
	for _, op := range list {
		e.interrupt(op.ID)
	}
	return err
}

// undone takes back an operation whose work was interrupted because it was canceled. going is a context that has not ended with the work.
func (t *Task[T, R]) undone(going, work context.Context, err error) error {
	if err == nil || errors.Is(err, ErrLeaseLost) || !errors.Is(context.Cause(work), errCanceled) {
		return err
	}
	return t.work.TakeBack(going, t, errCanceled)
}
