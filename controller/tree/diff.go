package tree

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// DiffPage asks for a page of the differences of two checkpoints.
type DiffPage struct {
	After []byte // runnerapi.DiffPage.Next of the page before
	Limit int
}

// Diff returns the differences between two checkpoints of a tree. A runner that has both compares them.
func (t *Tree) Diff(ctx context.Context, project core.ProjectID, from, to core.CheckpointID, p DiffPage) (runnerapi.DiffPage, error) {
	type pair struct {
		a, b     model.Checkpoint
		endpoint string // of a runner that has both
	}
	both, err := read(ctx, t, project, func(tx Tx) (pair, error) {
		a, err := tx.Checkpoint(ctx, from)
		if err != nil {
			return pair{}, err
		}
		b, err := tx.Checkpoint(ctx, to)
		if err != nil || a.RunnerID == b.RunnerID {
			return pair{a, b, a.Endpoint}, err
		}
		endpoint, err := tx.BothHolder(ctx, a.ID, b.ID)
		return pair{a, b, endpoint}, err
	})
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	a, b := both.a, both.b
	for _, cp := range []model.Checkpoint{a, b} {
		if cp.State != core.CheckpointCaptured && cp.State != core.CheckpointSealed {
			return runnerapi.DiffPage{}, core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady, "checkpoint %s is %s and cannot be compared", cp.ID, cp.State)
		}
	}
	switch {
	case a.Root != b.Root:
		return runnerapi.DiffPage{}, core.Errorf(core.Invalid, core.CodeInvalidField, "to: checkpoint %s is not of the tree of %s; only checkpoints of one tree can be compared", to, from)
	case both.endpoint == "":
		return runnerapi.DiffPage{}, core.Errorf(core.Invalid, core.CodeUnsupported, "checkpoints %s and %s are not both on one runner; seal one and fork it where the other is, then compare them", from, to)
	}
	return t.cfg.Runners.Diff(ctx, both.endpoint, from, runnerapi.Diff{To: to, After: p.After, Limit: p.Limit})
}
