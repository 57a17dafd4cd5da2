package fetch

import (
	"context"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// replaceTime is how long a fork waits until nothing uses a copy that it must replace.
const replaceTime = time.Minute

// ReplaceCaptured gives up a checkpoint that this host captured while it was another runner, so that it is fetched from the store
// and verified. The store must have the manifest of the checkpoint; otherwise its bytes would be lost. ReplaceCaptured waits while the
// copy is in use, but not for long. Sandboxes and checkpoints that share memory with the copy keep this memory.
func (f *Fetcher) ReplaceCaptured(ctx context.Context, id core.CheckpointID, sources []runnerapi.Stored, want *runnerapi.Expected) error {
	captured := func() bool {
		rec, err := f.cfg.Checkpoints.Find(id)
		return err == nil && !rec.Fetched
	}
	if !captured() || len(sources) == 0 || sources[0].CheckpointID != id || f.cfg.Blobs == nil {
		return nil // there is no copy to replace, or the store does not have the checkpoint
	}
	snapshot, err := f.cfg.Uploads.Snapshot(ctx, sources[0])
	if err == nil && want != nil {
		err = snapshot.Header().Check(claimOf(id, *want))
	}
	if err != nil {
		return fmt.Errorf("replace the copy of checkpoint %s that this host captured as another runner: %w", id, err)
	}
	return f.GiveUpUnused(ctx, id, replaceTime, captured)
}

// GiveUpUnused gives up a copy as soon as nothing uses it. It waits for this, but only for a limited time.
func (f *Fetcher) GiveUpUnused(ctx context.Context, id core.CheckpointID, limit time.Duration, there func() bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, core.Errorf(core.FailedPrecondition, core.CodeCheckpointInUse,
		"this host captured checkpoint %s as another runner and must fetch it again, but the copy was in use for %s; try again later, or fork on another runner", id, limit))
	defer cancel()
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	defer context.AfterFunc(f.cfg.Life, func() { end(f.cfg.Stopping) })()
	for there() {
		gone, err := f.cfg.Checkpoints.GiveUp(id)
		if err != nil {
			return err
		}
		if gone {
			f.cfg.Log.InfoContext(ctx, "a checkpoint that this host captured as another runner was given up, and will be fetched and verified", "checkpoint_id", id)
			return nil
		}
		select {
		case <-f.cfg.Checkpoints.Unused(id):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}
