package runner

import (
	"context"
	"errors"
	"io/fs"
	"sync"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/lease"
	"github.com/coppice-dev/coppice/runner/sealing"
)

// Seal uploads this host's new checkpoints to the store until ctx ends. epoch returns the runner's present lease. Without a lease nothing is
// written; when the lease ends, an upload under way stops.
func (r *Runner) Seal(ctx context.Context, c sealing.Controller, epoch func() (int64, bool)) error {
	return r.seals.Run(ctx, c, epoch)
}

// Lease is how long the sandboxes of this runner may live.
func (r *Runner) Lease() *lease.Lease { return r.lease }

// fenceExpired ends the sandboxes when the lease has ended.
func (r *Runner) fenceExpired(ctx context.Context) {
	if err := r.Fence(ctx, core.MessageOf(lease.ErrExpired)); err != nil {
		r.cfg.Log.ErrorContext(ctx, "sandboxes were not all ended", "err", err)
	}
}

// Fence ends all sandboxes and uploads at once, also those with other work under way, and returns when they are gone. It reports the
// sandboxes as dead, with the reason. The runner takes no work until the controller has answered again.
func (r *Runner) Fence(ctx context.Context, why string) error {
	r.lease.End()
	all := r.all()
	if len(all) > 0 {
		r.cfg.Log.ErrorContext(ctx, "runner is fenced: its sandboxes are ended", "count", len(all), "cause", why)
	}
	errs := make([]error, len(all))
	var wg sync.WaitGroup
	wg.Go(func() { r.prepared.Purge(ctx) }) // beside the sandboxes, whose end must not wait for it
	for i, s := range all {
		wg.Go(func() {
			if errs[i] = s.end(ctx, why); errs[i] != nil {
				return
			}
			select {
			case <-s.gone:
			case <-ctx.Done():
				errs[i] = context.Cause(ctx)
			}
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

func ignoreAbsent(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
