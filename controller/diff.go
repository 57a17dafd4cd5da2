package controller

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// DiffPage asks for a page of the differences of two checkpoints.
type DiffPage struct {
	After []byte // runnerapi.DiffPage.Next of the page before
	Limit int
}

// DiffCheckpoints says what differs from a checkpoint to another of its tree. Their runner compares them.
func (c *Controller) DiffCheckpoints(ctx context.Context, project core.ProjectID, from, to core.CheckpointID, p DiffPage) (runnerapi.DiffPage, error) {
	type pair struct{ a, b Checkpoint }
	both, err := read(ctx, c, InProject(project), func(tx Tx) (pair, error) {
		a, err := tx.Checkpoint(ctx, from)
		if err != nil {
			return pair{}, err
		}
		b, err := tx.Checkpoint(ctx, to)
		return pair{a, b}, err
	})
	if err != nil {
		return runnerapi.DiffPage{}, err
	}
	a, b := both.a, both.b
	for _, cp := range []Checkpoint{a, b} {
		if cp.State != core.CheckpointCaptured && cp.State != core.CheckpointSealed {
			return runnerapi.DiffPage{}, core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady, "checkpoint %s is %s and cannot be compared", cp.ID, cp.State)
		}
	}
	switch {
	case a.Root != b.Root:
		return runnerapi.DiffPage{}, core.Errorf(core.Invalid, core.CodeInvalidField, "to: checkpoint %s is not of the tree of %s; only checkpoints of one tree can be compared", to, from)
	case a.RunnerID != b.RunnerID || a.Endpoint == "":
		return runnerapi.DiffPage{}, core.Errorf(core.Invalid, core.CodeUnsupported, "checkpoints %s and %s are not on one runner; comparing them needs a snapshot store", from, to)
	}
	return c.runners.Diff(ctx, a.Endpoint, from, runnerapi.Diff{To: to, After: p.After, Limit: p.Limit})
}
