package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

const (
	retentionEvery = time.Minute
	retentionBatch = 100             // policies that one controller looks at before it looks for those that are due again
	retentionLease = 2 * time.Minute // of the policy that a controller works on
	retentionRest  = 20              // times as long as its plan took, a policy rests: large trees take a twentieth of a processor
	retentionIdle  = time.Hour       // then a tree is read without any change
	planUse        = 5 * time.Minute // how long deletions follow one plan
	retentionTurns = 10              // full batches in one turn of the loop
)

// RetentionRound is a policy that is due.
type RetentionRound struct {
	Retention
	Turn int64 // of the claim
}

// RetentionEnd is what is recorded at the end of a round.
type RetentionEnd struct {
	Failed bool          // nothing is known of the tree
	Rest   time.Duration // not sooner than that again
	Due    time.Time     // at the latest
}

// retainLoop carries out the stored policies. Controllers share them: each works on one at a time, which it has claimed, so that one that
// is killed leaves the rest of the work to another.
func (c *Controller) retainLoop(ctx context.Context) {
	every(ctx, retentionEvery, nil, func() {
		if err := c.retain(ctx); err != nil && ctx.Err() == nil {
			c.metrics.choresFailed.WithLabelValues("retention").Inc()
			c.log.WarnContext(ctx, "retention policies were not carried out", "err", err)
		}
	})
}

// retain works on the policies that are due. One that fails is tried again after a minute or more, and does not stop the others.
func (c *Controller) retain(ctx context.Context) error {
	var problem error
	for range retentionTurns {
		list, err := read(ctx, c, System(), func(tx Tx) ([]Retention, error) { return tx.DueRetentions(ctx, retentionBatch) })
		if err != nil {
			return err
		}
		for _, r := range list {
			if ctx.Err() != nil {
				return problem
			}
			if failed := c.retainOne(ctx, r); failed != nil {
				problem = failed
			}
		}
		if len(list) < retentionBatch {
			break
		}
	}
	return problem
}

func (c *Controller) retainOne(ctx context.Context, r Retention) error {
	scope := InProject(r.ProjectID)
	turn, err := read(ctx, c, scope, func(tx Tx) (int64, error) { return tx.ClaimRetention(ctx, r, retentionLease) })
	if err != nil || turn == 0 { // somebody else has it
		return err
	}
	round := RetentionRound{r, turn}
	began := time.Now()
	renew := func() error {
		return c.store.InTx(ctx, scope, func(tx Tx) error { return tx.RenewRetention(ctx, round, retentionLease) })
	}
	plan, err := c.plan(ctx, r.ProjectID, r.Checkpoint, r.Policy, renew)
	if core.CodeOf(err) == core.CodeCheckpointNotFound { // its tree is gone for good
		return c.store.InTx(ctx, scope, func(tx Tx) error { return tx.DeleteRetention(ctx, r.Checkpoint) })
	}
	planned := time.Now()
	end := RetentionEnd{Failed: err != nil, Rest: max(retentionEvery/2, retentionRest*planned.Sub(began)), Due: began.Add(retentionIdle)}
	if err == nil {
		if !plan.NextAge.IsZero() && plan.NextAge.Before(end.Due) {
			end.Due = plan.NextAge
		}
		if err = c.carryOut(ctx, r, plan, planned.Add(planUse), renew); err != nil {
			end.Failed = true
		}
	}
	if finished := c.store.InTx(context.WithoutCancel(ctx), scope, func(tx Tx) error { return tx.EndRetention(ctx, round, end) }); err == nil {
		err = finished
	}
	return err
}

// carryOut deletes what a plan removes, operation by operation, the newest first. What is left when the plan is too old is planned anew.
func (c *Controller) carryOut(ctx context.Context, r Retention, plan retention.Plan, until time.Time, renew func() error) error {
	for left := plan.Remove; len(left) > 0 && time.Now().Before(until) && ctx.Err() == nil; left = left[:max(0, len(left)-MaxPrune)] {
		done, err := c.prune(ctx, r.ProjectID, pruneOf(plan, left), false, 0)
		for err == nil && !done.Done && time.Now().Before(until) {
			if err = renew(); err == nil {
				done, err = c.Operation(ctx, r.ProjectID, done.Operation.ID, retentionLease/4)
			}
			if err == nil && done.Operation.Problem != nil {
				err = &OperationError{done.Operation.ID, done.Operation.Problem}
			}
		}
		if err != nil {
			return err
		}
		if !done.Done { // it goes on by itself
			return nil
		}
		c.log.InfoContext(ctx, "retention policy carried out", "checkpoint_id", r.Checkpoint, "checkpoints", len(done.Result.Prune.Items), "bytes", done.Result.Prune.Bytes())
		if err := renew(); err != nil {
			return err
		}
	}
	return nil
}
