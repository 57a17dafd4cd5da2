package retention

import (
	"context"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// MaxDeletions bounds the checkpoints that one operation deletes.
const MaxDeletions = 2000

// Deletions are what an operation will delete, or has deleted.
type Deletions struct {
	DryRun    bool   `json:"-"`
	Items     []Item `json:"items"` // at most MaxDeletions
	Planned   int    `json:"planned,omitempty"`
	Kept      int    `json:"kept"`
	KeptBytes int64  `json:"kept_bytes"`
	Over      bool   `json:"over,omitempty"`      // the checkpoints that had to be kept have more bytes than the policy allows
	Truncated bool   `json:"truncated,omitempty"` // there is more to delete
}

// Item is one checkpoint to delete.
type Item struct {
	ID      core.CheckpointID `json:"checkpoint_id"`
	Reason  string            `json:"reason"`
	Bytes   int64             `json:"bytes"`
	Skipped string            `json:"skipped,omitempty"` // why it was not deleted
}

// Bytes is the sum of the items that were not skipped.
func (d *Deletions) Bytes() int64 {
	var sum int64
	for _, i := range d.Items {
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

// Deletions is the newest part of what a plan removes, as much as one operation deletes. A checkpoint is deleted before its ancestors, so few
// rows of deleted checkpoints have to stay as ancestors.
func (p *Plan) Deletions(remove []Removal) *Deletions {
	out := &Deletions{Planned: len(remove), Kept: p.Kept, KeptBytes: p.KeptBytes, Over: p.Over, Truncated: len(remove) > MaxDeletions}
	for _, r := range remove[max(0, len(remove)-MaxDeletions):] {
		out.Items = append(out.Items, Item{ID: r.ID, Reason: r.Reason, Bytes: r.Bytes})
	}
	return out
}

// Cascade plans the deletion of a checkpoint and, with cascade, of everything that descends from it. It fails if one of these checkpoints cannot
// be deleted.
func (r *Rounds) Cascade(ctx context.Context, project core.ProjectID, id core.CheckpointID, cascade bool) (*Deletions, error) {
	out, held := &Deletions{}, []Node{}
	err := r.WalkTree(ctx, project, id, "", func(n Node) (bool, error) {
		if n.Held != "" && n.Held != heldByWorkspace {
			held = append(held, n)
		}
		if !n.Gone {
			out.Items = append(out.Items, Item{ID: n.ID, Reason: ReasonCascade, Bytes: n.Bytes})
		}
		return cascade && len(held) <= heldNamed && len(out.Items) <= MaxDeletions, nil // the first node is the checkpoint itself
	})
	if err != nil {
		return nil, err
	}
	if len(held) > 0 {
		return nil, heldError(held)
	}
	if len(out.Items) > MaxDeletions {
		return nil, core.Errorf(core.Invalid, core.CodeUnsupported, "more than %d checkpoints grew from %s; at most %d are deleted at once, so begin further down the tree", MaxDeletions, id, MaxDeletions)
	}
	slices.SortFunc(out.Items, func(a, b Item) int { return strings.Compare(string(a.ID), string(b.ID)) })
	out.Planned = len(out.Items)
	return out, nil
}

// Some values of a node's Held that Subtree returns.
const (
	heldByPin       = "pinned"
	heldByWorkspace = "workspace"
)

// heldNamed is how many checkpoints the answer of a refused cascade names.
const heldNamed = 5

// heldError names the checkpoints that prevent a cascade.
func heldError(held []Node) error {
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
