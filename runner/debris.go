package runner

import (
	"context"
	"errors"
	"os"
	"time"
)

// removeDirs removes what a shell had. To remove a directory takes a descriptor, and it is when there are none left that shells fail:
// what cannot be removed now is kept in mind, for tidy.
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

// tidyEvery is how often the removal of what was left is tried again.
const tidyEvery = time.Second

// tidy removes what could not be removed before, until the runner stops. What is left then is for the next start.
func (r *Runner) tidy(ctx context.Context) {
	tick := time.NewTicker(tidyEvery)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if err := r.trimCopies(ctx); err != nil {
			r.cfg.Log.WarnContext(ctx, "copies of checkpoints were not given up", "err", err)
		}
		if err := r.emptyTrash(ctx); err != nil {
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
