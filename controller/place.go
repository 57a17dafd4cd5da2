package controller

import (
	"context"
	"slices"

	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// place chooses a runner by the fleet as the transaction sees it.
func (c *Controller) place(ctx context.Context, tx Tx, req placement.Request, holders ...core.RunnerID) (Runner, error) {
	list, err := c.placeEach(ctx, tx, req, false, holders...)
	if err != nil {
		return Runner{}, err
	}
	return list[0], nil
}

// placeEach chooses a runner for each of those that are asked for; see placement.Spread.
func (c *Controller) placeEach(ctx context.Context, tx Tx, req placement.Request, even bool, holders ...core.RunnerID) ([]Runner, error) {
	if err := c.inLine(ctx, req); err != nil {
		return nil, err
	}
	fleet, err := tx.Fleet(ctx)
	if err != nil {
		return nil, err
	}
	candidates := make([]placement.Runner, len(fleet))
	for i, r := range fleet {
		candidates[i] = placement.Runner{
			ID: r.Info.RunnerID, Class: r.Info.Class, Fresh: r.Fresh, Draining: r.Draining, Capacity: r.Info.Capacity, Used: r.Used,
			DiskFreeMB: r.Info.DiskFreeMB,
		}
		if slices.Contains(holders, r.Info.RunnerID) {
			candidates[i].Images = []core.Digest{req.Image}
		}
	}
	ids, err := placement.Spread(candidates, req, even)
	if err != nil {
		return nil, err
	}
	chosen := make([]Runner, len(ids))
	for i, id := range ids {
		chosen[i] = fleet[slices.IndexFunc(fleet, func(r Runner) bool { return r.Info.RunnerID == id })]
		chosen[i].ask = req
	}
	return chosen, nil
}

// occupy checks, after the rows are inserted, that the chosen runners have room for them. Another
// request, here or on another controller, may have chosen the same runners at the same time.
func (c *Controller) occupy(ctx context.Context, tx Tx, runners ...Runner) error {
	seen := map[core.RunnerID]bool{}
	for _, r := range runners {
		if seen[r.Info.RunnerID] {
			continue
		}
		seen[r.Info.RunnerID] = true
		used, err := tx.Occupied(ctx, r.Info.RunnerID)
		if err != nil {
			return err
		}
		if err := placement.Fits(placement.Runner{ID: r.Info.RunnerID, Capacity: r.Info.Capacity, Used: used}, r.ask); err != nil {
			return err
		}
	}
	return nil
}
