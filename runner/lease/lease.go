// Package lease keeps the time that a runner's sandboxes may live.
//
// A runner's sandboxes live on a lease. After a time without an answer of the controller, the runner ends them. This is before the controller
// gives them up and may start others in their place (DECISIONS 14). A clock measures the time that no change of the host's time affects and that
// continues while the host sleeps. The time begins with the last attempt that was answered, so the time that the answer took counts as silence.
package lease

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
	"github.com/coppice-dev/coppice/internal/bootclock"
)

// file keeps the end of the lease for a successor, because the lease also runs while no runner does.
const file = "lease.json"

type record struct {
	Boot  string        `json:"boot"`     // boot id of the host's kernel: the clock starts again with each boot
	Until time.Duration `json:"until_ns"` // since then
}

// epochFile keeps the last lease epoch, in the data directory: a database that has failed over may not know it.
const epochFile = "epoch.json"

type epochRecord struct {
	Epoch int64 `json:"lease_epoch"`
}

// tick is the time between two checks of the lease.
const tick = 200 * time.Millisecond

// ErrExpired is the reason of the end of sandboxes whose lease has ended. ErrFenced is the error of work that needs a lease.
var (
	ErrExpired = core.Errorf(core.Unavailable, core.CodeRunnerLost, "its runner had no word from the controller for longer than its lease allows")
	ErrFenced  = core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "this runner got no answer from its controller for too long and takes no work until it gets one")
)

// Config says where a lease is kept. All fields are required.
type Config struct {
	DataDir string        // of the epoch
	RunDir  string        // of the end of the lease
	Default time.Duration // how long a lease lasts, unless the controller says so
}

// Lease is the lease of one runner.
type Lease struct {
	cfg Config

	mu        sync.Mutex    // guards what follows
	until     time.Duration // by bootclock
	lastEpoch int64
	keptEpoch int64           // that the disk has
	fenced    bool            // the lease has ended: the runner takes no work
	held      context.Context //nolint:containedctx // ends with the lease
	end       context.CancelCauseFunc
}

// Open reads how long the sandboxes of an earlier runner may live, and the last epoch that it wrote.
func Open(cfg Config) (*Lease, error) {
	l := &Lease{cfg: cfg, until: bootclock.Now() + cfg.Default}
	l.held, l.end = context.WithCancelCause(context.Background())
	var rec record
	if atomicfile.ReadJSON(filepath.Join(cfg.RunDir, file), &rec) == nil && rec.Boot == bootclock.BootID() {
		l.until = rec.Until
	}
	var epoch epochRecord
	path := filepath.Join(cfg.DataDir, epochFile)
	if err := atomicfile.ReadJSON(path, &epoch); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, core.Wrapf(err, core.DataLoss, core.CodeInternal, "the last lease epoch of this runner cannot be read; remove %s if no earlier process of the runner lives, and start it again", path)
	}
	l.lastEpoch, l.keptEpoch = epoch.Epoch, epoch.Epoch
	return l, nil
}

// LastEpoch is the last lease epoch that a process of this runner got; 0: none.
func (l *Lease) LastEpoch() int64 {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.lastEpoch
}

// KeepEpoch writes a lease epoch to disk. An epoch that is not on disk must not be used: the next process of the runner could get
// the same one.
func (l *Lease) KeepEpoch(epoch int64) error {
	l.mu.Lock()
	kept := epoch <= l.keptEpoch // a controller of an older version ignores the epoch that the runner names
	l.lastEpoch = max(l.lastEpoch, epoch)
	l.mu.Unlock()
	if kept {
		return nil
	}
	if err := atomicfile.WriteJSON(filepath.Join(l.cfg.DataDir, epochFile), epochRecord{epoch}, 0o600); err != nil {
		return fmt.Errorf("keep lease epoch %d: %w", epoch, err)
	}
	l.mu.Lock()
	l.keptEpoch = epoch
	l.mu.Unlock()
	return nil
}

// Expired reports whether the lease has ended.
func (l *Lease) Expired() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return bootclock.Now() > l.until
}

// Fenced reports whether the runner must take no work.
func (l *Lease) Fenced() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.fenced
}

// End ends the lease: the runner takes no work until the controller has answered again.
func (l *Lease) End() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.fenced = true
	l.end(ErrFenced)
}

// Attempt begins a message to the controller. Call answered only if the controller answers. It sets how long, from the beginning of the
// attempt, the sandboxes may live; 0 means the runner's own time.
func (l *Lease) Attempt() (answered func(lease time.Duration) error) {
	began := bootclock.Now()
	return func(lease time.Duration) error {
		if lease <= 0 {
			lease = l.cfg.Default
		}
		l.mu.Lock()
		l.until, l.fenced = began+lease, false
		if l.held.Err() != nil {
			l.held, l.end = context.WithCancelCause(context.Background())
		}
		l.mu.Unlock()
		if err := atomicfile.ReplaceJSON(filepath.Join(l.cfg.RunDir, file), record{bootclock.BootID(), began + lease}); err != nil {
			return fmt.Errorf("keep the lease: %w", err)
		}
		return nil
	}
}

// While returns a context that ends with the lease, or with ctx; ErrFenced is its cause then.
func (l *Lease) While(ctx context.Context) (context.Context, context.CancelFunc) {
	l.mu.Lock()
	held := l.held
	l.mu.Unlock()
	ctx, cancel := context.WithCancelCause(ctx)
	if held.Err() != nil { // at once, not in another goroutine
		cancel(context.Cause(held))
	}
	stop := context.AfterFunc(held, func() { cancel(context.Cause(held)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// Guard calls fence when the lease ends, until ctx does.
func (l *Lease) Guard(ctx context.Context, fence func(context.Context)) {
	ticks := time.NewTicker(tick)
	defer ticks.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		l.mu.Lock()
		due := bootclock.Now() > l.until && !l.fenced
		l.mu.Unlock()
		if due {
			fence(ctx)
		}
	}
}
