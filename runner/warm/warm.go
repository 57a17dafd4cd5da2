// Package warm keeps shells of recently forked bases ready. The start of a VMM is most of the cost of a fork. A search forks the same base
// again and again, with pauses in between. The package does not know what a shell is: its owner makes shells and takes them down.
package warm

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Config says what a pool keeps and how. A shape is what all shells have in common that can take each other's place. All functions are required.
type Config[Shape comparable, Shell any] struct {
	Keep int           // shells of each shape; 0: none
	For  time.Duration // how long after the last fork of a shape

	Make     func(ctx context.Context, shape Shape) (Shell, error)
	TakeDown func(ctx context.Context, s Shell) error
	Dead     func(s Shell) bool // somebody has killed it
	Busy     func() bool        // forks run and need the CPUs
	Log      *slog.Logger
}

// Pool keeps shells. It is safe for concurrent use.
type Pool[Shape comparable, Shell any] struct {
	cfg     Config[Shape, Shell]
	refresh chan struct{} // of size 1: look again

	mu     sync.Mutex // guards what follows
	closed bool
	ready  map[Shape][]Shell
	used   map[Shape]time.Time
	dead   []Shell // their remains are taken down by Run
}

// New returns a pool without shells.
func New[Shape comparable, Shell any](cfg Config[Shape, Shell]) *Pool[Shape, Shell] {
	return &Pool[Shape, Shell]{cfg: cfg, refresh: make(chan struct{}, 1), ready: make(map[Shape][]Shell), used: make(map[Shape]time.Time)}
}

// Take takes a ready shell out of the pool. ok is false if there is none.
func (p *Pool[Shape, Shell]) Take(shape Shape) (s Shell, ok bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for list := p.ready[shape]; len(list) > 0; list = p.ready[shape] {
		s := list[len(list)-1]
		p.ready[shape] = list[:len(list)-1]
		if !p.cfg.Dead(s) {
			return s, true
		}
		p.dead = append(p.dead, s)
	}
	return s, false
}

// Want notes that a shape was forked just now.
func (p *Pool[Shape, Shell]) Want(shape Shape) {
	if p.cfg.Keep == 0 {
		return
	}
	p.mu.Lock()
	p.used[shape] = time.Now()
	p.mu.Unlock()
	select {
	case p.refresh <- struct{}{}:
	default:
	}
}

// Run fills the pool and retires shells until ctx ends.
func (p *Pool[Shape, Shell]) Run(ctx context.Context) {
	tick := time.NewTicker(5 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		case <-p.refresh:
		}
		p.retire(ctx, time.Now())
		for p.fill(ctx) {
		}
	}
}

// retire takes down dead shells, and shells of shapes that were not forked lately.
func (p *Pool[Shape, Shell]) retire(ctx context.Context, now time.Time) {
	p.mu.Lock()
	old := p.dead
	p.dead = nil
	for shape, at := range p.used {
		if now.Sub(at) > p.cfg.For {
			old = append(old, p.ready[shape]...)
			delete(p.ready, shape)
			delete(p.used, shape)
		}
	}
	p.mu.Unlock()
	for _, s := range old {
		p.takeDown(ctx, s)
	}
}

func (p *Pool[Shape, Shell]) takeDown(ctx context.Context, s Shell) bool {
	err := p.cfg.TakeDown(ctx, s)
	if err != nil {
		p.cfg.Log.ErrorContext(ctx, "idle shell was not taken down", "err", err)
	}
	return err == nil
}

// Renew keeps the shape of a new base warm, and makes its first shell while the caller has the base in memory.
func (p *Pool[Shape, Shell]) Renew(ctx context.Context, shape Shape) {
	if p.cfg.Keep == 0 {
		return
	}
	p.mu.Lock()
	p.used[shape] = time.Now()
	p.mu.Unlock()
	if p.add(ctx, shape) {
		p.Want(shape)
	}
}

// fill makes one shell of the most recently used shape that lacks some, and reports whether there may be more to do. If there is no room,
// it first takes down a shell of the least recently used shape. It does nothing while forks run, because they need the CPUs.
func (p *Pool[Shape, Shell]) fill(ctx context.Context) bool {
	if ctx.Err() != nil || p.cfg.Busy() {
		return false // the end of the last fork calls Want
	}
	p.mu.Lock()
	var best, oldest Shape
	var newest, longestAgo time.Time
	total := 0
	for shape, used := range p.used {
		n := len(p.ready[shape])
		total += n
		if n < p.cfg.Keep && used.After(newest) {
			best, newest = shape, used
		}
		if n > 0 && (longestAgo.IsZero() || used.Before(longestAgo)) {
			oldest, longestAgo = shape, used
		}
	}
	full := total >= 2*p.cfg.Keep
	p.mu.Unlock()
	if newest.IsZero() || full && (!longestAgo.Before(newest) || !p.evict(ctx, oldest)) {
		return false
	}
	return p.add(ctx, best)
}

// evict takes down one shell of a shape, and reports whether it is gone.
func (p *Pool[Shape, Shell]) evict(ctx context.Context, shape Shape) bool {
	p.mu.Lock()
	list := p.ready[shape]
	if len(list) == 0 {
		p.mu.Unlock()
		return false
	}
	s := list[len(list)-1]
	p.ready[shape] = list[:len(list)-1]
	p.mu.Unlock()
	return p.takeDown(ctx, s)
}

// MakeRoom takes down one shell of any shape, for a fork on a host that is full of idle shells. Dead ones go first.
func (p *Pool[Shape, Shell]) MakeRoom(ctx context.Context) bool {
	p.mu.Lock()
	if n := len(p.dead); n > 0 {
		s := p.dead[n-1]
		p.dead = p.dead[:n-1]
		p.mu.Unlock()
		return p.takeDown(ctx, s)
	}
	var oldest Shape
	var at time.Time
	found := false
	for shape, list := range p.ready {
		if used := p.used[shape]; len(list) > 0 && (!found || used.Before(at)) {
			oldest, at, found = shape, used, true
		}
	}
	p.mu.Unlock()
	return found && p.evict(ctx, oldest)
}

// add makes one shell of a shape.
func (p *Pool[Shape, Shell]) add(ctx context.Context, shape Shape) bool {
	s, err := p.cfg.Make(ctx, shape)
	if err != nil {
		if core.CategoryOf(err) != core.Exhausted && ctx.Err() == nil { // a full host has no use for idle shells either
			p.cfg.Log.WarnContext(ctx, "shell was not made", "err", err)
		}
		p.mu.Lock()
		p.used[shape] = time.Time{} // not tried again before the next fork; retire takes down the existing shells
		p.mu.Unlock()
		return false
	}
	p.mu.Lock()
	closed := p.closed
	if !closed {
		p.ready[shape] = append(p.ready[shape], s)
	}
	p.mu.Unlock()
	if closed {
		p.takeDown(context.WithoutCancel(ctx), s)
	}
	return !closed
}

// Purge takes down the shells that match, and dead ones.
func (p *Pool[Shape, Shell]) Purge(ctx context.Context, of func(Shell) bool) {
	p.mu.Lock()
	var gone []Shell
	for shape, list := range p.ready {
		keep := list[:0]
		for _, s := range list {
			if of(s) {
				gone = append(gone, s)
			} else {
				keep = append(keep, s)
			}
		}
		p.ready[shape] = keep
	}
	gone = append(gone, p.dead...)
	p.dead = nil
	p.mu.Unlock()
	for _, s := range gone {
		p.takeDown(ctx, s)
	}
}

// Close takes down all shells. None is kept from then on.
func (p *Pool[Shape, Shell]) Close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	all := p.dead
	for _, list := range p.ready {
		all = append(all, list...)
	}
	p.ready, p.dead = make(map[Shape][]Shell), nil
	p.mu.Unlock()
	var errs []error
	for _, s := range all {
		errs = append(errs, p.cfg.TakeDown(ctx, s))
	}
	return errors.Join(errs...)
}

// Ready is how many shells of a shape are ready.
func (p *Pool[Shape, Shell]) Ready(of func(Shape) bool) int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for shape, list := range p.ready {
		if of(shape) {
			n += len(list)
		}
	}
	return n
}
