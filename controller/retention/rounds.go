package retention

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Round is a policy that is due.
type Round struct {
	Stored
	Turn int64 // of the claim
}

// End is what is recorded at the end of a round.
type End struct {
	Failed bool          // the plan or its deletions failed
	Pause  time.Duration // the next round begins not before this time has passed
	Due    time.Time     // the next round begins at this time at the latest
}

// Run carries out the stored policies. Controllers share them: each claims one policy at a time and works on it. If a controller is
// killed, another one does the rest of the work.
func (r *Rounds) Run(ctx context.Context) {
	pace.Every(ctx, retentionEvery, nil, func() {
		if err := r.RunDue(ctx); err != nil && ctx.Err() == nil {
			r.cfg.Failed()
			r.cfg.Log.WarnContext(ctx, "retention policies were not carried out", "err", err)
		}
	})
}

// RunDue works on the policies that are due. If a policy fails, it continues with the others, and tries it again after a minute or more.
func (r *Rounds) RunDue(ctx context.Context) error {
	var problem error
	for range retentionTurns {
		var list []Stored
		err := r.store.InSystem(ctx, func(tx Tx) (err error) {
			list, err = tx.DueRetentions(ctx, retentionBatch)
			return err
		})
		if err != nil {
			return err
		}
		for _, due := range list {
			if ctx.Err() != nil {
				return problem
			}
			if failed := r.one(ctx, due); failed != nil {
				problem = failed
			}
		}
		if len(list) < retentionBatch {
			break
		}
	}
	return problem
}

// one makes the plan of a policy and carries it out.
func (r *Rounds) one(ctx context.Context, due Stored) error {
	turn, err := inProject(ctx, r.store, due.ProjectID, func(tx Tx) (int64, error) { return tx.ClaimRetention(ctx, due, retentionLease) })
	if err != nil || turn == 0 { // another controller has claimed it
		return err
	}
	round := Round{due, turn}
	began := time.Now()
	renew := func() error {
		return r.store.InProject(ctx, due.ProjectID, func(tx Tx) error { return tx.RenewRetention(ctx, round, retentionLease) })
	}
	plan, err := r.plan(ctx, due.ProjectID, due.Checkpoint, due.Policy, renew)
	if core.CodeOf(err) == core.CodeCheckpointNotFound { // its tree no longer exists
		return r.store.InProject(ctx, due.ProjectID, func(tx Tx) error { return tx.DeleteRetention(ctx, due.Checkpoint) })
	}
	planned := time.Now()
	end := End{Failed: err != nil, Pause: max(retentionEvery/2, retentionPause*planned.Sub(began)), Due: began.Add(retentionIdle)}
	if err == nil {
		if !plan.NextAge.IsZero() && plan.NextAge.Before(end.Due) {
			end.Due = plan.NextAge
		}
		if err = r.carryOut(ctx, due, plan, planned.Add(planUse), renew); err != nil {
			end.Failed = true
		}
	}
	if finished := r.store.InProject(context.WithoutCancel(ctx), due.ProjectID, func(tx Tx) error { return tx.EndRetention(ctx, round, end) }); err == nil {
		err = finished
	}
	return err
}

// carryOut deletes what a plan removes, operation by operation, the newest first. When the plan is too old, it stops, and a new plan has the
// rest.
func (r *Rounds) carryOut(ctx context.Context, due Stored, plan Plan, until time.Time, renew func() error) error {
	for left := plan.Remove; len(left) > 0 && time.Now().Before(until) && ctx.Err() == nil; left = left[:max(0, len(left)-r.cfg.Batch)] {
		done, err := r.cfg.Delete(ctx, due, plan, left, until, renew)
		if err != nil || !done { // an operation that is not done continues by itself
			return err
		}
		if err := renew(); err != nil {
			return err
		}
	}
	return nil
}

// WalkTree reads a checkpoint and everything that descends from it in parts, each in a transaction of its own, until visit returns false or
// an error.
func (r *Rounds) WalkTree(ctx context.Context, project core.ProjectID, id core.CheckpointID, annotation string, visit func(Node) (more bool, err error)) error {
	for walk := (Walk{ID: id}); !walk.Done(); {
		var nodes []Node
		err := r.store.InProject(ctx, project, func(tx Tx) error {
			part, next, err := tx.Subtree(ctx, walk, annotation)
			if err == nil {
				nodes, walk = part, next
			}
			return err
		})
		if err != nil {
			return err
		}
		for _, n := range nodes {
			if more, err := visit(n); err != nil || !more {
				return err
			}
		}
	}
	return nil
}

// PlanFor makes a plan for a request. It bounds how many plans are made at the same time, because a plan needs much memory. The loop of
// stored policies makes its plan apart from these.
func (r *Rounds) PlanFor(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy TreePolicy) (Plan, error) {
	select {
	case r.planning <- struct{}{}:
		defer func() { <-r.planning }()
	case <-ctx.Done():
		return Plan{}, context.Cause(ctx)
	}
	return r.plan(ctx, project, id, policy, nil)
}

// plan finds out which checkpoints a policy does not keep. It reads the tree once. While it reads, it calls renew from time to time; renew
// may be nil.
func (r *Rounds) plan(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy TreePolicy, renew func() error) (Plan, error) {
	tree, renewed := Tree{Most: maxTree}, time.Now()
	err := r.WalkTree(ctx, project, id, policy.Annotation, func(n Node) (bool, error) {
		if !tree.Add(n) {
			return false, core.Errorf(core.Invalid, core.CodeUnsupported, "more than %d checkpoints descend from %s; use policies further down the tree", maxTree, id)
		}
		if renew != nil && time.Since(renewed) > retentionLease/4 {
			renewed = time.Now()
			return true, renew()
		}
		return true, nil
	})
	if err != nil {
		return Plan{}, err
	}
	return tree.Plan(policy.Policy, time.Now()), nil
}
