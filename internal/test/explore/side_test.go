package explore

import (
	"context"
	"net/http"
	"runtime/debug"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/bootclock"
)

// side is a controller as its environment sees it. It can be stopped as SIGSTOP stops a process: no transaction, no call and no
// answer passes it then. Its steps are the transactions and the calls of runners by which it works on what the explorer asked for.
type side struct {
	mu      sync.Mutex // guards what follows
	stopped chan struct{}
	at      int           // the step before which it stops; 0: none
	seen    int           // steps since arm
	reached chan struct{} // closed when it stops there

	slept atomic.Int64 // how much further its clock is

	// fences says that its steps are the transactions by which it gives up runners, instead.
	fences bool
}

// asked marks the context of what the explorer asks a controller for.
type asked struct{}

// arm has the side stop before the n-th step from now on; with 0 it only counts. The channel is closed when it has stopped.
func (s *side) arm(n int) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.at, s.seen, s.reached = n, 0, make(chan struct{})
	return s.reached
}

// steps returns how many steps there were since arm.
func (s *side) steps() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.seen
}

func (s *side) stop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped == nil {
		s.stopped = make(chan struct{})
	}
}

func (s *side) goOn() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped != nil {
		close(s.stopped)
		s.stopped = nil
	}
	s.at = 0
}

func (s *side) isStopped() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.stopped != nil
}

// pass returns when the side goes on.
func (s *side) pass() {
	s.mu.Lock()
	stopped := s.stopped
	s.mu.Unlock()
	if stopped != nil {
		<-stopped
	}
}

// counts reports whether something is a step.
func (s *side) counts(ctx context.Context) bool {
	if !s.fences {
		return core.OperationIDOf(ctx) != "" || ctx.Value(asked{}) != nil
	}
	stack := string(debug.Stack()) // of a loop that nobody asks for anything, and that marks no context
	return strings.Contains(stack, "(*Fleet).Fence(") || strings.Contains(stack, "(*Fleet).loseAll(")
}

// step counts what is part of an operation, or of a request of the explorer, and passes.
func (s *side) step(ctx context.Context) {
	if s.counts(ctx) {
		s.mu.Lock()
		s.seen++
		if s.at != 0 && s.seen == s.at {
			if s.stopped == nil {
				s.stopped = make(chan struct{})
			}
			close(s.reached)
		}
		s.mu.Unlock()
	}
	s.pass()
}

// clock is the clock of leases of the side.
func (s *side) clock() time.Duration { return bootclock.Now() + time.Duration(s.slept.Load()) }

// store is the database as a side sees it.
type store struct {
	controller.Store
	side *side
}

// InTx implements controller.Store.
func (s store) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	s.side.step(ctx)
	err := s.Store.InTx(ctx, scope, fn)
	s.side.pass()
	return err
}

// runners is the way to the runner as a side sees it.
type runners struct {
	controller.Runners
	side *side
}

func called[T any](ctx context.Context, s *side, call func() (T, error)) (T, error) {
	s.step(ctx)
	out, err := call()
	s.pass()
	return out, err
}

// Template implements controller.Runners.
func (r runners) Template(ctx context.Context, endpoint string, t runnerapi.Template) (runnerapi.Checkpoint, error) {
	return called(ctx, r.side, func() (runnerapi.Checkpoint, error) { return r.Runners.Template(ctx, endpoint, t) })
}

// Fork implements controller.Runners.
func (r runners) Fork(ctx context.Context, endpoint string, f runnerapi.Fork) (runnerapi.ForkResult, error) {
	return called(ctx, r.side, func() (runnerapi.ForkResult, error) { return r.Runners.Fork(ctx, endpoint, f) })
}

// Capture implements controller.Runners.
func (r runners) Capture(ctx context.Context, endpoint string, sandbox core.SandboxID, c runnerapi.Capture) (runnerapi.Checkpoint, error) {
	return called(ctx, r.side, func() (runnerapi.Checkpoint, error) { return r.Runners.Capture(ctx, endpoint, sandbox, c) })
}

// DeleteSandbox implements controller.Runners.
func (r runners) DeleteSandbox(ctx context.Context, endpoint string, id core.SandboxID) error {
	_, err := called(ctx, r.side, func() (struct{}, error) { return struct{}{}, r.Runners.DeleteSandbox(ctx, endpoint, id) })
	return err
}

// DeleteCheckpoint implements controller.Runners.
func (r runners) DeleteCheckpoint(ctx context.Context, endpoint string, id core.CheckpointID) error {
	_, err := called(ctx, r.side, func() (struct{}, error) { return struct{}{}, r.Runners.DeleteCheckpoint(ctx, endpoint, id) })
	return err
}

// SetEgress implements controller.Runners.
func (r runners) SetEgress(ctx context.Context, endpoint string, sandbox core.SandboxID, rules runnerapi.EgressRules) error {
	_, err := called(ctx, r.side, func() (struct{}, error) { return struct{}{}, r.Runners.SetEgress(ctx, endpoint, sandbox, rules) })
	return err
}

// listener is what runners reach of a side. A side that is stopped answers nobody: who waits for it gives up at once, so that no schedule
// lasts as long as a timeout does.
func (s *side) listener(h http.Handler, silent, seals *atomic.Bool, hearing *sync.RWMutex) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if s.isStopped() || silent.Load() {
			panic(http.ErrAbortHandler)
		}
		hearing.RLock()
		defer hearing.RUnlock()
		if silent.Load() { // since then
			panic(http.ErrAbortHandler)
		}
		if seals.Load() && strings.Contains(r.URL.Path, "/seals") {
			r = r.WithContext(context.WithValue(r.Context(), asked{}, true))
		}
		h.ServeHTTP(w, r)
	})
}
