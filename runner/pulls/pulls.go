// Package pulls keeps the pulls of images that controllers have asked a runner for. It fetches and unpacks nothing itself. A request
// that is repeated says how far its pull is, and a pull that nobody asks about ends. So a controller that has died, or a build that was
// cancelled, leaves no work behind, and a request may be repeated at any time.
package pulls

import (
	"context"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Parallel is how many pulls run at the same time.
const Parallel = 2

const (
	maxPulls = 32 // that run, wait, or have ended a moment ago
	patience = 30 * time.Second
)

// Work pulls one image. It calls report, one call at a time, when something has changed.
type Work func(ctx context.Context, in runnerapi.Pull, report func(runnerapi.PullState)) (runnerapi.PullState, error)

// Pulls are the pulls of a runner. They are safe for concurrent use. Nil has none.
type Pulls struct {
	work     Work
	patience time.Duration
	ctx      context.Context //nolint:containedctx // of all pulls; no request waits for one
	cancel   context.CancelFunc
	places   chan struct{}
	running  sync.WaitGroup

	mu   sync.Mutex // guards what follows, and the pulls in it
	byID map[core.OperationID]*pull
}

type pull struct {
	in     runnerapi.Pull
	state  runnerapi.PullState
	err    error
	cancel context.CancelFunc
	asked  *time.Timer
}

// New begins with no pulls.
func New(work Work) *Pulls {
	p := &Pulls{work: work, patience: patience, places: make(chan struct{}, Parallel), byID: map[core.OperationID]*pull{}}
	p.ctx, p.cancel = context.WithCancel(context.Background())
	return p
}

// Close ends all pulls.
func (p *Pulls) Close() {
	p.mu.Lock()
	p.cancel() // under the lock: none begins afterwards
	p.mu.Unlock()
	p.running.Wait()
}

// Pull begins a pull, or says how far it is. The error of a pull that failed is that of each request, until nobody asks for a while.
func (p *Pulls) Pull(id core.OperationID, in runnerapi.Pull) (runnerapi.PullState, error) {
	if p == nil {
		return runnerapi.PullState{}, core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "this runner pulls no images")
	}
	if _, err := core.ParseID[core.OperationID](string(id)); err != nil {
		return runnerapi.PullState{}, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if had, ok := p.byID[id]; ok {
		had.asked.Reset(p.patience)
		return had.state, had.err
	}
	if p.ctx.Err() != nil {
		return runnerapi.PullState{}, core.Errorf(core.Unavailable, core.CodeRunnerUnreachable, "the runner is stopping")
	}
	if len(p.byID) >= maxPulls {
		return runnerapi.PullState{}, core.Errorf(core.Exhausted, core.CodeCapacity, "the runner has %d pulls of images; repeat the request later", maxPulls)
	}
	ctx, cancel := context.WithCancel(p.ctx)
	one := &pull{in: in, state: runnerapi.PullState{Stage: runnerapi.PullWaiting}, cancel: cancel}
	one.asked = time.AfterFunc(p.patience, func() { p.forget(id, one) })
	p.byID[id] = one
	p.running.Go(func() {
		defer cancel()
		p.run(ctx, one)
	})
	return one.state, nil
}

// forget ends a pull that nobody has asked about.
func (p *Pulls) forget(id core.OperationID, one *pull) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.byID[id] == one {
		delete(p.byID, id)
	}
	one.cancel()
}

func (p *Pulls) run(ctx context.Context, one *pull) {
	select {
	case p.places <- struct{}{}:
		defer func() { <-p.places }()
	case <-ctx.Done():
		return
	}
	state, err := p.work(ctx, one.in, func(s runnerapi.PullState) {
		p.mu.Lock()
		defer p.mu.Unlock()
		one.state = s
	})
	p.mu.Lock()
	defer p.mu.Unlock()
	if one.err = err; err == nil {
		one.state = state
		one.state.Done = true
	}
}
