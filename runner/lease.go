package runner

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/runner/sealing"
)

// A runner's sandboxes live on a lease. After a time without an answer of the controller, the runner ends them. This is before the
// controller gives them up and may start others in their place (DECISIONS 14). A clock measures the time that no change of the host's
// time affects and that continues while the host sleeps. The time begins with the last attempt that was answered, so the time that the
// answer took counts as silence.

// leaseFile keeps the end of the lease for a successor, because the lease also runs while no runner does.
const leaseFile = "lease.json"

type leaseRecord struct {
	Boot  string        `json:"boot"`     // boot id of the host's kernel: the clock starts again with each boot
	Until time.Duration `json:"until_ns"` // since then
}

// epochFile keeps the last lease epoch, in the data directory: a database that has failed over may not know it.
const epochFile = "epoch.json"

type epochRecord struct {
	Epoch int64 `json:"lease_epoch"`
}

// leaseTick is the time between two checks of the lease.
const leaseTick = 200 * time.Millisecond

var (
	errLeaseExpired = core.Errorf(core.Unavailable, core.CodeRunnerLost, "its runner had no word from the controller for longer than its lease allows")
	errFenced       = core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "this runner got no answer from its controller for too long and takes no work until it gets one")
)

var bootID = sync.OnceValue(func() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // if it is absent, the boot id stays empty
	return strings.TrimSpace(string(b))
})

// loadLease reads how long the sandboxes of an earlier runner may live.
func (r *Runner) loadLease() error {
	r.leased, r.endLease = context.WithCancelCause(context.Background())
	r.leaseUntil = bootclock.Now() + r.cfg.Lease
	var rec leaseRecord
	if atomicfile.ReadJSON(filepath.Join(r.cfg.RunDir, leaseFile), &rec) == nil && rec.Boot == bootID() {
		r.leaseUntil = rec.Until
	}
	return r.loadEpoch()
}

// loadEpoch reads the last lease epoch that an earlier process wrote.
func (r *Runner) loadEpoch() error {
	var rec epochRecord
	path := filepath.Join(r.cfg.DataDir, epochFile)
	if err := atomicfile.ReadJSON(path, &rec); ignoreAbsent(err) != nil {
		return core.Wrapf(err, core.DataLoss, core.CodeInternal, "the last lease epoch of this runner cannot be read; remove %s if no earlier process of the runner lives, and start it again", path)
	}
	r.lastEpoch, r.keptEpoch = rec.Epoch, rec.Epoch
	return nil
}

// LastEpoch is the last lease epoch that a process of this runner got; 0: none.
func (r *Runner) LastEpoch() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lastEpoch
}

// KeepEpoch writes a lease epoch to disk. An epoch that is not on disk must not be used: the next process of the runner could get
// the same one.
func (r *Runner) KeepEpoch(epoch int64) error {
	r.mu.Lock()
	kept := epoch <= r.keptEpoch // a controller of an older version ignores the epoch that the runner names
	r.lastEpoch = max(r.lastEpoch, epoch)
	r.mu.Unlock()
	if kept {
		return nil
	}
	if err := atomicfile.WriteJSON(filepath.Join(r.cfg.DataDir, epochFile), epochRecord{epoch}, 0o600); err != nil {
		return fmt.Errorf("keep lease epoch %d: %w", epoch, err)
	}
	r.mu.Lock()
	r.keptEpoch = epoch
	r.mu.Unlock()
	return nil
}

func (r *Runner) leaseExpired() bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return bootclock.Now() > r.leaseUntil
}

// Attempt begins a message to the controller. Call answered only if the controller answers. It sets how long, from the beginning of the
// attempt, the sandboxes may live; 0 means the runner's own time.
func (r *Runner) Attempt() (answered func(lease time.Duration) error) {
	began := bootclock.Now()
	return func(lease time.Duration) error {
		if lease <= 0 {
			lease = r.cfg.Lease
		}
		r.mu.Lock()
		r.leaseUntil, r.fenced = began+lease, false
		if r.leased.Err() != nil {
			r.leased, r.endLease = context.WithCancelCause(context.Background())
		}
		r.mu.Unlock()
		if err := replaceJSON(filepath.Join(r.cfg.RunDir, leaseFile), leaseRecord{bootID(), began + lease}); err != nil {
			return fmt.Errorf("keep the lease: %w", err)
		}
		return nil
	}
}

// Seal uploads this host's new checkpoints to the store until ctx ends. epoch returns the runner's present lease. Without a lease nothing is
// written; when the lease ends, an upload under way stops.
func (r *Runner) Seal(ctx context.Context, c sealing.Controller, epoch func() (int64, bool)) error {
	return r.seals.Run(ctx, c, epoch)
}

// whileLeased returns a context that ends with the lease, or with ctx; errFenced is its cause then.
func (r *Runner) whileLeased(ctx context.Context) (context.Context, context.CancelFunc) {
	r.mu.Lock()
	leased := r.leased
	r.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	if leased.Err() != nil { // at once, not in another goroutine
		cancel(context.Cause(leased))
	}
	stop := context.AfterFunc(leased, func() { cancel(context.Cause(leased)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// guard ends the sandboxes when the lease ends.
func (r *Runner) guard(ctx context.Context) {
	tick := time.NewTicker(leaseTick)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		r.mu.Lock()
		due := bootclock.Now() > r.leaseUntil && !r.fenced
		r.mu.Unlock()
		if !due {
			continue
		}
		if err := r.Fence(ctx, core.MessageOf(errLeaseExpired)); err != nil {
			r.cfg.Log.ErrorContext(ctx, "sandboxes were not all ended", "err", err)
		}
	}
}

// Fence ends all sandboxes and uploads at once, whatever else is being done with them, and returns when nothing of them is left. It reports
// the sandboxes as dead, with the reason. The runner takes no work until the controller has answered again.
func (r *Runner) Fence(ctx context.Context, why string) error {
	r.mu.Lock()
	r.fenced = true
	r.endLease(errFenced)
	r.mu.Unlock()
	all := r.all()
	if len(all) > 0 {
		r.cfg.Log.ErrorContext(ctx, "runner is fenced: its sandboxes are ended", "count", len(all), "cause", why)
	}
	errs := make([]error, len(all))
	var wg sync.WaitGroup
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
