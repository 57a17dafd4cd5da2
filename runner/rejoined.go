package runner

import (
	"context"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// replacePause is between two looks whether a checkpoint is still in use.
const replacePause = 50 * time.Millisecond

// replaceCaptured gives up a checkpoint that this host captured while it was another runner, so that it is fetched from the store
// and verified. The store must have its manifest: the bytes are nowhere else otherwise. It waits while the copy is in use.
// Sandboxes and checkpoints that share memory with the copy keep it.
func (r *Runner) replaceCaptured(ctx context.Context, id core.CheckpointID, sources []runnerapi.Stored, want *runnerapi.Expected) error {
	for {
		rec, err := r.checkpoints.get(id)
		if err != nil || rec.Fetched || len(sources) == 0 || sources[0].CheckpointID != id || r.cfg.Store.Blobs == nil {
			return nil // there is nothing to replace, or nothing to replace it with
		}
		snapshot, err := r.snapshot(ctx, sources[0])
		if err == nil && want != nil {
			err = snapshot.Header().Check(claimOf(id, *want))
		}
		if err != nil {
			return fmt.Errorf("replace the copy of checkpoint %s that this host captured as another runner: %w", id, err)
		}
		gone, err := r.giveUp(id)
		if err != nil {
			return err
		}
		if gone {
			r.cfg.Log.InfoContext(ctx, "a checkpoint that this host captured as another runner was given up, and will be fetched and verified", "checkpoint_id", id)
			return nil
		}
		pause(ctx, replacePause)
		if err := context.Cause(ctx); err != nil {
			return err
		}
	}
}
