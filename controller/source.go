package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// source returns a checkpoint to fork, with the places where a runner that does not have it finds it.
func (c *Controller) source(ctx context.Context, tx Tx, id core.CheckpointID) (Checkpoint, error) {
	cp, err := tx.Checkpoint(ctx, id)
	if err != nil {
		return cp, err
	}
	return cp, findSources(ctx, tx, &cp)
}

func findSources(ctx context.Context, tx Tx, cp *Checkpoint) (err error) {
	if cp.State != core.CheckpointSealed {
		return nil
	}
	if cp.Sources, err = tx.Sources(ctx, cp.ID); err != nil {
		return err
	}
	cp.Peers, err = tx.Peers(ctx, *cp)
	return err
}

// placeFrom chooses runners for the children of a checkpoint. A captured checkpoint is on one runner. A sealed one can be forked on any
// runner of its class: preferably on one that has it, then on one that has a part of it; or evenly on all.
func (c *Controller) placeFrom(ctx context.Context, tx Tx, source Checkpoint, count int, even bool) ([]Runner, error) {
	req := placement.Request{Count: count, Resources: source.Resources, Class: source.Class}
	if source.State != core.CheckpointSealed {
		if even {
			return nil, core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady,
				"checkpoint %s is %s, so it is on one runner only and cannot be spread; wait until it is sealed (?wait=sealed), or fork it without", source.ID, source.State)
		}
		req.Holder = source.RunnerID
		return c.placeEach(ctx, tx, req, false)
	}
	var err error
	if req.Near, err = tx.Near(ctx, source); err != nil {
		return nil, err
	}
	return c.placeEach(ctx, tx, req, even)
}
