package runner

import (
	"context"
	"errors"
	"os"
	"time"
)

// removeDirs removes the directories of a shell. To remove a directory, the process needs a descriptor, and shells often fail because there is
// none left. So removeDirs remembers the directories that it cannot remove now, and tidy removes them later.
func (r *Runner) removeDirs(paths ...string) error {
	var errs []error
	for _, path := range paths {
		if err := os.RemoveAll(path); err != nil {
			errs = append(errs, err)
			r.mu.Lock()
			r.debris = append(r.debris, path)
			r.mu.Unlock()
		}
	}
	return errors.Join(errs...)
}

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
		r.mu.Lock()
		left := r.debris
		r.debris = nil
		r.mu.Unlock()
		if len(left) == 0 {
			continue
		}
		if err := r.removeDirs(left...); err != nil {
			r.cfg.Log.WarnContext(ctx, "directories of former shells are still there", "err", err)
		} else {
			r.cfg.Log.InfoContext(ctx, "directories of former shells were removed", "count", len(left))
		}
	}
}
