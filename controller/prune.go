package controller

import (
	"context"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

const (
	// MaxPrune bounds the checkpoints that one operation deletes.
	MaxPrune   = 2000
	pruneBatch = 100 // checkpoints that one transaction deletes

	reasonCascade = "cascade"
)

// PruneResult is what an operation will delete, or has deleted.
type PruneResult struct {
	DryRun    bool        `json:"-"`
	Items     []PruneItem `json:"items"` // at most MaxPrune
	Planned   int         `json:"planned,omitempty"`
	Kept      int         `json:"kept"`
	KeptBytes int64       `json:"kept_bytes"`
	Over      bool        `json:"over,omitempty"`      // the checkpoints that had to be kept have more bytes than the policy allows
	Truncated bool        `json:"truncated,omitempty"` // there is more to delete
}

// PruneItem is one checkpoint to delete.
type PruneItem struct {
	ID      core.CheckpointID `json:"checkpoint_id"`
	Reason  string            `json:"reason"`
	Bytes   int64             `json:"bytes"`
	Skipped string            `json:"skipped,omitempty"` // why it was not deleted
}

// Bytes is the sum of the items that were not skipped.
func (r *PruneResult) Bytes() int64 {
	var sum int64
	for _, i := range r.Items {
		if i.Skipped == "" {
			sum += i.Bytes
		}
	}
	return sum
}

// Deletion is the outcome of an attempt to delete a checkpoint.
type Deletion struct {
	Checkpoint core.CheckpointID
	Endpoint   string // of its runner
	Gone       bool   // it is deleted; it may have been before
	Refused    error  // it names what needs the checkpoint
}

// PruneCheckpoints takes a checkpoint and everything that grew from it, and deletes what a policy does not keep.
func (c *Controller) PruneCheckpoints(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy RetentionPolicy, dryRun bool, wait time.Duration) (Answer, error) {
	if err := policy.Validate(); err != nil {
		return Answer{}, err
	}
	plan, err := c.PlanFor(ctx, project, id, policy)
	if err != nil {
		return Answer{}, err
	}
	return c.prune(ctx, project, pruneOf(plan, plan.Remove), dryRun, wait)
}

// pruneOf is the newest part of what a plan removes, as much as one operation deletes. A checkpoint is deleted before its ancestors, so few
// rows of deleted checkpoints have to stay as ancestors.
func pruneOf(plan retention.Plan, remove []retention.Removal) *PruneResult {
	out := &PruneResult{Planned: len(remove), Kept: plan.Kept, KeptBytes: plan.KeptBytes, Over: plan.Over, Truncated: len(remove) > MaxPrune}
	for _, r := range remove[max(0, len(remove)-MaxPrune):] {
		out.Items = append(out.Items, PruneItem{ID: r.ID, Reason: r.Reason, Bytes: r.Bytes})
	}
	return out
}

// DeleteCheckpoints deletes a checkpoint and everything that grew from it. If one of these checkpoints cannot be deleted, it deletes none.
func (c *Controller) DeleteCheckpoints(ctx context.Context, project core.ProjectID, id core.CheckpointID, cascade, dryRun bool, wait time.Duration) (Answer, error) {
	out, held := &PruneResult{}, []retention.Node{}
	err := c.WalkTree(ctx, project, id, "", func(n retention.Node) (bool, error) {
		if n.Held != "" && n.Held != heldByWorkspace {
			held = append(held, n)
		}
		if !n.Gone {
			out.Items = append(out.Items, PruneItem{ID: n.ID, Reason: reasonCascade, Bytes: n.Bytes})
		}
		return cascade && len(held) <= heldNamed && len(out.Items) <= MaxPrune, nil // the first node is the checkpoint itself
	})
	if err != nil {
		return Answer{}, err
	}
	if len(held) > 0 {
		return Answer{}, heldError(held)
	}
	if len(out.Items) > MaxPrune {
		return Answer{}, core.Errorf(core.Invalid, core.CodeUnsupported, "more than %d checkpoints grew from %s; at most %d are deleted at once, so begin further down the tree", MaxPrune, id, MaxPrune)
	}
	slices.SortFunc(out.Items, func(a, b PruneItem) int { return strings.Compare(string(a.ID), string(b.ID)) })
	out.Planned = len(out.Items)
	return c.prune(ctx, project, out, dryRun, wait)
}

// Some values of a node's Held that Subtree returns.
const (
	heldByPin       = "pinned"
	heldByWorkspace = "workspace"
)

// heldNamed is how many checkpoints the answer of a refused cascade names.
const heldNamed = 5

// heldError names the checkpoints that prevent a cascade.
func heldError(held []retention.Node) error {
	code, names := core.CodeCheckpointInUse, []string{}
	for _, n := range held {
		if n.Held == heldByPin {
			code = core.CodeCheckpointPinned
		}
		if names = append(names, string(n.ID)+" ("+n.Held+")"); len(names) > heldNamed {
			names[heldNamed] = "others"
			break
		}
	}
	return core.Errorf(core.FailedPrecondition, code, "nothing was deleted, because these cannot go: %s", strings.Join(names, ", "))
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
			list, err = tx.DeleteCheckpoints(ctx, ids, items[0].Reason != reasonCascade)
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

// DeleteCheckpoint deletes a checkpoint and its bytes, but nothing that grew from it. It is no error if the checkpoint is deleted already.
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
	done, err := c.prune(ctx, due.ProjectID, pruneOf(plan, remove), false, 0)
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
