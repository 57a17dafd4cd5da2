package controller

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
)

// SilentRunner is the reason of a workspace that is lost with its runner.
const SilentRunner = "its runner has not been heard of for longer than its lease allows"

const (
	fenceRunners     = 128  // runners that are given up in one transaction
	fenceWorkspaces  = 256  // workspaces of one runner that are lost in one transaction
	fenceRound       = 4096 // runners that one round looks at
	fenceConcurrency = 4
)

// fence gives up runners that were silent beyond the hard lease (DECISIONS 14): by then they have
// killed their sandboxes. Each transaction is bounded, and its work stays if a later one fails.
// First fence marks the runners, so that operations that wait for the end of a runner go on. Then
// it ends the workspaces on these runners as lost, runner by runner. This second step reads the
// current rows, not the list of runners that were just marked. A workspace that becomes ready on
// such a runner in between becomes lost in the next round.
func (c *Controller) fence(ctx context.Context) error {
	for {
		marked, err := read(ctx, c, System(), func(tx Tx) ([]core.RunnerID, error) { return tx.FenceRunners(ctx, c.cfg.RunnerFence, fenceRunners) })
		if err != nil {
			return err
		}
		for _, id := range marked {
			c.log.WarnContext(ctx, "runner given up", "runner_id", id, "cause", SilentRunner)
		}
		if len(marked) < fenceRunners {
			break
		}
	}
	list, err := read(ctx, c, System(), func(tx Tx) ([]core.RunnerID, error) { return tx.FencedRunners(ctx, fenceRound) })
	if err != nil {
		return err
	}
	rand.Shuffle(len(list), func(i, j int) { list[i], list[j] = list[j], list[i] }) //nolint:gosec // G404: the order is no secret; controllers share the work
	// mu guards errs.
	var mu sync.Mutex
	var errs []error
	var group errgroup.Group
	group.SetLimit(fenceConcurrency)
	for _, id := range list {
		group.Go(func() error {
			if err := c.loseAll(ctx, id); err != nil { // it does not stop the others
				mu.Lock()
				defer mu.Unlock()
				errs = append(errs, err)
			}
			return nil
		})
	}
	_ = group.Wait() // none of them fails
	return errors.Join(errs...)
}

// loseAll ends the workspaces on a runner that was given up.
func (c *Controller) loseAll(ctx context.Context, id core.RunnerID) error {
	why := Failure{Code: core.CodeRunnerLost, Message: SilentRunner}
	for ctx.Err() == nil {
		lost, err := read(ctx, c, System(), func(tx Tx) ([]core.WorkspaceID, error) { return tx.LoseWorkspaces(ctx, id, why, fenceWorkspaces) })
		if len(lost) > 0 && err == nil {
			c.log.WarnContext(ctx, "workspaces lost with their runner", "runner_id", id, "count", len(lost), "workspace_ids", lost)
		}
		if err != nil || len(lost) < fenceWorkspaces {
			return err
		}
	}
	return context.Cause(ctx)
}
