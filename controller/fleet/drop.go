package fleet

import (
	"context"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Only the functions in this file destroy something on a runner. Each one does so only if a
// committed row allows it. The reason: a controller that was suspended for a while may have lost its
// lease without knowing. It may then believe that a sandbox has failed, while another controller has
// made it ready.

const (
	dropTimeout     = 10 * time.Second
	dropConcurrency = 8
)

// DropTx says what may be destroyed.
type DropTx interface {
	// EndedSandboxes returns those of the sandboxes whose rows have ended. They never live again.
	EndedSandboxes(ctx context.Context, ids []core.SandboxID) ([]model.Sandbox, error)
	// Sandboxes returns sandboxes by id, living or not.
	Sandboxes(ctx context.Context, ids []core.SandboxID) ([]model.Sandbox, error)
	Runner(ctx context.Context, id core.RunnerID) (model.Runner, error)
}

// Drop tells runners to take down those of the given sandboxes whose rows have ended. An ended row
// never lives again. All other sandboxes stay as they are, also if the caller names them. If a
// runner cannot be reached, the answer to one of its next heartbeats has the order.
func (f *Fleet) Drop(ctx context.Context, ids ...core.SandboxID) {
	if len(ids) == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, dropTimeout) // so that a controller that stops does not wait long
	defer cancel()
	ended, err := read(ctx, f, func(tx Tx) ([]model.Sandbox, error) { return tx.EndedSandboxes(ctx, ids) })
	if err != nil {
		f.cfg.Log.InfoContext(ctx, "sandboxes left to a heartbeat", "sandboxes", len(ids), "err", err)
		return
	}
	var group errgroup.Group
	group.SetLimit(dropConcurrency)
	for _, s := range ended {
		if s.Endpoint == "" {
			continue
		}
		group.Go(func() error {
			if err := f.runners.DeleteSandbox(ctx, s.Endpoint, s.ID); err != nil && core.CategoryOf(err) != core.NotFound {
				f.dropping.Store(s.RunnerID, true)
				f.cfg.Log.InfoContext(ctx, "sandbox left to a heartbeat", "sandbox_id", s.ID, "err", err)
			}
			return nil
		})
	}
	_ = group.Wait() // none of them fails
}

// DropCheckpoints tells runners to delete those of the checkpoints whose committed rows are deleted or failed. If a runner cannot
// be reached, the function does not call it for further checkpoints; the answer to one of its next heartbeats tells it.
func (f *Fleet) DropCheckpoints(ctx context.Context, list []model.Checkpoint) {
	var group errgroup.Group
	group.SetLimit(dropConcurrency)
	var silent sync.Map // endpoints that did not answer
	for _, cp := range list {
		if _, ok := silent.Load(cp.Endpoint); ok || cp.Endpoint == "" || !slices.Contains([]core.CheckpointState{core.CheckpointDeleted, core.CheckpointFailed}, cp.State) {
			continue
		}
		group.Go(func() error {
			if err := f.runners.DeleteCheckpoint(ctx, cp.Endpoint, cp.ID); err != nil && core.CategoryOf(err) != core.NotFound {
				if core.CategoryOf(err) == core.Unavailable {
					silent.Store(cp.Endpoint, true)
				}
				f.dropping.Store(cp.RunnerID, true)
				f.cfg.Log.InfoContext(ctx, "checkpoint left to a heartbeat", "checkpoint_id", cp.ID, "err", err)
			}
			return nil
		})
	}
	_ = group.Wait() // none of them fails
}

// TakeDown tries until a sandbox of a terminating workspace is gone, because a terminated workspace must not run. A terminating
// workspace never becomes ready again, so a controller that has lost its lease does no harm here.
func (f *Fleet) TakeDown(ctx context.Context, s model.Sandbox) error {
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, f.cfg.DropPause) {
		err := f.runners.DeleteSandbox(ctx, s.Endpoint, s.ID)
		if err == nil || core.CategoryOf(err) == core.NotFound {
			return nil
		}
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		f.cfg.Log.WarnContext(ctx, "sandbox not taken down yet", "sandbox_id", s.ID, "runner_id", s.RunnerID, "err", err)
		fenced, err := f.Fenced(ctx, s.RunnerID)
		if err == nil && fenced {
			return nil
		}
		if err := pace.Pause(ctx, wait); err != nil {
			return err
		}
		// The runner may have another address now. It is in the runner's row.
		_ = f.store.InSystem(ctx, func(tx Tx) error {
			list, err := tx.Sandboxes(ctx, []core.SandboxID{s.ID})
			if err == nil && len(list) == 1 {
				s.Endpoint = list[0].Endpoint
			}
			return err
		})
	}
}

// Fenced reports whether a runner has been silent for so long that it has killed its sandboxes itself.
func (f *Fleet) Fenced(ctx context.Context, id core.RunnerID) (bool, error) {
	r, err := read(ctx, f, func(tx Tx) (model.Runner, error) { return tx.Runner(ctx, id) })
	return err == nil && !r.Fresh && r.Fenced, err
}
