package controller

import (
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

// pruneBatch is how many checkpoints one transaction deletes.
const pruneBatch = 100

// The types of deletions. Package retention has them.
type (
	PruneResult = retention.Deletions
	PruneItem   = retention.Item
	Deletion    = retention.Deletion
)

// PruneCheckpoints takes a checkpoint and everything that descends from it, and deletes what a policy does not keep.
func (c *Controller) PruneCheckpoints(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy RetentionPolicy, dryRun bool, wait time.Duration) (Answer, error) {
	if err := policy.Validate(); err != nil {
		return Answer{}, err
	}
	plan, err := c.PlanFor(ctx, project, id, policy)
	if err != nil {
		return Answer{}, err
	}
	return c.prune(ctx, project, plan.Deletions(plan.Remove), dryRun, wait)
}

// DeleteCheckpoints deletes a checkpoint and everything that descends from it. If one of these checkpoints cannot be deleted, it deletes none.
func (c *Controller) DeleteCheckpoints(ctx context.Context, project core.ProjectID, id core.CheckpointID, cascade, dryRun bool, wait time.Duration) (Answer, error) {
	plan, err := c.Cascade(ctx, project, id, cascade)
	if err != nil {
		return Answer{}, err
	}
	return c.prune(ctx, project, plan, dryRun, wait)
}

// prune carries a plan out, unless it is a dry run. It skips each checkpoint that came into use since the plan was made.
func (c *Controller) prune(ctx context.Context, project core.ProjectID, plan *PruneResult, dryRun bool, wait time.Duration) (Answer, error) {
	if dryRun {
		plan.DryRun = true
		return Answer{Done: true, Result: Result{Prune: plan}}, nil
	}
	op := Operation{ProjectID: project, Kind: OpPruneCheckpoints, Step: "delete"}
	t, err := c.begin(ctx, op, func(context.Context, Tx, *Operation, int) (kind, error) {
		return &pruneCheckpoints{Prune: plan}, nil
	})
	if err != nil {
		return Answer{}, err
	}
	return t.Await(ctx, wait)
}

// pruneCheckpoints is the kind prune_checkpoints: it deletes the checkpoints of a plan. What is deleted is not taken back.
type pruneCheckpoints struct {
	madeNothing
	Prune *PruneResult `json:"prune,omitempty"` // the plan
}

// work deletes the newest checkpoints first. A resumed operation starts again: it changes nothing
// about a checkpoint that is deleted already.
func (k *pruneCheckpoints) work(ctx context.Context, c *Controller, t *task) error {
	out := *k.Prune
	out.Items = slices.Clone(out.Items)
	for end := len(out.Items); end > 0; end -= pruneBatch {
		items := out.Items[max(0, end-pruneBatch):end]
		ids, at := make([]core.CheckpointID, len(items)), make(map[core.CheckpointID]*PruneItem, len(items))
		for i := range items {
			ids[i], at[items[i].ID] = items[i].ID, &items[i]
		}
		var list []Deletion
		err := t.Load(ctx, func(tx Tx) (err error) {
			list, err = tx.DeleteCheckpoints(ctx, ids, items[0].Reason != retention.ReasonCascade)
			return err
		})
		if err != nil {
			return err
		}
		var gone []Checkpoint
		for _, d := range list { // a checkpoint that is not in the list was deleted before, and is no ancestor
			switch {
			case d.Refused != nil:
				at[d.Checkpoint].Skipped = core.MessageOf(d.Refused)
			case d.Gone:
				gone = append(gone, Checkpoint{ID: d.Checkpoint, State: core.CheckpointDeleted, Endpoint: d.Endpoint})
			default:
				at[d.Checkpoint].Skipped = "it came into use"
			}
		}
		c.fleet.DropCheckpoints(ctx, gone)
		t.Lap("delete")
	}
	return t.Finish(ctx, func(context.Context, Tx) (any, Result, error) {
		return Outcome{Prune: &out}, Result{Prune: &out}, nil
	})
}

// DeleteCheckpoint deletes a checkpoint and its bytes, but nothing that descends from it. It is no error if the checkpoint is deleted already.
func (c *Controller) DeleteCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID) error {
	cp, err := read(ctx, c, InProject(project), func(tx Tx) (Checkpoint, error) {
		cp, err := tx.Checkpoint(ctx, id)
		if err != nil {
			return cp, err
		}
		if cp.Kind == KindTemplate {
			return cp, core.Errorf(core.FailedPrecondition, core.CodeCheckpointInUse, "checkpoint %s is the template of image %s and is kept for it", id, cp.Image.Digest.Short())
		}
		endpoint := cp.Endpoint
		cp, err = tx.DeleteCheckpoint(ctx, id, false)
		if cp.Endpoint == "" {
			cp.Endpoint = endpoint
		}
		return cp, err
	})
	if err == nil {
		c.fleet.DropCheckpoints(context.WithoutCancel(ctx), []Checkpoint{cp})
	}
	return err
}

// pruneRound deletes the newest part of what the plan of a stored policy removes.
func (c *Controller) pruneRound(ctx context.Context, due Retention, plan retention.Plan, remove []retention.Removal, until time.Time, renew func() error) (bool, error) {
	done, err := c.prune(ctx, due.ProjectID, plan.Deletions(remove), false, 0)
	for err == nil && !done.Done && time.Now().Before(until) {
		if err = renew(); err == nil {
			done, err = c.Operation(ctx, due.ProjectID, done.Operation.ID, retention.Lease/4)
		}
		if err == nil && done.Operation.Problem != nil {
			err = &OperationError{Operation: done.Operation.ID, Err: done.Operation.Problem}
		}
	}
	if err != nil || !done.Done {
		return false, err
	}
	c.log.InfoContext(ctx, "retention policy carried out", "checkpoint_id", due.Checkpoint, "checkpoints", len(done.Result.Prune.Items), "bytes", done.Result.Prune.Bytes())
	return true, nil
}
