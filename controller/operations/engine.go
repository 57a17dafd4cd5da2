package operations

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"runtime/debug"
	"sync"
	"time"

	"go.opentelemetry.io/otel/trace"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/bootclock"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

const (
	identityAttempts = 8
	releaseTime      = 3 * time.Second // of the transaction that gives up leases at the end
)

// Where a controller may be killed in the life of a request.
var (
	beforeAdmission = failpoint.New("controller.before_admission")
	inAdmission     = failpoint.New("controller.in_admission")    // the rows are inserted, the transaction is open
	afterAdmission  = failpoint.New("controller.after_admission") // it is committed, the runner has not been called
	beforeEnd       = failpoint.New("controller.before_end")      // the runner has done its part, the rows do not say so
	afterEnd        = failpoint.New("controller.after_end")       // the end is committed, nobody has been told
)

// errStopping ends the operations of an engine that stops; another one, or the next start, resumes them.
var errStopping = errors.New("the controller is stopping")

// Config says how an engine works.
type Config[T Tx, R any] struct {
	Lease    time.Duration   // how long the operations of a crashed controller wait for another one
	Clock    bootclock.Clock // of leases
	Interval time.Duration   // of the loop that renews leases and claims operations

	QueueWait time.Duration // how long a request waits for room on a runner; negative: not at all
	QueueMost int           // how many requests may wait for that

	// Read returns the Work of an operation from its row.
	Read func(op Operation) (Work[T, R], error)
	// Result returns the objects of an operation that succeeded, as they are now.
	Result func(ctx context.Context, tx T, op Operation) (R, error)
	// Whole refuses an answer to a repeated request if an object of it no longer exists.
	Whole func(Answer[R]) error
	// Cancelable says whether operations of a kind can be canceled: that their TakeBack changes nothing that was there before.
	Cancelable func(Kind) bool
	// Interruptible says whether a canceled operation can be interrupted at the step that it has come to. The rows of Filter.CanceledOf are such.
	Interruptible func(op Operation) bool
	// Ended is called for each operation that has ended here.
	Ended func(op Operation, result R)
	// Hint is called when an operation has ended, here or elsewhere.
	Hint func()

	Log *slog.Logger
}

// Engine runs operations. Make it with New; operations go on only while Run does.
type Engine[T Tx, R any] struct {
	cfg   Config[T, R]
	store Store[T]
	owner string // the owner of leases: this process; never reused
	queue queue

	runCtx context.Context // the lifetime of operations, which outlives every request
	stop   context.CancelCauseFunc
	tasks  sync.WaitGroup
	wake   chan struct{}         // size 1: look for operations to claim or to cancel
	ended  chan core.OperationID // to be announced to other controllers

	// mu guards the fields below.
	mu       sync.Mutex
	closing  bool
	running  map[core.OperationID]*Task[T, R]
	starting map[core.OperationID]bool            // being inserted here
	waiters  map[core.OperationID][]chan struct{} // for operations that others run
}

// New makes an engine. It starts nothing.
func New[T Tx, R any](cfg Config[T, R], store Store[T]) *Engine[T, R] {
	ctx, stop := context.WithCancelCause(context.Background())
	host, err := os.Hostname()
	if err != nil {
		host = "unknown"
	}
	return &Engine[T, R]{
		cfg: cfg, store: store, owner: fmt.Sprintf("%s/%s", host, core.NewID[core.OperationID]()),
		runCtx: ctx, stop: stop, wake: make(chan struct{}, 1), ended: make(chan core.OperationID, 1024),
		running: map[core.OperationID]*Task[T, R]{}, starting: map[core.OperationID]bool{}, waiters: map[core.OperationID][]chan struct{}{},
	}
}

// TakeOver lets the leases of all other controllers run out now. Call it only if all of them have ended.
func (e *Engine[T, R]) TakeOver(ctx context.Context) error {
	return e.store.InTx(ctx, model.System(), func(tx T) error { return tx.ReleaseOthers(ctx, e.owner) })
}

// Run renews leases, claims the operations of controllers that are gone, and announces the ends of operations, until ctx ends.
func (e *Engine[T, R]) Run(ctx context.Context) {
	var loops errgroup.Group
	for _, loop := range []func(context.Context){e.leaseLoop, e.notifyLoop} {
		loops.Go(func() error {
			loop(ctx)
			return nil
		})
	}
	_ = loops.Wait() // none of them fails
}

// Stop refuses new operations. It waits for those that run, at most for the grace time. Then it cancels the others, and waits until
// nothing works on them. Run must go on until Stop returns.
func (e *Engine[T, R]) Stop(grace time.Duration) {
	e.mu.Lock()
	e.closing = true
	e.mu.Unlock()
	done := make(chan struct{})
	go func() {
		e.tasks.Wait()
		close(done)
	}()
	over := time.NewTimer(grace)
	defer over.Stop()
	select {
	case <-done:
	case <-over.C:
	}
	e.stop(errStopping)
	<-done
}

// Release gives up the leases of a stopped engine, so that others need not wait until they run out.
func (e *Engine[T, R]) Release(ctx context.Context) {
	release, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTime)
	defer cancel()
	if err := e.store.InTx(release, model.System(), func(tx T) error { return tx.ReleaseOperations(release, e.owner) }); err != nil {
		e.cfg.Log.WarnContext(ctx, "operation leases were not given up", "err", err)
	}
}

// Running is how many operations this engine works on.
func (e *Engine[T, R]) Running() int {
	e.mu.Lock()
	defer e.mu.Unlock()
	return len(e.running)
}

// Go runs work that is no operation. Stop waits for it and cancels it, as it does for operations. Go returns false, and runs nothing, if the
// engine stops.
func (e *Engine[T, R]) Go(work func(ctx context.Context)) bool {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return false
	}
	e.tasks.Go(func() { work(e.runCtx) })
	return true
}

// Begin inserts an operation with the rows that admit makes, in one transaction, and starts it. Only the values of the context are used:
// if the client hangs up now, this changes nothing. For a request that was admitted before, Begin inserts nothing: the task then stands for
// the operation that the earlier request began.
func (e *Engine[T, R]) Begin(ctx context.Context, op Operation, admit Admission[T, R]) (*Task[T, R], error) {
	if err := e.reserve(); err != nil {
		return nil, err
	}
	started := false
	defer func() {
		if !started {
			e.tasks.Done()
		}
	}()
	op.LeaseOwner, op.RequestID = e.owner, core.RequestIDOf(ctx)
	t := &Task[T, R]{
		e: e, began: time.Now(), request: trace.SpanFromContext(ctx), watch: core.NewStopwatch(), done: make(chan struct{}), stalled: make(chan struct{}),
	}
	ctx = context.WithoutCancel(ctx)
	defer e.started(t)
	if err := beforeAdmission.Hit(ctx); err != nil {
		return nil, err
	}
	var err error
	for attempt := range identityAttempts {
		err = e.store.InTx(ctx, scopeOf(op.ProjectID), func(tx T) error { return e.insert(ctx, tx, t, op, admit, attempt) })
		if !errors.Is(err, ErrIdentityTaken) {
			break
		}
	}
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		return e.repeatTask(op.ProjectID, again), nil
	}
	if err != nil {
		return nil, err
	}
	if err := afterAdmission.Hit(ctx); err != nil {
		return nil, err
	}
	t.watch.Lap("admit")
	started = true
	e.start(t)
	return t, nil
}

// insert is the transaction of an admission.
func (e *Engine[T, R]) insert(ctx context.Context, tx T, t *Task[T, R], op Operation, admit Admission[T, R], attempt int) error {
	op.ID = core.NewID[core.OperationID]()
	if err := request.Bind(ctx, tx, op.ProjectID, string(op.ID)); err != nil {
		return err
	}
	work, err := admit(ctx, tx, &op, attempt)
	if err != nil {
		return err
	}
	if op.Input, err = json.Marshal(work); err != nil {
		return fmt.Errorf("encode operation input: %w", err)
	}
	t.work = work
	e.starts(t, op.ID)
	if t.op, err = tx.InsertOperation(ctx, op, e.cfg.Lease); err != nil {
		return err
	}
	if err := work.Admit(ctx, tx, op.ProjectID); err != nil {
		return err
	}
	return inAdmission.Hit(ctx)
}

// starts and started say that an operation is being inserted, and that it runs or was not inserted.
func (e *Engine[T, R]) starts(t *Task[T, R], id core.OperationID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.starting, t.starting) // the operation of the attempt before
	t.starting = id
	e.starting[id] = true
	t.until.Store(int64(e.cfg.Clock() + e.cfg.Lease))
}

func (e *Engine[T, R]) started(t *Task[T, R]) {
	e.mu.Lock()
	defer e.mu.Unlock()
	delete(e.starting, t.starting)
}

func (e *Engine[T, R]) reserve() error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.closing {
		return core.Wrapf(errStopping, core.Unavailable, core.CodeControllerStopping, "the controller is stopping; repeat the request at another or when it is back")
	}
	e.tasks.Add(1)
	return nil
}

// start runs a task whose place in e.tasks is reserved.
func (e *Engine[T, R]) start(t *Task[T, R]) {
	origin := t.op.Origin
	origin.Operation = t.op.ID
	if origin.Action == "" {
		origin.Action = string(t.op.Kind)
	}
	going := core.WithOperationID(core.WithRequestID(request.WithOrigin(e.runCtx, origin), t.op.RequestID), t.op.ID)
	ctx, cancel := context.WithCancelCause(going)
	t.cancel, t.accepted = cancel, t.op
	t.interruptResumed()
	e.mu.Lock()
	e.running[t.op.ID] = t
	e.mu.Unlock()
	go func() {
		defer e.tasks.Done()
		defer cancel(nil)
		ctx, span := t.span(ctx)
		t.err = t.undone(going, ctx, e.attempt(ctx, t))
		if t.err != nil && ctx.Err() == nil && !errors.Is(t.err, ErrLeaseLost) {
			t.err = t.work.TakeBack(going, t, t.err)
		}
		t.endSpan(ctx, span)
		e.mu.Lock()
		delete(e.running, t.op.ID)
		e.mu.Unlock()
		switch {
		case t.err == nil:
			e.announce(t.op.ID)
			e.cfg.Ended(t.op, t.result)
		case errors.Is(t.err, ErrLeaseLost) || errors.Is(t.err, errStopping):
			e.cfg.Log.InfoContext(ctx, "operation left to another", "operation_id", t.op.ID, "kind", t.op.Kind, "err", t.err)
		default:
			e.cfg.Log.ErrorContext(ctx, "operation not finished", "operation_id", t.op.ID, "kind", t.op.Kind, "err", t.err)
		}
		close(t.done)
	}()
}

// attempt does the work. A panic ends this operation as failed, not the controller: a controller that resumed it would panic too.
func (e *Engine[T, R]) attempt(ctx context.Context, t *Task[T, R]) (err error) {
	defer func() {
		if r := recover(); r != nil {
			e.cfg.Log.ErrorContext(ctx, "operation panicked", "operation_id", t.op.ID, "kind", t.op.Kind, "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			err = core.Errorf(core.Internal, core.CodeInternal, "something went wrong inside Coppice; the log has the cause under operation %s", t.op.ID)
		}
	}()
	return t.work.Do(ctx, t)
}
