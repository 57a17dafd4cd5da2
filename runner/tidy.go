package runner

import (
	"context"
	"time"
)

// tidyEvery is the time between two attempts to remove remaining directories.
const tidyEvery = time.Second

// tidy removes what could not be removed before, until the runner stops. The next runner removes the rest when it starts.
func (r *Runner) tidy(ctx context.Context) {
	tick := time.NewTicker(tidyEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := r.fetches.Trim(ctx); err != nil {
			r.cfg.Log.WarnContext(ctx, "copies of checkpoints were not given up", "err", err)
		}
		if err := r.checkpoints.EmptyTrash(ctx, r.room.Free); err != nil {
			r.cfg.Log.WarnContext(ctx, "checkpoints in the trash were not removed", "err", err)
		}
		if n, err := r.directories.RemoveAgain(); err != nil {
			r.cfg.Log.WarnContext(ctx, "directories of former shells are still there", "err", err)
		} else if n > 0 {
			r.cfg.Log.InfoContext(ctx, "directories of former shells were removed", "count", n)
		}
	}
}
