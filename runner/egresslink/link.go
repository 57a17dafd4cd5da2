package egresslink

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/runner/egress"
)

// Config configures a Link. Fields without a note are required.
type Config struct {
	Process *egress.Process // nil: there is none, and no traffic leaves sandboxes under deny-all
	Gateway netip.Addr      // of every guest; the zero value: there is no network
	Log     *slog.Logger
	Life    context.Context // of the runner

	// Exists reports whether the runner has a sandbox. The process serves no others.
	Exists func(core.SandboxID) bool
	// Changed is called when another process has replaced the last one: controllers encrypt grants for its key.
	Changed func()
	// Cut is called when a sandbox is cut off because another program has changed its network rules.
	Cut func()
}

// Link is the connection to the egress process. It is safe for concurrent use.
type Link struct {
	cfg Config

	mu     sync.Mutex     // guards what follows
	client *egress.Client // nil: no process runs at this moment
	key    []byte         // the key of the process; controllers encrypt grants for it
	news   chan struct{}  // closed when another client replaces client
	given  map[*Sandbox]bool

	ended, hung atomic.Int64 // numbers of processes that ended by themselves, and that were killed because they hung

	patience time.Duration // how long the process may take to accept rules; the caller may give up earlier
}

// New returns a link without a process. Run starts one.
func New(cfg Config) *Link {
	return &Link{cfg: cfg, news: make(chan struct{}), given: make(map[*Sandbox]bool), patience: callTime}
}

// callTime is longer than the egress client's own bound for a call, because the client's error says more.
const callTime = 20 * time.Second

// pauses are the pauses before an attempt is repeated.
var pauses = sidecar.Backoff{First: firstPause, Last: lastPause}

const (
	firstPause = 20 * time.Millisecond
	lastPause  = time.Second
)

// set replaces the client in use and the key of its process; nil: there is none.
func (l *Link) set(c *egress.Client, key []byte) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.client, l.key = c, key
	close(l.news)
	l.news = make(chan struct{})
	l.cfg.Changed()
}

// Reach returns the key that controllers encrypt grants for, and the address of base URLs for guests. Both are empty while no process runs.
func (l *Link) Reach() (key []byte, url string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.client == nil || !l.cfg.Gateway.IsValid() {
		return nil, ""
	}
	return l.key, proxyURL(l.cfg.Gateway)
}

func (l *Link) current() (*egress.Client, <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.client, l.news
}

// sandboxes are the sandboxes that the link was given, in no order.
func (l *Link) sandboxes() []*Sandbox {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make([]*Sandbox, 0, len(l.given))
	for s := range l.given {
		out = append(out, s)
	}
	return out
}

func (l *Link) give(s *Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.given[s] = true
}

func (l *Link) takeBack(s *Sandbox) {
	l.mu.Lock()
	defer l.mu.Unlock()
	delete(l.given, s)
}

// await waits for a process.
func (l *Link) await(ctx context.Context) (*egress.Client, error) {
	for {
		c, news := l.current()
		if c != nil {
			return c, nil
		}
		select {
		case <-news:
		case <-ctx.Done():
			return nil, errors.Join(egress.ErrGone, context.Cause(ctx))
		}
	}
}

// start makes sure that a process runs.
func (l *Link) start(ctx context.Context) error {
	c, hello, err := egress.Ensure(ctx, *l.cfg.Process)
	if err != nil {
		return err
	}
	l.set(c, hello.Key)
	l.cfg.Log.InfoContext(ctx, "egress process is there", "pid", hello.PID, "instance", hello.Instance)
	return nil
}

// Run keeps a process running, with all sandboxes, until ctx ends.
func (l *Link) Run(ctx context.Context) {
	if l.cfg.Process == nil {
		return
	}
	sidecar.Supervisor[*egress.Client]{
		Name: "egress process", Lost: "no traffic leaves the sandboxes", Log: l.cfg.Log,
		Find: l.find, Start: l.start, Attend: l.attend, Ended: l.processEnded,
		Starts: pauses, Attends: pauses,
	}.Run(ctx)
}

// find says whether a process runs. One is always needed. There is no news of its absence that would make another attempt succeed.
func (l *Link) find() (*egress.Client, sidecar.State, <-chan struct{}) {
	c, _ := l.current()
	if c == nil {
		return nil, sidecar.Needed, nil
	}
	return c, sidecar.Running, nil
}

func (l *Link) processEnded(ctx context.Context, _ *egress.Client, err error, hung bool) (alive bool) {
	l.set(nil, nil)
	if hung {
		l.hung.Add(1)
	} else {
		l.ended.Add(1)
	}
	l.cfg.Log.ErrorContext(ctx, "the egress process has ended; no traffic leaves the sandboxes until another process serves them", "err", err)
	return false
}

// attend offers the sandboxes to a process and waits until it ends, or ctx does.
func (l *Link) attend(ctx context.Context, c *egress.Client) error {
	offering, stop := context.WithCancel(ctx)
	var offers sync.WaitGroup
	defer offers.Wait()
	defer stop()
	offers.Go(func() {
		sidecar.Offer(offering, pauses, nil, func(ctx context.Context) error { return l.reconcile(ctx, c) }, func(pause time.Duration, err error) {
			l.cfg.Log.WarnContext(ctx, "the egress process has not accepted every sandbox; they are offered again", "again_ms", core.Milliseconds(pause), "err", err)
		})
		for pace.Pause(offering, lessPause) == nil {
			l.restore(offering, c)
		}
	})
	return c.Attend(ctx)
}

// reconcile makes a process serve exactly the sandboxes that it should, by their newest rules.
func (l *Link) reconcile(ctx context.Context, c *egress.Client) error {
	list, err := c.List(ctx)
	if err != nil {
		return err
	}
	served := make(map[core.SandboxID]egressapi.Served, len(list))
	var errs []error
	for _, s := range list {
		served[s.ID] = s
		if !l.cfg.Exists(s.ID) {
			errs = append(errs, c.Remove(ctx, s.ID))
		}
	}
	for _, s := range l.sandboxes() {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		was, there := served[s.id]
		if err := s.offer(ctx, c, was, there); err != nil {
			errs = append(errs, fmt.Errorf("sandbox %s: %w", s.id, err))
		}
	}
	return errors.Join(errs...)
}

// Stop ends the egress process, which no longer serves any sandbox. It also ends the process of an
// earlier runner, if this runner has not connected to it yet.
func (l *Link) Stop(ctx context.Context) error {
	if l.cfg.Process == nil {
		return nil
	}
	c, _ := l.current()
	if c == nil {
		c = egress.NewClient(egress.SocketPath(l.cfg.Process.Dir))
	}
	if err := ignoreGone(c.Stop(ctx)); err != nil {
		return fmt.Errorf("stop the egress process: %w", err)
	}
	return nil
}

func ignoreGone(err error) error {
	if errors.Is(err, egress.ErrGone) {
		return nil
	}
	return err
}

// Flows acknowledges records of flows up to a number and waits for more. Records that were not acknowledged are returned again.
func (l *Link) Flows(ctx context.Context, after int64) (flows []core.Flow, last int64, err error) {
	for pause := firstPause; ctx.Err() == nil; pause = min(2*pause, lastPause) {
		c, err := l.await(ctx)
		if err != nil {
			break
		}
		batch, err := c.Flows(ctx, after)
		if err == nil {
			return batch.Flows, batch.Last, nil
		}
		if !errors.Is(err, egress.ErrGone) {
			return nil, 0, err
		}
		_ = pace.Pause(ctx, pause) // Run notices it too
	}
	return nil, 0, context.Cause(ctx)
}
