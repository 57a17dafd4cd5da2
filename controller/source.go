package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// source returns a checkpoint that is to be grown, with where a runner that does not hold it finds it.
func (c *Controller) source(ctx context.Context, tx Tx, id core.CheckpointID) (Checkpoint, error) {
	cp, err := tx.Checkpoint(ctx, id)
	if err != nil {
		return cp, err
	}
	return cp, findSources(ctx, tx, &cp)
}

func findSources(ctx context.Context, tx Tx, cp *Checkpoint) (err error) {
	if cp.State == core.CheckpointSealed {
		cp.Sources, err = tx.Sources(ctx, cp.ID)
	}
	return err
}

// placeFrom chooses a runner for what is grown from a checkpoint. One that is captured is on one runner. One that is sealed can be
// grown on any of its class: better on one that holds it, then on one that has its image.
func (c *Controller) placeFrom(ctx context.Context, tx Tx, source Checkpoint, count int) (Runner, error) {
	req := placement.Request{Count: count, Resources: source.Resources, Class: source.Class}
	if source.State != core.CheckpointSealed {
		req.Holder = source.RunnerID
		return c.place(ctx, tx, req)
	}
	near, err := tx.Near(ctx, source)
	if err != nil {
		return Runner{}, err
	}
	req.Near = near
	return c.place(ctx, tx, req)
}
