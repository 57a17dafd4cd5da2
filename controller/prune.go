package controller

import (
	"context"
	"errors"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

const (
	// MaxPrune is how many checkpoints one operation deletes.
	MaxPrune       = 2000
	pruneBatch     = 50 // in one transaction
	retentionEvery = time.Minute
	retentionWait  = 20 * time.Second

	reasonCascade = "cascade"
)

// RetentionPolicy is retention.Policy with where the score is.
type RetentionPolicy struct {
	retention.Policy
	Annotation string // whose number is the score
}

// Retention is the stored policy of a checkpoint and what grew from it.
type Retention struct {
	ProjectID  core.ProjectID
	Checkpoint core.CheckpointID
	Policy     RetentionPolicy
	Version    int64
	UpdatedAt  time.Time
}

// PruneResult is what is to be deleted, or was.
type PruneResult struct {
	DryRun    bool        `json:"-"`
	Items     []PruneItem `json:"items"`
	Kept      int         `json:"kept"`
	KeptBytes int64       `json:"kept_bytes"`
	Over      bool        `json:"over,omitempty"`      // what had to be kept is more than the policy's bytes
	Truncated bool        `json:"truncated,omitempty"` // there is more to delete
}

// PruneItem is one checkpoint that goes.
type PruneItem struct {
	ID      core.CheckpointID `json:"checkpoint_id"`
	Reason  string            `json:"reason"`
	Bytes   int64             `json:"bytes"`
	Skipped string            `json:"skipped,omitempty"` // why it was left after all
}

// Bytes is the sum of the items that went.
func (r *PruneResult) Bytes() int64 {
	var sum int64
	for _, i := range r.Items {
		if i.Skipped == "" {
			sum += i.Bytes
		}
	}
	return sum
}

func (p RetentionPolicy) validate() error {
	if p.KeepBest == 0 && p.MaxAge == 0 && p.MaxBytes == 0 {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "the policy needs at least one of keep_best, max_age_seconds and max_bytes: it would delete everything")
	}
	return nil
}

// PruneCheckpoints deletes what a policy does not keep of a checkpoint and what grew from it.
func (c *Controller) PruneCheckpoints(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy RetentionPolicy, dryRun bool, wait time.Duration) (Answer, error) {
	if err := policy.validate(); err != nil {
		return Answer{}, err
	}
	return c.pruneBy(ctx, project, dryRun, wait, func(ctx context.Context, tx Tx) (*PruneResult, error) {
		nodes, err := tx.Subtree(ctx, id, policy.Annotation)
		if err != nil {
			return nil, err
		}
		plan := retention.Make(nodes, policy.Policy, time.Now())
		out := &PruneResult{Kept: plan.Kept, KeptBytes: plan.KeptBytes, Over: plan.Over}
		for _, r := range plan.Remove {
			out.Items = append(out.Items, PruneItem{ID: r.ID, Reason: r.Reason, Bytes: r.Bytes})
		}
		return out, nil
	})
}

// DeleteCheckpoints deletes a checkpoint and what grew from it, or nothing when one of them cannot go.
func (c *Controller) DeleteCheckpoints(ctx context.Context, project core.ProjectID, id core.CheckpointID, cascade, dryRun bool, wait time.Duration) (Answer, error) {
	return c.pruneBy(ctx, project, dryRun, wait, func(ctx context.Context, tx Tx) (*PruneResult, error) {
		nodes, err := tx.Subtree(ctx, id, "")
		if err != nil {
			return nil, err
		}
		if !cascade {
			nodes = slices.DeleteFunc(nodes, func(n retention.Node) bool { return n.ID != id })
		}
		out := &PruneResult{}
		for _, n := range nodes {
			if n.Held != "" && n.Held != heldByWorkspace {
				return nil, heldError(nodes)
			}
			if !n.Gone {
				out.Items = append(out.Items, PruneItem{ID: n.ID, Reason: reasonCascade, Bytes: n.Bytes})
			}
		}
		if len(out.Items) > MaxPrune {
			return nil, core.Errorf(core.Invalid, core.CodeUnsupported, "%d checkpoints grew from %s; at most %d are deleted at once, so begin further down the tree", len(out.Items), id, MaxPrune)
		}
		slices.SortFunc(out.Items, func(a, b PruneItem) int { return strings.Compare(string(a.ID), string(b.ID)) })
		return out, nil
	})
}

// What a checkpoint can be held by, as Subtree says it.
const (
	heldByPin       = "pinned"
	heldByWorkspace = "workspace"
)

// heldError names what stands in the way of a cascade.
func heldError(nodes []retention.Node) error {
	const most = 5
	code, names := core.CodeCheckpointInUse, []string{}
	for _, n := range nodes {
		if n.Held == "" || n.Held == heldByWorkspace {
			continue
		}
		if n.Held == heldByPin {
			code = core.CodeCheckpointPinned
		}
		if names = append(names, string(n.ID)+" ("+n.Held+")"); len(names) > most {
			names[most] = "others"
			break
		}
	}
	return core.Errorf(core.FailedPrecondition, code, "nothing was deleted, because these cannot go: %s", strings.Join(names, ", "))
}

// pruneBy plans and, unless it is a dry run, carries the plan out.
func (c *Controller) pruneBy(ctx context.Context, project core.ProjectID, dryRun bool, wait time.Duration, plan func(context.Context, Tx) (*PruneResult, error)) (Answer, error) {
	if dryRun {
		out, err := read(ctx, c, InProject(project), func(tx Tx) (*PruneResult, error) { return plan(ctx, tx) })
		if err != nil {
			return Answer{}, err
		}
		out.DryRun = true
		return Answer{Done: true, Result: Result{Prune: out}}, nil
	}
	op := Operation{ProjectID: project, Kind: OpPruneCheckpoints, Step: "delete"}
	t, err := c.begin(ctx, InProject(project), op, func(ctx context.Context, tx Tx, _ *Operation, in *opInput, _ int) (any, error) {
		var err error
		if in.Prune, err = plan(ctx, tx); err != nil {
			return nil, err
		}
		if len(in.Prune.Items) > MaxPrune {
			in.Prune.Items, in.Prune.Truncated = in.Prune.Items[:MaxPrune], true
		}
		return nil, nil
	})
	if err != nil {
		return Answer{}, err
	}
	return t.await(ctx, wait)
}

// workPrune is the work of prune_checkpoints. To delete what is deleted changes nothing, so a resumed one begins anew.
func (c *Controller) workPrune(ctx context.Context, t *Task) error {
	out := *t.in.Prune
	out.Items = slices.Clone(out.Items)
	for items := range slices.Chunk(out.Items, pruneBatch) {
		var gone []Checkpoint
		err := t.load(ctx, func(tx Tx) error {
			gone = nil
			for i := range items { // in the order of their ids, which is that of their locks
				cp, err := tx.DeleteCheckpoint(ctx, items[i].ID, items[i].Reason != reasonCascade)
				items[i].Skipped = ""
				switch category := core.CategoryOf(err); {
				case err == nil && cp.State == core.CheckpointDeleted:
					gone = append(gone, cp)
				case err == nil:
					items[i].Skipped = "it came into use"
				case category == core.FailedPrecondition:
					items[i].Skipped = core.MessageOf(err)
				case category == core.NotFound: // deleted, and nobody's ancestor
				default:
					return err
				}
			}
			return nil
		})
		if err != nil {
			return err
		}
		c.dropCheckpoints(ctx, gone)
		t.watch.Lap("delete")
	}
	return t.finish(ctx, func(context.Context, Tx) (Outcome, Result, error) {
		return Outcome{Prune: &out}, Result{Prune: &out}, nil
	})
}

// DeleteCheckpoint removes a checkpoint and its bytes. What grew from it lives on. Deleting one that is gone is no error.
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
		c.dropCheckpoints(context.WithoutCancel(ctx), []Checkpoint{cp})
	}
	return err
}

// PutRetention stores the policy of a checkpoint and what grew from it.
func (c *Controller) PutRetention(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy RetentionPolicy) (Retention, error) {
	if err := policy.validate(); err != nil {
		return Retention{}, err
	}
	return read(ctx, c, InProject(project), func(tx Tx) (Retention, error) {
		if _, err := tx.Checkpoint(ctx, id); err != nil {
			return Retention{}, err
		}
		return tx.PutRetention(ctx, Retention{ProjectID: project, Checkpoint: id, Policy: policy})
	})
}

// Retention returns the stored policy of a checkpoint.
func (c *Controller) Retention(ctx context.Context, project core.ProjectID, id core.CheckpointID) (Retention, error) {
	return read(ctx, c, InProject(project), func(tx Tx) (Retention, error) {
		if _, err := tx.Checkpoint(ctx, id); err != nil {
			return Retention{}, err
		}
		return tx.Retention(ctx, id)
	})
}

// DeleteRetention removes the stored policy of a checkpoint. Removing none is no error.
func (c *Controller) DeleteRetention(ctx context.Context, project core.ProjectID, id core.CheckpointID) error {
	_, err := read(ctx, c, InProject(project), func(tx Tx) (struct{}, error) {
		if _, err := tx.Checkpoint(ctx, id); err != nil {
			return struct{}{}, err
		}
		return struct{}{}, tx.DeleteRetention(ctx, id)
	})
	return err
}

// retain carries out the stored policies, one after the other. A policy without anything to delete begins no operation.
func (c *Controller) retain(ctx context.Context) error {
	list, err := read(ctx, c, System(), func(tx Tx) ([]Retention, error) { return tx.Retentions(ctx) })
	if err != nil {
		return err
	}
	var errs []error
	for _, r := range list {
		plan, err := c.PruneCheckpoints(ctx, r.ProjectID, r.Checkpoint, r.Policy, true, 0)
		if err == nil && len(plan.Result.Prune.Items) > 0 {
			var done Answer
			if done, err = c.PruneCheckpoints(ctx, r.ProjectID, r.Checkpoint, r.Policy, false, retentionWait); err == nil && done.Done {
				c.log.InfoContext(ctx, "retention policy carried out", "checkpoint_id", r.Checkpoint, "checkpoints", len(done.Result.Prune.Items), "bytes", done.Result.Prune.Bytes())
			}
		}
		if core.CodeOf(err) == core.CodeCheckpointNotFound { // its tree is gone for good
			err = c.store.InTx(ctx, InProject(r.ProjectID), func(tx Tx) error { return tx.DeleteRetention(ctx, r.Checkpoint) })
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}
