package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

const (
	retentionEvery = time.Minute
	retentionBatch = 100             // due policies that one query returns
	retentionLease = 2 * time.Minute // how long a controller holds a policy before it must renew its claim
	retentionRest  = 20              // a policy waits this many times the duration of its plan, so large trees take a twentieth of a processor
	retentionIdle  = time.Hour       // after this time a tree is read even without a change
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
	Failed bool          // the plan or its deletions failed
	Rest   time.Duration // the next round begins not before this time has passed
	Due    time.Time     // the next round begins at this time at the latest
}

// retainLoop carries out the stored policies. Controllers share them: each claims one policy at a time and works on it. If a controller is
// killed, another one does the rest of the work.
func (c *Controller) retainLoop(ctx context.Context) {
	pace.Every(ctx, retentionEvery, nil, func() {
		if err := c.retain(ctx); err != nil && ctx.Err() == nil {
			c.metrics.choresFailed.WithLabelValues("retention").Inc()
			c.log.WarnContext(ctx, "retention policies were not carried out", "err", err)
		}
	})
}

// retain works on the policies that are due. If a policy fails, retain continues with the others, and tries it again after a minute or more.
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
	if err != nil || turn == 0 { // another controller has claimed it
		return err
	}
	round := RetentionRound{r, turn}
	began := time.Now()
	renew := func() error {
		return c.store.InTx(ctx, scope, func(tx Tx) error { return tx.RenewRetention(ctx, round, retentionLease) })
	}
	plan, err := c.plan(ctx, r.ProjectID, r.Checkpoint, r.Policy, renew)
	if core.CodeOf(err) == core.CodeCheckpointNotFound { // its tree no longer exists
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

// carryOut deletes what a plan removes, operation by operation, the newest first. When the plan is too old, it stops, and a new plan has the
// rest.
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
		if !done.Done { // the operation continues by itself
			return nil
		}
		c.log.InfoContext(ctx, "retention policy carried out", "checkpoint_id", r.Checkpoint, "checkpoints", len(done.Result.Prune.Items), "bytes", done.Result.Prune.Bytes())
		if err := renew(); err != nil {
			return err
		}
	}
	return nil
}
