package fleet

import (
	"context"
	"errors"
	"math/rand/v2"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/model"
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

// FenceTx gives up runners.
type FenceTx interface {
	// FenceRunners marks at most limit runners whose lease ran out longer than hard ago. It ends what they hold in the
	// store, unless they have captured what is not sealed: that may need what they were fetching.
	FenceRunners(ctx context.Context, hard time.Duration, limit int) ([]core.RunnerID, error)
	// FencedRunners returns at most limit marked runners on which workspaces still run by their rows, and LoseWorkspaces ends
	// at most limit workspaces of one of them. Both leave out what another transaction works on.
	FencedRunners(ctx context.Context, limit int) ([]core.RunnerID, error)
	LoseWorkspaces(ctx context.Context, runner core.RunnerID, why model.Failure, limit int) ([]core.WorkspaceID, error)
}

// Fence gives up runners that were silent beyond the hard lease (DECISIONS 14): by then they have
// killed their sandboxes. Each transaction is bounded, and its work stays if a later one fails.
// First Fence marks the runners, so that operations that wait for the end of a runner go on. Then
// it ends the workspaces on these runners as lost, runner by runner. This second step reads the
// current rows, not the list of runners that were just marked. A workspace that becomes ready on
// such a runner in between becomes lost in the next round.
func (f *Fleet) Fence(ctx context.Context) error {
	for {
		marked, err := read(ctx, f, func(tx Tx) ([]core.RunnerID, error) { return tx.FenceRunners(ctx, f.cfg.Fence, fenceRunners) })
		if err != nil {
			return err
		}
		for _, id := range marked {
			f.cfg.Log.WarnContext(ctx, "runner given up", "runner_id", id, "cause", SilentRunner)
		}
		if len(marked) < fenceRunners {
			break
		}
	}
	list, err := read(ctx, f, func(tx Tx) ([]core.RunnerID, error) { return tx.FencedRunners(ctx, fenceRound) })
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
			if err := f.loseAll(ctx, id); err != nil { // it does not stop the others
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
func (f *Fleet) loseAll(ctx context.Context, id core.RunnerID) error {
	why := model.Failure{Code: core.CodeRunnerLost, Message: SilentRunner}
	for ctx.Err() == nil {
		lost, err := read(ctx, f, func(tx Tx) ([]core.WorkspaceID, error) { return tx.LoseWorkspaces(ctx, id, why, fenceWorkspaces) })
		if len(lost) > 0 && err == nil {
			f.cfg.Log.WarnContext(ctx, "workspaces lost with their runner", "runner_id", id, "count", len(lost), "workspace_ids", lost)
		}
		if err != nil || len(lost) < fenceWorkspaces {
			return err
		}
	}
	return context.Cause(ctx)
}
