// Package tree reads the tree of checkpoints: one checkpoint and lists of them, its ancestors, its
// descendants, what differs between two of them, and the files of one. It changes what a user may
// change of one.
package tree

import (
	"context"
	"encoding/json"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// Filter selects checkpoints; zero fields do not filter. Newest first unless OldestFirst.
type Filter struct {
	model.Page
	Name        string
	IDSuffix    string
	States      []core.CheckpointState
	Kind        model.CheckpointKind
	Labels      map[string]*string
	WorkspaceID core.WorkspaceID
	Parent      core.CheckpointID
	OldestFirst bool
	Ancestors   bool // deleted ones too, while they are somebody's ancestor
}

// Page bounds a tree: at most Limit nodes after the one at (AfterDepth, After), at most MaxDepth generations below the
// root of the question (negative: all).
type Page struct {
	model.Page
	AfterDepth int
	MaxDepth   int
}

// Store runs transactions. Package controller/postgres has the methods of Tx.
type Store interface {
	// InProject runs fn in a transaction of a project and commits when it returns nil.
	InProject(ctx context.Context, project core.ProjectID, fn func(Tx) error) error
}

// Tx reads checkpoints. Reads of absent or foreign rows are NotFound errors that name the object.
type Tx interface {
	Workspace(ctx context.Context, id core.WorkspaceID) (model.Workspace, error)
	// Checkpoint does not find pruned checkpoints.
	Checkpoint(ctx context.Context, id core.CheckpointID) (model.Checkpoint, error)
	Checkpoints(ctx context.Context, f Filter) ([]model.Checkpoint, error)
	PatchCheckpoint(ctx context.Context, id core.CheckpointID, p Patch) (model.Checkpoint, error)
	// Lineage returns the path from a checkpoint (after it, when after is set to one of its ancestors) to its root.
	Lineage(ctx context.Context, id core.CheckpointID, after core.CheckpointID, limit int) ([]model.Ancestor, error)
	Tree(ctx context.Context, id core.CheckpointID, p Page) ([]model.TreeNode, error)
	// BothHolder returns the endpoint of a runner with a lease that holds both checkpoints; empty when there is none.
	BothHolder(ctx context.Context, a, b core.CheckpointID) (string, error)
}

// Runners calls runners by their endpoint.
type Runners interface {
	// Diff says what differs between two checkpoints that the runner has, a page at a time.
	Diff(ctx context.Context, endpoint string, from core.CheckpointID, d runnerapi.Diff) (runnerapi.DiffPage, error)
	// ReadFile reads a file or lists a directory of a checkpoint that the runner has, a part at a time.
	ReadFile(ctx context.Context, endpoint string, id core.CheckpointID, f runnerapi.ReadFile) (runnerapi.FilePart, error)
}

// Config says what a tree works with.
type Config struct {
	// ShowQueued gives captured checkpoints without an upload the state that says that a runner will upload them.
	ShowQueued func(list ...*model.Checkpoint)
	Runners    Runners
}

// Tree is safe for concurrent use.
type Tree struct {
	cfg   Config
	store Store
}

// New makes a tree.
func New(cfg Config, store Store) *Tree { return &Tree{cfg: cfg, store: store} }

// read runs a query in a project's scope.
func read[T any](ctx context.Context, t *Tree, project core.ProjectID, query func(Tx) (T, error)) (out T, err error) {
	err = t.store.InProject(ctx, project, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

func (t *Tree) list(ctx context.Context, project core.ProjectID, query func(Tx) ([]model.Checkpoint, error)) ([]model.Checkpoint, error) {
	list, err := read(ctx, t, project, query)
	for i := range list {
		t.cfg.ShowQueued(&list[i])
	}
	return list, err
}

// Checkpoint returns one.
func (t *Tree) Checkpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID) (model.Checkpoint, error) {
	cp, err := read(ctx, t, project, func(tx Tx) (model.Checkpoint, error) { return tx.Checkpoint(ctx, id) })
	t.cfg.ShowQueued(&cp)
	return cp, err
}

// Checkpoints lists.
func (t *Tree) Checkpoints(ctx context.Context, project core.ProjectID, f Filter) ([]model.Checkpoint, error) {
	return t.list(ctx, project, func(tx Tx) ([]model.Checkpoint, error) {
		if f.WorkspaceID != "" && f.After == "" {
			if _, err := tx.Workspace(ctx, f.WorkspaceID); err != nil {
				return nil, err
			}
		}
		return tx.Checkpoints(ctx, f)
	})
}

// Children lists the direct children of a checkpoint, oldest first. A deleted child is in the list as long as it is an ancestor.
func (t *Tree) Children(ctx context.Context, project core.ProjectID, id core.CheckpointID, p model.Page) ([]model.Checkpoint, error) {
	return t.list(ctx, project, func(tx Tx) ([]model.Checkpoint, error) {
		if _, err := tx.Checkpoint(ctx, id); err != nil {
			return nil, err
		}
		return tx.Checkpoints(ctx, Filter{
			Page: p, Parent: id, OldestFirst: true,
			States: []core.CheckpointState{core.CheckpointCaptured, core.CheckpointSealed, core.CheckpointDeleted},
		})
	})
}

// Lineage lists the path from a checkpoint to its root.
func (t *Tree) Lineage(ctx context.Context, project core.ProjectID, id core.CheckpointID, p model.Page) ([]model.Ancestor, error) {
	return read(ctx, t, project, func(tx Tx) ([]model.Ancestor, error) {
		list, err := tx.Lineage(ctx, id, core.CheckpointID(p.After), p.Limit)
		if err == nil && len(list) == 0 && p.After == "" {
			_, err = tx.Checkpoint(ctx, id)
		}
		return list, err
	})
}

// Subtree lists a checkpoint and everything that descends from it, breadth first.
func (t *Tree) Subtree(ctx context.Context, project core.ProjectID, id core.CheckpointID, p Page) ([]model.TreeNode, error) {
	list, err := read(ctx, t, project, func(tx Tx) ([]model.TreeNode, error) { return tx.Tree(ctx, id, p) })
	for i := range list {
		t.cfg.ShowQueued(&list[i].Checkpoint)
	}
	return list, err
}

// MaxAnnotations bounds a checkpoint's annotations, as JSON, in bytes.
const MaxAnnotations = 16 << 10

// SizeOf is the size of a value as JSON, in bytes.
func SizeOf(v any) int {
	b, err := json.Marshal(v)
	if err != nil {
		return 0 // a value that came from JSON can be encoded again
	}
	return len(b)
}

// Patch changes what a user may change of a checkpoint. Version 0 does not compare.
type Patch struct {
	Version     int64
	Name        *string                    // empty removes
	Labels      map[string]*string         // nil removes
	Annotations map[string]json.RawMessage // null removes
	Pinned      *bool
}

// Patch changes name, labels and annotations of a checkpoint.
func (t *Tree) Patch(ctx context.Context, project core.ProjectID, id core.CheckpointID, p Patch) (model.Checkpoint, error) {
	return read(ctx, t, project, func(tx Tx) (model.Checkpoint, error) {
		cp, err := tx.PatchCheckpoint(ctx, id, p)
		t.cfg.ShowQueued(&cp)
		switch {
		case err != nil:
		case len(cp.Labels) > model.MaxLabels:
			err = core.Errorf(core.Invalid, core.CodeInvalidField, "labels: there would be %d; at most %d are kept", len(cp.Labels), model.MaxLabels)
		case SizeOf(cp.Annotations) > MaxAnnotations:
			err = core.Errorf(core.Invalid, core.CodeInvalidField, "annotations: there would be %d bytes; at most %d are kept", SizeOf(cp.Annotations), MaxAnnotations)
		}
		return cp, err
	})
}
