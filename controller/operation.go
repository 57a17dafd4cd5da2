package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/tracing"
)

// DefaultWait is how long a request waits for its operation by default.
const DefaultWait = 60 * time.Second

// Outcome is the result of an operation, with ids instead of objects, as its row keeps it.
type Outcome struct {
	Workspace  core.WorkspaceID  `json:"workspace_id,omitempty"`
	Checkpoint core.CheckpointID `json:"checkpoint_id,omitempty"`
	Children   []ChildOutcome    `json:"children,omitempty"`
	Prune      *PruneResult      `json:"prune,omitempty"`
}

// ChildOutcome is one child of a fork, in the order asked.
type ChildOutcome struct {
	Workspace core.WorkspaceID   `json:"workspace_id"`
	Timings   []core.Timing      `json:"timings,omitempty"`
	Problem   *runnerapi.Problem `json:"problem,omitempty"`
}

// Result is an Outcome with the objects.
type Result struct {
	Workspace  *Workspace
	Checkpoint *Checkpoint
	Reseal     *core.ResealReport // of Workspace
	Children   []Child
	Prune      *PruneResult
}

// Child is one child of a fork: either Workspace or Problem is set.
type Child struct {
	Workspace *Workspace
	Reseal    *core.ResealReport
	Timings   []core.Timing
	Problem   *core.Error
}

// Answer is the answer of a use case that starts an operation: the operation in its present state and, if it has succeeded, its
// result.
type Answer struct {
	Operation Operation
	Done      bool
	Result    Result
}

// OperationError is the failure of an operation that had been accepted.
type OperationError struct {
	Operation core.OperationID
	Err       error
}

func (e *OperationError) Error() string { return fmt.Sprintf("operation %s: %v", e.Operation, e.Err) }

// Unwrap returns the failure.
func (e *OperationError) Unwrap() error { return e.Err }

// Task is an operation that this process works on.
type Task struct {
	c        *Controller
	starting core.OperationID // under which it is in the controller's starting; only begin uses it
	accepted Operation        // as it was when the task began; never written again
	op       Operation        // the task's own goroutine works on it
	kind     kind             // its input, and what it does
	repeat   core.OperationID // set when there is nothing to do but to answer as this operation, of an equal request, did
	watch    *core.Stopwatch
	cancel   context.CancelCauseFunc
	began    time.Time     // here
	until    atomic.Int64  // by the clock of leases: before that nobody else can have claimed it
	request  trace.Span    // under which it was admitted; nil when it is resumed
	done     chan struct{} // closed at the end; the fields below are valid then
	result   Result
	err      error // why it did not end on this controller: LEASE_LOST, or the controller stops

	stall   sync.Once
	stalled chan struct{} // closed when the end cannot be written because the database is away
}

const identityAttempts = 8

// Where a controller may be killed in the life of a request.
var (
	beforeAdmission = failpoint.New("controller.before_admission")
	inAdmission     = failpoint.New("controller.in_admission")    // the rows are inserted, the transaction is open
	afterAdmission  = failpoint.New("controller.after_admission") // it is committed, the runner has not been called
	beforeEnd       = failpoint.New("controller.before_end")      // the runner has done its part, the rows do not say so
	afterEnd        = failpoint.New("controller.after_end")       // the end is committed, nobody has been told
)

// begin inserts an operation with the rows that admit makes, in one transaction, and starts it. admit fills the operation's
// targets and first step and returns its kind with the input; it runs again, with a higher attempt, when a fresh identity collided.
// Only the values of the context are used: if the client hangs up now, this changes nothing. For a request that was admitted before,
// begin inserts nothing: the task then stands for the operation that the earlier request began.
func (c *Controller) begin(ctx context.Context, scope Scope, op Operation, admit func(ctx context.Context, tx Tx, op *Operation, attempt int) (kind, error)) (*Task, error) {
	if err := c.reserve(); err != nil {
		return nil, err
	}
	started := false
	defer func() {
		if !started {
			c.tasks.Done()
		}
	}()
	watch := core.NewStopwatch()
	op.LeaseOwner, op.RequestID = c.owner, requestID(ctx)
	t := &Task{c: c, began: time.Now(), request: trace.SpanFromContext(ctx), watch: watch, done: make(chan struct{}), stalled: make(chan struct{})}
	ctx = context.WithoutCancel(ctx)
	defer c.started(t)
	if err := beforeAdmission.Hit(ctx); err != nil {
		return nil, err
	}
	var err error
	for attempt := range identityAttempts {
		err = c.store.InTx(ctx, scope, func(tx Tx) error {
			next := op
			next.ID = core.NewID[core.OperationID]()
			if err := request.Bind(ctx, tx, op.ProjectID, string(next.ID)); err != nil {
				return err
			}
			k, err := admit(ctx, tx, &next, attempt)
			if err != nil {
				return err
			}
			if next.Input, err = json.Marshal(k); err != nil {
				return fmt.Errorf("encode operation input: %w", err)
			}
			t.kind = k
			c.starts(t, next.ID)
			if t.op, err = tx.InsertOperation(ctx, next, c.cfg.OperationLease); err != nil {
				return err
			}
			if err := tx.Admit(ctx, next.ProjectID, k.made().demand(next.ProjectID)); err != nil {
				return err
			}
			return inAdmission.Hit(ctx)
		})
		if !errors.Is(err, ErrIdentityTaken) {
			break
		}
	}
	if again, ok := errors.AsType[*request.RepeatError](err); ok {
		return c.repeatTask(op.ProjectID, again), nil
	}
	if err != nil {
		return nil, err
	}
	if err := afterAdmission.Hit(ctx); err != nil {
		return nil, err
	}
	watch.Lap("admit")
	started = true
	c.start(t)
	return t, nil
}

// starts and started say that an operation is being inserted, and that it runs or was not inserted.
func (c *Controller) starts(t *Task, id core.OperationID) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.starting, t.starting) // the operation of the attempt before
	t.starting = id
	c.starting[id] = true
	t.until.Store(int64(c.cfg.Clock() + c.cfg.OperationLease))
}

func (c *Controller) started(t *Task) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.starting, t.starting)
}

// repeatTask stands for the operation of an earlier, equal request.
func (c *Controller) repeatTask(project core.ProjectID, again *request.RepeatError) *Task {
	return &Task{c: c, repeat: core.OperationID(again.Use.Object), op: Operation{ProjectID: project}}
}

func (c *Controller) reserve() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.closing {
		return core.Wrapf(errShutdown, core.Unavailable, core.CodeControllerStopping, "the controller is stopping; repeat the request at another or when it is back")
	}
	c.tasks.Add(1)
	return nil
}

// start runs a task whose place in c.tasks is reserved.
func (c *Controller) start(t *Task) {
	origin := t.op.Origin
	origin.Operation = t.op.ID
	if origin.Action == "" {
		origin.Action = string(t.op.Kind)
	}
	going := core.WithOperationID(WithRequestID(WithOrigin(c.runCtx, origin), t.op.RequestID), t.op.ID)
	ctx, cancel := context.WithCancelCause(going)
	t.cancel, t.accepted = cancel, t.op
	c.mu.Lock()
	c.running[t.op.ID] = t
	c.mu.Unlock()
	go func() {
		defer c.tasks.Done()
		defer cancel(nil)
		ctx, span := t.span(ctx)
		t.err = t.undone(going, ctx, c.attempt(ctx, t))
		if t.err != nil && ctx.Err() == nil && !errors.Is(t.err, ErrLeaseLost) {
			t.err = c.abandon(ctx, t, t.err)
		}
		t.endSpan(ctx, span)
		c.mu.Lock()
		delete(c.running, t.op.ID)
		c.mu.Unlock()
		switch {
		case t.err == nil:
			c.announce(t.op.ID)
			c.metrics.operationEnded(t)
		case errors.Is(t.err, ErrLeaseLost) || errors.Is(t.err, errShutdown):
			c.log.InfoContext(ctx, "operation left to another", "operation_id", t.op.ID, "kind", t.op.Kind, "err", t.err)
		default:
			c.log.ErrorContext(ctx, "operation not finished", "operation_id", t.op.ID, "kind", t.op.Kind, "err", t.err)
		}
		close(t.done)
	}()
}

// span begins the span of the operation in a trace, below the span of its request.
func (t *Task) span(ctx context.Context) (context.Context, trace.Span) {
	if t.request == nil {
		return ctx, trace.SpanFromContext(ctx)
	}
	return tracing.Start(trace.ContextWithSpan(ctx, t.request), string(t.op.Kind), trace.WithTimestamp(t.began),
		trace.WithAttributes(attribute.String("operation_id", string(t.op.ID)), attribute.String("request_id", t.op.RequestID)))
}

func (t *Task) endSpan(ctx context.Context, span trace.Span) {
	if t.op.Problem != nil {
		tracing.Fail(span, t.op.Problem)
	}
	tracing.Fail(span, t.err)
	tracing.Stages(ctx, t.began, t.watch.Timings())
	span.End()
}

// attempt runs the work. A panic ends this operation as failed, not the controller: a controller that resumed it would panic too.
func (c *Controller) attempt(ctx context.Context, t *Task) (err error) {
	defer func() {
		if r := recover(); r != nil {
			c.log.ErrorContext(ctx, "operation panicked", "operation_id", t.op.ID, "kind", t.op.Kind, "panic", fmt.Sprint(r), "stack", string(debug.Stack()))
			err = core.Errorf(core.Internal, core.CodeInternal, "something went wrong inside Coppice; the log has the cause under operation %s", t.op.ID)
		}
	}()
	return t.kind.work(ctx, t)
}

// write is what an operation's last transaction changes besides its own row.
type write func(ctx context.Context, tx Tx) (Outcome, Result, error)

// finish ends an operation as succeeded.
func (t *Task) finish(ctx context.Context, w write) error { return t.end(ctx, nil, w) }

// fail ends an operation as failed. w may be nil.
func (t *Task) fail(ctx context.Context, problem error, w write) error {
	if ctx.Err() != nil { // the failure comes from the controller's stop, not from the work
		return context.Cause(ctx)
	}
	t.c.log.WarnContext(ctx, "operation failed", "operation_id", t.op.ID, "kind", t.op.Kind, "request_id", t.op.RequestID, "err", problem)
	return t.end(ctx, problemOf(problem), w)
}

// end writes the end. It repeats this while the database is unreachable, because the runner's work must not be forgotten. The fence
// of the lease epoch makes repeating safe.
func (t *Task) end(ctx context.Context, problem *core.Error, w write) error {
	scope, again := t.scope(), false
	if err := beforeEnd.Hit(ctx); err != nil {
		return err
	}
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		var ended Operation
		var result Result
		err := t.c.store.InTx(ctx, scope, func(tx Tx) error {
			if again { // the attempt before may have been committed although its answer was lost: w must not run twice
				now, err := tx.Operation(ctx, t.op.ID)
				if err == nil && now.State.Done() {
					err = ErrLeaseLost
				}
				if err != nil {
					return err
				}
			}
			next, out := t.op, Outcome{}
			next.State, next.Problem = core.OperationSucceeded, problem
			if problem != nil {
				next.State = core.OperationFailed
			}
			if w != nil {
				var err error
				if out, result, err = w(ctx, tx); err != nil {
					return err
				}
			}
			var err error
			if next.Result, err = json.Marshal(out); err != nil {
				return fmt.Errorf("encode outcome: %w", err)
			}
			next.Timings = t.watch.Timings()
			ended, err = tx.FinishOperation(ctx, next)
			return err
		})
		switch {
		case err == nil:
			t.op, t.result = ended, result
			return afterEnd.Hit(ctx)
		case errors.Is(err, ErrLeaseLost):
			return t.settled(ctx, scope)
		case core.CodeOf(err) != core.CodeDatabaseUnavailable:
			return err
		}
		again = true
		t.stall.Do(func() { close(t.stalled) })
		if err := pace.Pause(ctx, wait); err != nil {
			return err
		}
	}
}

// load reads what the work needs. It repeats this until the database answers, because an accepted operation is not given up for that.
func (t *Task) load(ctx context.Context, fn func(Tx) error) error {
	return t.insistTx(ctx, func(Operation) bool { return false }, fn)
}

// scope is the scope of the operation's project.
func (t *Task) scope() Scope {
	if t.op.ProjectID == SystemProject {
		return System()
	}
	return InProject(t.op.ProjectID)
}

// insistTx runs a transaction in the middle of an operation until the database accepts it. done says whether an earlier attempt was
// committed although its answer was lost.
func (t *Task) insistTx(ctx context.Context, done func(now Operation) bool, fn func(Tx) error) error {
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		err := t.c.store.InTx(ctx, t.scope(), func(tx Tx) error {
			now, err := tx.Operation(ctx, t.op.ID)
			switch {
			case err != nil:
				return err
			case now.LeaseEpoch != t.op.LeaseEpoch:
				return ErrLeaseLost
			case done(now):
				return nil
			}
			return fn(tx)
		})
		if err == nil || core.CodeOf(err) != core.CodeDatabaseUnavailable {
			return err
		}
		t.stall.Do(func() { close(t.stalled) })
		if err := pace.Pause(ctx, wait); err != nil {
			return err
		}
	}
}

// settled finds out whether the lease was lost, or whether our own commit had succeeded and only its answer was lost.
func (t *Task) settled(ctx context.Context, scope Scope) error {
	var now Operation
	err := t.c.store.InTx(ctx, scope, func(tx Tx) error {
		var err error
		now, err = tx.Operation(ctx, t.op.ID)
		return err
	})
	if err != nil || !now.State.Done() || now.LeaseEpoch != t.op.LeaseEpoch {
		return errors.Join(ErrLeaseLost, err)
	}
	t.op = now
	t.result, err = t.c.result(ctx, scope, now)
	return err
}

// step records a named step. A resumed operation begins there.
func (t *Task) step(ctx context.Context, tx Tx, name string) error {
	if err := tx.StepOperation(ctx, t.op, name); err != nil {
		return err
	}
	t.op.Step = name
	return nil
}

// await waits for a task of this process. The end of the context ends only the waiting.
func (t *Task) await(ctx context.Context, wait time.Duration) (Answer, error) {
	if t.repeat != "" {
		return t.c.replay(ctx, t.op.ProjectID, t.repeat)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-t.done:
		return t.answer()
	case <-t.stalled:
		id := t.accepted.ID
		return Answer{}, &OperationError{id, core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable,
			"the database (PostgreSQL) cannot be reached; operation %s goes on and is recorded when it is back", id)}
	case <-ctx.Done():
		return Answer{}, context.Cause(ctx)
	case <-timer.C:
		return Answer{Operation: t.accepted}, nil
	}
}

func (t *Task) answer() (Answer, error) {
	switch {
	case t.err != nil:
		return Answer{Operation: t.accepted}, nil //nolint:nilerr // somebody else, or a later start, brings it to its end
	case t.op.Problem != nil:
		return Answer{Operation: t.op, Done: true}, &OperationError{t.op.ID, t.op.Problem}
	}
	t.c.ShowQueued(t.result.Checkpoint)
	return Answer{Operation: t.op, Done: true, Result: t.result}, nil
}

// problemOf is the part of an error that the row and the caller may see.
func problemOf(err error) *core.Error {
	return &core.Error{Category: core.CategoryOf(err), Code: core.CodeOf(err), Msg: core.MessageOf(err)}
}

func failureOf(err error) *Failure {
	return &Failure{Code: core.CodeOf(err), Message: core.MessageOf(err)}
}
