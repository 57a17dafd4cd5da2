package runner

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
)

// warmPool keeps shells of recently forked bases ready. The start of a VMM is most of the cost of a fork. A search forks the same base
// again and again, with pauses in between.
type warmPool struct {
	r       *Runner
	refresh chan struct{} // of size 1: look again

	mu     sync.Mutex // guards what follows
	closed bool
	ready  map[shape][]*shell
	used   map[shape]time.Time
}

func newWarmPool(r *Runner) *warmPool {
	return &warmPool{r: r, refresh: make(chan struct{}, 1), ready: make(map[shape][]*shell), used: make(map[shape]time.Time)}
}

// take returns a ready shell, or nil.
func (w *warmPool) take(sh shape) *shell {
	w.mu.Lock()
	defer w.mu.Unlock()
	for list := w.ready[sh]; len(list) > 0; list = w.ready[sh] {
		s := list[len(list)-1]
		w.ready[sh] = list[:len(list)-1]
		select {
		case <-s.machine.Done(): // somebody killed it; its remains are taken down by run
			w.ready[shape{}] = append(w.ready[shape{}], s)
		default:
			s.timings = nil // this time had passed before the fork was requested
			return s
		}
	}
	return nil
}

// want notes that a shape was forked just now.
func (w *warmPool) want(sh shape) {
	if w.r.cfg.Warm == 0 {
		return
	}
	w.mu.Lock()
	w.used[sh] = time.Now()
	w.mu.Unlock()
	select {
	case w.refresh <- struct{}{}:
	default:
	}
}

// run fills the pool and retires shells until ctx ends.
func (w *warmPool) run(ctx context.Context) {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-w.refresh:
		}
		w.retire(ctx, time.Now())
		for w.fill(ctx) {
		}
	}
}

// retire takes down dead shells, and shells of shapes that were not forked lately.
func (w *warmPool) retire(ctx context.Context, now time.Time) {
	w.mu.Lock()
	old := w.ready[shape{}]
	delete(w.ready, shape{})
	for sh, at := range w.used {
		if now.Sub(at) > w.r.cfg.WarmFor {
			old = append(old, w.ready[sh]...)
			delete(w.ready, sh)
			delete(w.used, sh)
		}
	}
	w.mu.Unlock()
	for _, s := range old {
		if err := w.r.dismantle(ctx, s); err != nil {
			w.r.cfg.Log.ErrorContext(ctx, "idle shell was not taken down", "shell_id", s.ID, "err", err)
		}
	}
}

// renew keeps the shape of a new base warm, and makes its first shell while the caller has the base in memory.
func (w *warmPool) renew(ctx context.Context, sh shape) {
	if w.r.cfg.Warm == 0 {
		return
	}
	w.mu.Lock()
	w.used[sh] = time.Now()
	w.mu.Unlock()
	if w.add(ctx, sh) {
		w.want(sh)
	}
}

// fill makes one shell of the most recently used shape that lacks some, and reports whether there may be more to do. If there is no room,
// it first takes down a shell of the least recently used shape. It does nothing while forks run, because they need the CPUs.
func (w *warmPool) fill(ctx context.Context) bool {
	if ctx.Err() != nil || len(w.r.starting) > 0 {
		return false // the end of the last fork calls want
	}
	w.mu.Lock()
	var best, oldest shape
	var newest, longestAgo time.Time
	total := 0
	for sh, used := range w.used {
		n := len(w.ready[sh])
		total += n
		if n < w.r.cfg.Warm && used.After(newest) {
			best, newest = sh, used
		}
		if n > 0 && (longestAgo.IsZero() || used.Before(longestAgo)) {
			oldest, longestAgo = sh, used
		}
	}
	full := total >= 2*w.r.cfg.Warm
	w.mu.Unlock()
	if newest.IsZero() || full && (!longestAgo.Before(newest) || !w.evict(ctx, oldest)) {
		return false
	}
	return w.add(ctx, best)
}

// evict takes down one idle shell of a shape, and reports whether it is gone.
func (w *warmPool) evict(ctx context.Context, sh shape) bool {
	w.mu.Lock()
	list := w.ready[sh]
	if len(list) == 0 {
		w.mu.Unlock()
		return false
	}
	s := list[len(list)-1]
	w.ready[sh] = list[:len(list)-1]
	w.mu.Unlock()
	err := w.r.dismantle(ctx, s)
	if err != nil {
		w.r.cfg.Log.ErrorContext(ctx, "idle shell was not taken down", "shell_id", s.ID, "err", err)
	}
	return err == nil
}

// makeRoom takes down one idle shell of any shape, for a fork on a host that is full of idle shells.
func (w *warmPool) makeRoom(ctx context.Context) bool {
	w.mu.Lock()
	var oldest shape
	var at time.Time
	found := false
	for sh, list := range w.ready {
		if used := w.used[sh]; len(list) > 0 && (!found || used.Before(at)) {
			oldest, at, found = sh, used, true
		}
	}
	w.mu.Unlock()
	return found && w.evict(ctx, oldest)
}

// add makes one shell of a shape.
func (w *warmPool) add(ctx context.Context, sh shape) bool {
	s, err := w.r.coldShell(ctx, sh)
	if err != nil {
		if core.CategoryOf(err) != core.Exhausted && ctx.Err() == nil { // a full host has no use for idle shells either
			w.r.cfg.Log.WarnContext(ctx, "shell was not made", "base_id", sh.base, "err", err)
		}
		w.mu.Lock()
		w.used[sh] = time.Time{} // not tried again before the next fork; retire takes down the existing shells
		w.mu.Unlock()
		return false
	}
	w.mu.Lock()
	closed := w.closed
	if !closed {
		w.ready[sh] = append(w.ready[sh], s)
	}
	w.mu.Unlock()
	if closed {
		if err := w.r.dismantle(context.WithoutCancel(ctx), s); err != nil {
			w.r.cfg.Log.ErrorContext(ctx, "shell was not taken down", "shell_id", s.ID, "err", err)
		}
	}
	return !closed
}

// purge takes down the idle shells that match.
func (w *warmPool) purge(ctx context.Context, of func(*shell) bool) {
	w.mu.Lock()
	var gone []*shell
	for sh, list := range w.ready {
		keep := list[:0]
		for _, s := range list {
			if of(s) {
				gone = append(gone, s)
			} else {
				keep = append(keep, s)
			}
		}
		w.ready[sh] = keep
	}
	w.mu.Unlock()
	for _, s := range gone {
		if err := w.r.dismantle(ctx, s); err != nil {
			w.r.cfg.Log.ErrorContext(ctx, "idle shell was not taken down", "shell_id", s.ID, "err", err)
		}
	}
}

// close takes down all shells.
func (w *warmPool) close(ctx context.Context) error {
	w.mu.Lock()
	w.closed = true
	var all []*shell
	for _, list := range w.ready {
		all = append(all, list...)
	}
	w.ready = make(map[shape][]*shell)
	w.mu.Unlock()
	var errs []error
	for _, s := range all {
		errs = append(errs, w.r.dismantle(ctx, s))
	}
	return errors.Join(errs...)
}

// shapeOf is the shape of the shells that can become a checkpoint.
func shapeOf(ckpt *checkpoints.Opened) (shape, error) {
	info, err := ckpt.Overlay.Stat()
	if err != nil {
		return shape{}, err
	}
	res := ckpt.Resources
	res.DiskGiB = 0
	return shape{base: ckpt.Base, image: ckpt.Image, root: ckpt.Root, resources: res, diskBytes: info.Size()}, nil
}

// takeShell returns a shell for the checkpoint: a warm one, or a new one.
func (r *Runner) takeShell(ctx context.Context, ckpt *checkpoints.Opened) (*shell, error) {
	sh, err := shapeOf(ckpt)
	if err != nil {
		return nil, err
	}
	if s := r.warm.take(sh); s != nil {
		return s, nil
	}
	s, err := r.newShell(ctx, sh, ckpt.Memory, nil)
	for err != nil && core.CategoryOf(err) == core.Exhausted && r.warm.makeRoom(ctx) {
		s, err = r.newShell(ctx, sh, ckpt.Memory, nil)
	}
	return s, err
}

func (r *Runner) coldShell(ctx context.Context, sh shape) (*shell, error) {
	base, err := r.bases.Open(sh.base)
	if err != nil {
		return nil, err
	}
	defer base.Close()
	return r.newShell(ctx, sh, base, nil)
}

// forked is called when a fork of a checkpoint has ended.
func (r *Runner) forked(ckpt *checkpoints.Opened, n int) {
	sh, err := shapeOf(ckpt)
	if err == nil {
		r.warm.want(sh)
	}
	r.rebases.Consider(ckpt, n, func(base core.BaseID) {
		if err != nil {
			return
		}
		// Loading a large base takes as long as the injection of the delta did. The next fork must not wait for it.
		rebased := sh
		rebased.base = base
		r.warm.renew(r.runCtx, rebased)
	})
}
