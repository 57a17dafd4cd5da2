package runner

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/bootclock"
)

// A runner's sandboxes live on a lease. After a time without a word of the controller they are ended, before the controller gives
// them up and may let something else take their place (DECISIONS 14). The time is measured by a clock that no step of the
// host's time changes and that goes on while the host sleeps, from the beginning of the last attempt that was answered: the
// answer's own way here counts as silence.

// leaseFile keeps the end of the lease for a successor: the time goes on while no runner is there.
const leaseFile = "lease.json"

type leaseRecord struct {
	Boot  string        `json:"boot"`     // of the host's kernel: the clock begins anew with it
	Until time.Duration `json:"until_ns"` // since then
}

// epochFile keeps the last lease epoch, in the data directory: a database that has failed over may not know it.
const epochFile = "epoch.json"

type epochRecord struct {
	Epoch int64 `json:"lease_epoch"`
}

// leaseTick is how often the lease is looked at.
const leaseTick = 200 * time.Millisecond

var (
	errLeaseExpired = core.Errorf(core.Unavailable, core.CodeRunnerLost, "its runner had no word from the controller for longer than its lease allows")
	errFenced       = core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "this runner has been out of touch with its controller for too long and takes no work until it is heard again")
)

var bootID = sync.OnceValue(func() string {
	b, _ := os.ReadFile("/proc/sys/kernel/random/boot_id") // absent: the same for ever
	return strings.TrimSpace(string(b))
})

// loadLease finds out until when the sandboxes of an earlier runner may live.
func (r *Runner) loadLease() error {
	r.leased, r.endLease = context.WithCancelCause(context.Background())
	r.leaseUntil = bootclock.Now() + r.cfg.Lease
	var rec leaseRecord
	if atomicfile.ReadJSON(filepath.Join(r.cfg.RunDir, leaseFile), &rec) == nil && rec.Boot == bootID() {
		r.leaseUntil = rec.Until
	}
	return r.loadEpoch()
}

// loadEpoch reads the last lease epoch that an earlier process kept.
func (r *Runner) loadEpoch() error {
	var rec epochRecord
	path := filepath.Join(r.cfg.DataDir, epochFile)
	if err := atomicfile.ReadJSON(path, &rec); ignoreAbsent(err) != nil {
		return core.Wrapf(err, core.DataLoss, core.CodeInternal, "the last lease epoch of this runner cannot be read; remove %s if no earlier process of the runner lives, and start it again", path)
	}
	r.lastEpoch, r.keptEpoch = rec.Epoch, rec.Epoch
	return nil
}

// LastEpoch is the last lease epoch that a process of this runner was given; 0: none.
func (r *Runner) LastEpoch() int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.lastEpoch
}

// KeepEpoch writes a lease epoch down. One that is not written down must not be used: the next process of the runner could be
// given the same.
func (r *Runner) KeepEpoch(epoch int64) error {
	r.mu.Lock()
	kept := epoch <= r.keptEpoch // a controller of an older version is deaf to what the runner names
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

// Attempt begins a message to the controller. When it was answered, and only then, answered says for how long from the beginning
// of the attempt the sandboxes may live; 0 stands for the runner's own time.
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

// whileLeased returns a context that ends with the lease, or with ctx; errFenced is its cause then.
func (r *Runner) whileLeased(ctx context.Context) (context.Context, context.CancelFunc) {
	r.mu.Lock()
	leased := r.leased
	r.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	if leased.Err() != nil { // at once, and not beside
		cancel(context.Cause(leased))
	}
	stop := context.AfterFunc(leased, func() { cancel(context.Cause(leased)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// guard ends the sandboxes when the lease does.
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

// Fence ends every sandbox at once, whatever is being done with it, and what is being uploaded, and returns when nothing of them is left.
// They are reported as dead for that reason, and no work is taken until the controller has answered again.
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
