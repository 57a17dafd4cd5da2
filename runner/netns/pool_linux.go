package netns

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"runtime"
	"sync"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
)

// Pool makes, keeps and recycles the network namespaces of one cluster on one host. It is safe for concurrent use.
// Only one pool of a cluster may live on a host at a time.
type Pool struct {
	cfg   Config
	names names
	host  *os.File // the namespace that the pool was made in; veth pairs of allow-all end there

	uplinks sync.Mutex   // one veth pair is set up at a time, so that two do not take the same addresses
	births  sync.RWMutex // held for reading while the host shows a namespace that the pool does not count yet

	mu      sync.Mutex // guards what follows; never held across a system call
	idle    []*space
	dirty   []*space // released, to be reset
	used    map[string]*Namespace
	busy    map[string]bool // being reset or deleted
	making  int             // being created
	closed  bool
	changed chan struct{} // closed, and replaced, at every change of the above
}

// NewPool makes an empty pool that belongs to the network namespace of the calling thread. It touches nothing on the
// host; Run fills it. It needs root.
func NewPool(cfg Config) (*Pool, error) {
	cfg = cfg.withDefaults()
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if os.Geteuid() != 0 {
		return nil, core.Errorf(core.PermissionDenied, core.CodeIncompatibleHost, "network namespaces need root; run as root, for example with sudo")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeIncompatibleHost, "/dev/net/tun is missing; load the kernel module with: modprobe tun")
	}
	host, err := os.Open("/proc/thread-self/ns/net")
	if err != nil {
		return nil, fmt.Errorf("open the host's network namespace: %w", err)
	}
	return &Pool{
		cfg: cfg, names: namesOf(cfg.ClusterID), host: host,
		used: map[string]*Namespace{}, busy: map[string]bool{}, changed: make(chan struct{}),
	}, nil
}

// Config returns the configuration in force, defaults filled in.
func (p *Pool) Config() Config { return p.cfg }

// Stats counts the namespaces of a pool.
type Stats struct {
	Idle  int // verified and ready
	Used  int // acquired or adopted
	Dirty int // released and waiting for their reset
	Busy  int // being made, reset or deleted
}

func (s Stats) total() int { return s.Idle + s.Used + s.Dirty + s.Busy }

// Stats returns the counts of this moment.
func (p *Pool) Stats() Stats {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.statsLocked()
}

func (p *Pool) statsLocked() Stats {
	return Stats{Idle: len(p.idle), Used: len(p.used), Dirty: len(p.dirty), Busy: len(p.busy) + p.making}
}

// notifyLocked wakes everyone who waits for a change.
func (p *Pool) notifyLocked() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// await blocks until met holds, called with the lock held, or ctx ends.
func (p *Pool) await(ctx context.Context, met func(Stats) bool) error {
	for {
		p.mu.Lock()
		ok, changed := met(p.statsLocked()), p.changed
		p.mu.Unlock()
		if ok {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Run keeps Config.Warm namespaces ready and resets released ones until ctx ends; it then returns nil. Its work is
// serialised in the kernel, so it does one thing at a time. A namespace that fails to be made is tried again after a
// pause.
func (p *Pool) Run(ctx context.Context) error {
	for ctx.Err() == nil {
		p.mu.Lock()
		job, changed := p.nextJobLocked(), p.changed
		p.mu.Unlock()
		var retry <-chan time.Time
		if job != nil {
			err := job(ctx)
			if err == nil || ctx.Err() != nil {
				continue
			}
			p.cfg.Log.WarnContext(ctx, "network namespace was not made ready", "err", err)
			retry = time.After(time.Second + rand.N(time.Second)) //nolint:gosec // G404: jitter, not a secret
			changed = nil
		}
		select {
		case <-changed:
		case <-retry:
		case <-ctx.Done():
		}
	}
	return nil
}

// nextJobLocked picks what Run does next, and counts it as begun.
func (p *Pool) nextJobLocked() func(context.Context) error {
	stats := p.statsLocked()
	switch {
	case p.closed:
		return nil
	case len(p.dirty) > 0:
		s := p.takeDirtyLocked()
		return func(ctx context.Context) error { return p.resetOrDelete(ctx, s, p.toIdle) }
	case stats.Idle+p.making < p.cfg.Warm && stats.total() < p.cfg.Max:
		p.making++
		return func(ctx context.Context) error { return p.create(ctx, p.toIdle) }
	}
	return nil
}

func (p *Pool) takeDirtyLocked() *space {
	s := p.dirty[0]
	p.dirty = p.dirty[1:]
	p.busy[s.name] = true
	return s
}

// toIdle and toUsed are where a space goes when it is ready; both are called with the lock held.
func (p *Pool) toIdle(s *space) { p.idle = append(p.idle, s) }

func (p *Pool) toUsed(out **Namespace) func(*space) {
	return func(s *space) {
		*out = newNamespace(p, s, s.bare())
		p.used[s.name] = *out
	}
}

// create makes a space, which was counted in making, and puts it away.
func (p *Pool) create(ctx context.Context, put func(*space)) error {
	p.births.RLock()
	defer p.births.RUnlock()
	s, err := createSpace(ctx, p.names, &p.cfg)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.making--
	if err == nil {
		put(s)
	}
	p.notifyLocked()
	return err
}

// resetOrDelete resets a space, which was counted in busy, and puts it away; if that fails the space is deleted.
// That it could not be verified is logged here, because nobody else would hear of it.
func (p *Pool) resetOrDelete(ctx context.Context, s *space, put func(*space)) error {
	err := s.reset(context.WithoutCancel(ctx)) // takes milliseconds; a space left half reset would have to be deleted
	if err != nil {
		p.cfg.Log.WarnContext(ctx, "released network namespace could not be verified and is deleted", "namespace", s.name, "err", err)
		return errors.Join(s.sever(), p.finishDelete(s))
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.busy, s.name)
	put(s)
	p.notifyLocked()
	return nil
}

// finishDelete deletes a space that is counted in busy.
func (p *Pool) finishDelete(s *space) error {
	err := s.remove()
	p.mu.Lock()
	defer p.mu.Unlock()
	delete(p.busy, s.name)
	p.notifyLocked()
	return err
}

// Acquire returns a quarantined namespace: tap down, every chain dropping, no identity. A warm namespace costs no
// system call; without one, Acquire makes it now (a few milliseconds). At Config.Max, it waits for a namespace that is
// being reset; if there is none, it fails with core.CodeCapacity. The caller gives it back with Release.
func (p *Pool) Acquire(ctx context.Context) (*Namespace, error) {
	for {
		if err := ctx.Err(); err != nil {
			return nil, context.Cause(ctx)
		}
		var ns *Namespace
		p.mu.Lock()
		stats, changed := p.statsLocked(), p.changed
		switch {
		case p.closed:
			p.mu.Unlock()
			return nil, core.Errorf(core.Unavailable, core.CodeCapacity, "the runner is stopping and takes no more sandboxes")
		case stats.Idle > 0:
			s := p.idle[0]
			p.idle = p.idle[1:]
			p.toUsed(&ns)(s)
			p.notifyLocked()
			p.mu.Unlock()
			return ns, nil
		case stats.total() < p.cfg.Max:
			p.making++
			p.mu.Unlock()
			err := p.create(ctx, p.toUsed(&ns))
			return ns, err
		case stats.Dirty > 0:
			s := p.takeDirtyLocked()
			p.mu.Unlock()
			if err := p.resetOrDelete(ctx, s, p.toUsed(&ns)); err != nil {
				return nil, err
			}
			if ns != nil {
				return ns, nil
			}
			continue // it was deleted, which made room
		case stats.Busy > 0:
			p.mu.Unlock()
			select {
			case <-changed:
			case <-ctx.Done():
			}
		default:
			p.mu.Unlock()
			return nil, core.Errorf(core.Exhausted, core.CodeCapacity, "all %d network namespaces of this runner are in use; terminate a workspace or raise the limit", p.cfg.Max)
		}
	}
}

// giveBack takes a namespace from its user. Its tap is down; what else it holds is removed by the reset.
func (p *Pool) giveBack(n *Namespace) error {
	p.mu.Lock()
	if p.used[n.space.name] != n {
		p.mu.Unlock()
		return nil
	}
	delete(p.used, n.space.name)
	closed := p.closed
	if closed {
		p.busy[n.space.name] = true
	} else {
		p.dirty = append(p.dirty, n.space)
	}
	p.notifyLocked()
	p.mu.Unlock()
	if closed {
		return errors.Join(n.space.sever(), p.finishDelete(n.space))
	}
	return nil
}

// closers bounds the namespaces that Close deletes at once; each waits for the kernel more than it works.
const closers = 8

// Close deletes every idle and every released namespace, after those that are being made or reset are done. What is
// still used stays as it is, so that a VMM can live on and be adopted by the next process. Cancel Run first.
func (p *Pool) Close(ctx context.Context) error {
	p.mu.Lock()
	p.closed = true
	p.notifyLocked()
	p.mu.Unlock()
	err := p.await(ctx, func(s Stats) bool { return s.Busy == 0 })
	p.mu.Lock()
	spaces := append(p.idle, p.dirty...)
	p.idle, p.dirty = nil, nil
	for _, s := range spaces {
		p.busy[s.name] = true
	}
	p.mu.Unlock()
	errs := make([]error, len(spaces))
	var work errgroup.Group
	work.SetLimit(closers)
	for i, s := range spaces {
		work.Go(func() error {
			errs[i] = p.finishDelete(s) // its tap is down, so there is nothing to sever
			return nil
		})
	}
	_ = work.Wait() // the errors are in errs, all of them
	return errors.Join(err, errors.Join(errs...))
}

// onHost runs fn in the host's network namespace.
func (p *Pool) onHost(fn func() error) error {
	defer runtime.KeepAlive(p.host)
	return inside(netns.NsHandle(p.host.Fd()), fn)
}
