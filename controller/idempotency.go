package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// repeated finds out whether a request that failed before its transaction is a repeat: then the first request has done the work,
// whatever prevents it now. If it is not a repeat, repeated returns the failure.
func (c *Controller) repeated(ctx context.Context, project core.ProjectID, failure error) error {
	claim := request.ClaimOf(ctx)
	if claim == nil {
		return failure
	}
	use, err := read(ctx, c, InProject(project), func(tx Tx) (KeyUse, error) { return tx.KeyUse(ctx, project, claim.Key) })
	if err != nil || use.Object == "" || !claim.Claims(use.Object) {
		return failure
	}
	return claim.Repeats(use)
}

// replay answers a repeat of a request that was admitted as an operation.
func (c *Controller) replay(ctx context.Context, project core.ProjectID, id core.OperationID) (Answer, error) {
	a, err := c.Operation(ctx, project, id, 0)
	switch {
	case err != nil:
		return Answer{}, err
	case !a.Done:
		return Answer{}, &OperationError{id, request.InProgress("the first request with this idempotency key has begun operation %s, which has not ended; wait for that", id)}
	}
	if claim := request.ClaimOf(ctx); claim != nil {
		claim.SetReplayed(true)
	}
	if a.Operation.Problem != nil {
		return a, &OperationError{id, a.Operation.Problem}
	}
	if err := a.whole(); err != nil {
		return a, &OperationError{id, err}
	}
	return a, nil
}

// whole refuses an answer whose object no longer exists.
func (a Answer) whole() error {
	if a.Operation.Kind == OpCreateCheckpoint && a.Result.Checkpoint == nil {
		return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "the checkpoint that the first request made was deleted since")
	}
	return nil
}

// keySweep is how many expired keys one transaction removes.
const keySweep = 10_000

// sweepKeys removes expired keys of requests.
func (c *Controller) sweepKeys(ctx context.Context) error {
	for {
		n, err := read(ctx, c, System(), func(tx Tx) (int, error) { return tx.SweepKeys(ctx, keySweep) })
		if err != nil || n < keySweep {
			return err
		}
	}
}
