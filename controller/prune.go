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
	// MaxPrune is how many checkpoints one operation deletes.
	MaxPrune   = 2000
	pruneBatch = 100       // in one transaction
	maxTree    = 2_000_000 // nodes of one plan, of about 150 bytes each in memory
	planPlaces = 2         // plans that are made at once; of stored policies, one

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
	Items     []PruneItem `json:"items"` // at most MaxPrune
	Planned   int         `json:"planned,omitempty"`
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

// SubtreeWalk is how far a walk through a checkpoint and what grew from it has come. Only ID is set at its beginning.
type SubtreeWalk struct {
	ID    core.CheckpointID
	Begun bool
	More  bool // there may be more; of a walk from a root

	Root  bool              // ID is the root of a tree: the walk goes by generations
	Depth int               // of the last node
	After core.CheckpointID // the last node

	Open []SubtreeBranch // of other walks: nodes whose children are to be read
}

// SubtreeBranch is a node whose children with ids above After are to be read.
type SubtreeBranch struct{ Parent, After core.CheckpointID }

// Done says whether the walk is at its end.
func (w SubtreeWalk) Done() bool { return w.Begun && !w.More && len(w.Open) == 0 }

// Deletion is what became of a checkpoint that was to be deleted.
type Deletion struct {
	Checkpoint core.CheckpointID
	Endpoint   string // of its runner
	Gone       bool   // it is deleted, now or before
	Refused    error  // what needs it
}

// walkSubtree reads a checkpoint and what grew from it in parts, each in a transaction of its own, until visit says that it is enough.
func (c *Controller) walkSubtree(ctx context.Context, project core.ProjectID, id core.CheckpointID, annotation string, visit func(retention.Node) (more bool, err error)) error {
	for walk := (SubtreeWalk{ID: id}); !walk.Done(); {
		var nodes []retention.Node
		err := c.store.InTx(ctx, InProject(project), func(tx Tx) error {
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

// planFor is plan for a request. Few of them are made at a time, for their memory. The loop of the stored policies has one beside them.
func (c *Controller) planFor(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy RetentionPolicy) (retention.Plan, error) {
	select {
	case c.planning <- struct{}{}:
		defer func() { <-c.planning }()
	case <-ctx.Done():
		return retention.Plan{}, context.Cause(ctx)
	}
	return c.plan(ctx, project, id, policy, nil)
}

// plan finds out what a policy does not keep. It reads the tree once, and calls renew, if there is one, now and then.
func (c *Controller) plan(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy RetentionPolicy, renew func() error) (retention.Plan, error) {
	tree, renewed := retention.Tree{Most: maxTree}, time.Now()
	err := c.walkSubtree(ctx, project, id, policy.Annotation, func(n retention.Node) (bool, error) {
		if !tree.Add(n) {
			return false, core.Errorf(core.Invalid, core.CodeUnsupported, "more than %d checkpoints grew from %s; use policies further down the tree", maxTree, id)
		}
		if renew != nil && time.Since(renewed) > retentionLease/4 {
			renewed = time.Now()
			return true, renew()
		}
		return true, nil
	})
	if err != nil {
		return retention.Plan{}, err
	}
	return tree.Plan(policy.Policy, time.Now()), nil
}

// PruneCheckpoints deletes what a policy does not keep of a checkpoint and what grew from it.
func (c *Controller) PruneCheckpoints(ctx context.Context, project core.ProjectID, id core.CheckpointID, policy RetentionPolicy, dryRun bool, wait time.Duration) (Answer, error) {
	if err := policy.validate(); err != nil {
		return Answer{}, err
	}
	plan, err := c.planFor(ctx, project, id, policy)
	if err != nil {
		return Answer{}, err
	}
	return c.prune(ctx, project, pruneOf(plan, plan.Remove), dryRun, wait)
}

// pruneOf is the newest part of what a plan removes, as much as one operation deletes. What grew goes before what it grew from: then little
// of what is deleted stays as an ancestor.
func pruneOf(plan retention.Plan, remove []retention.Removal) *PruneResult {
	out := &PruneResult{Planned: len(remove), Kept: plan.Kept, KeptBytes: plan.KeptBytes, Over: plan.Over, Truncated: len(remove) > MaxPrune}
	for _, r := range remove[max(0, len(remove)-MaxPrune):] {
		out.Items = append(out.Items, PruneItem{ID: r.ID, Reason: r.Reason, Bytes: r.Bytes})
	}
	return out
}

// DeleteCheckpoints deletes a checkpoint and what grew from it, or nothing when one of them cannot go.
func (c *Controller) DeleteCheckpoints(ctx context.Context, project core.ProjectID, id core.CheckpointID, cascade, dryRun bool, wait time.Duration) (Answer, error) {
	out, held := &PruneResult{}, []retention.Node{}
	err := c.walkSubtree(ctx, project, id, "", func(n retention.Node) (bool, error) {
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

// What a checkpoint can be held by, as Subtree says it.
const (
	heldByPin       = "pinned"
	heldByWorkspace = "workspace"
)

// heldNamed is how many checkpoints the answer of a refused cascade names.
const heldNamed = 5

// heldError names what stands in the way of a cascade.
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

// prune carries a plan out, unless it is a dry run. What came into use since is refused when it is to be deleted, one by one.
func (c *Controller) prune(ctx context.Context, project core.ProjectID, plan *PruneResult, dryRun bool, wait time.Duration) (Answer, error) {
	if dryRun {
		plan.DryRun = true
		return Answer{Done: true, Result: Result{Prune: plan}}, nil
	}
	op := Operation{ProjectID: project, Kind: OpPruneCheckpoints, Step: "delete"}
	t, err := c.begin(ctx, InProject(project), op, func(_ context.Context, _ Tx, _ *Operation, in *opInput, _ int) (any, error) {
		in.Prune = plan
		return nil, nil
	})
	if err != nil {
		return Answer{}, err
	}
	return t.await(ctx, wait)
}

// workPrune is the work of prune_checkpoints. To delete what is deleted changes nothing, so a resumed one begins anew. The newest go first.
func (c *Controller) workPrune(ctx context.Context, t *Task) error {
	out := *t.in.Prune
	out.Items = slices.Clone(out.Items)
	for end := len(out.Items); end > 0; end -= pruneBatch {
		items := out.Items[max(0, end-pruneBatch):end]
		ids, at := make([]core.CheckpointID, len(items)), make(map[core.CheckpointID]*PruneItem, len(items))
		for i := range items {
			ids[i], at[items[i].ID] = items[i].ID, &items[i]
		}
		var list []Deletion
		err := t.load(ctx, func(tx Tx) (err error) {
			list, err = tx.DeleteCheckpoints(ctx, ids, items[0].Reason != reasonCascade)
			return err
		})
		if err != nil {
			return err
		}
		var gone []Checkpoint
		for _, d := range list { // what is not among them was deleted, and is nobody's ancestor
			switch {
			case d.Refused != nil:
				at[d.Checkpoint].Skipped = core.MessageOf(d.Refused)
			case d.Gone:
				gone = append(gone, Checkpoint{ID: d.Checkpoint, State: core.CheckpointDeleted, Endpoint: d.Endpoint})
			default:
				at[d.Checkpoint].Skipped = "it came into use"
			}
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
