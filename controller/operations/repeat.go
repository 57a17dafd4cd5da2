package operations

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// Repeated finds out whether a request that failed before its transaction is a repeat: then the first request has done the work,
// whatever prevents it now, and the error is a *request.RepeatError. If it is not a repeat, Repeated returns the failure.
func (e *Engine[T, R]) Repeated(ctx context.Context, project core.ProjectID, failure error) error {
	claim := request.ClaimOf(ctx)
	if claim == nil {
		return failure
	}
	var use request.KeyUse
	err := e.store.InTx(ctx, model.InProject(project), func(tx T) (err error) {
		use, err = tx.KeyUse(ctx, project, claim.Key)
		return err
	})
	if err != nil || use.Object == "" || !claim.Claims(use.Object) {
		return failure
	}
	return claim.Repeats(use)
}

// Earlier returns the operation of an earlier, equal request, for a request that failed before its transaction. If the request is not a
// repeat, it returns the failure.
func (e *Engine[T, R]) Earlier(ctx context.Context, project core.ProjectID, failure error) (*Task[T, R], error) {
	err := e.Repeated(ctx, project, failure)
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		return e.repeatTask(project, again), nil
	}
	return nil, err
}

// repeatTask stands for the operation of an earlier, equal request.
func (e *Engine[T, R]) repeatTask(project core.ProjectID, again *request.RepeatError) *Task[T, R] {
	return &Task[T, R]{e: e, repeat: core.OperationID(again.Use.Object), op: Operation{ProjectID: project}}
}

// replay answers a repeat of a request that was admitted as an operation.
func (e *Engine[T, R]) replay(ctx context.Context, project core.ProjectID, id core.OperationID) (Answer[R], error) {
	a, err := e.Operation(ctx, project, id, 0)
	switch {
	case err != nil:
		return Answer[R]{}, err
	case !a.Done:
		return Answer[R]{}, &Error{id, request.InProgress("the first request with this idempotency key has begun operation %s, which has not ended; wait for that", id)}
	}
	if claim := request.ClaimOf(ctx); claim != nil {
		claim.SetReplayed(true)
	}
	if a.Operation.Problem != nil {
		return a, &Error{id, a.Operation.Problem}
	}
	if err := e.cfg.Whole(a); err != nil {
		return a, &Error{id, err}
	}
	return a, nil
}
