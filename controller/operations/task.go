package operations

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/trace"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/tracing"
)

// The pauses between attempts of a transaction while the database cannot be reached. They double.
const (
	firstPause   = 50 * time.Millisecond
	longestPause = 2 * time.Second
)

// Task is an operation that this process works on.
type Task[T Tx, R any] struct {
	e        *Engine[T, R]
	starting core.OperationID // under which it is in the engine's starting; only Begin uses it
	accepted Operation        // as it was when the task began; never written again
	op       Operation        // the task's own goroutine works on it
	work     Work[T, R]
	repeat   core.OperationID // set when there is nothing to do but to answer as this operation, of an equal request, did
	watch    *core.Stopwatch
	cancel   context.CancelCauseFunc
	began    time.Time     // here
	until    atomic.Int64  // by the clock of leases: before that nobody else can have claimed it
	request  trace.Span    // under which it was admitted; nil when it is resumed
	done     chan struct{} // closed at the end; the fields below are valid then
	result   R
	err      error // why it did not end on this controller: LEASE_LOST, or the controller stops

	stall   sync.Once
	stalled chan struct{} // closed when the end cannot be written because the database cannot be reached
}

// ID is the id of the operation.
func (t *Task[T, R]) ID() core.OperationID { return t.accepted.ID }

// Op is the operation as its Work knows it. Only the Work may call it.
func (t *Task[T, R]) Op() Operation { return t.op }

// Result is what Finish has written. Only the Work may call it, after Finish.
func (t *Task[T, R]) Result() R { return t.result }

// Lap records that a stage of the work has ended.
func (t *Task[T, R]) Lap(stage string) { t.watch.Lap(stage) }

// Await waits for the end of the operation. If it has not ended after wait, the answer is the operation as it was accepted. The end of the
// context ends only the waiting.
func (t *Task[T, R]) Await(ctx context.Context, wait time.Duration) (Answer[R], error) {
	if t.repeat != "" {
		return t.e.replay(ctx, t.op.ProjectID, t.repeat)
	}
	timer := time.NewTimer(wait)
	defer timer.Stop()
	select {
	case <-t.done:
		return t.answer()
	case <-t.stalled:
		id := t.accepted.ID
		return Answer[R]{}, &Error{id, core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable,
			"the database (PostgreSQL) cannot be reached; operation %s goes on and is recorded when it is back", id)}
	case <-ctx.Done():
		return Answer[R]{}, context.Cause(ctx)
	case <-timer.C:
		return Answer[R]{Operation: t.accepted}, nil
	}
}

func (t *Task[T, R]) answer() (Answer[R], error) {
	switch {
	case t.err != nil:
		return Answer[R]{Operation: t.accepted}, nil //nolint:nilerr // somebody else, or a later start, brings it to its end
	case t.op.Problem != nil:
		return Answer[R]{Operation: t.op, Done: true}, &Error{t.op.ID, t.op.Problem}
	}
	return Answer[R]{Operation: t.op, Done: true, Result: t.result}, nil
}

// Finish ends the operation as succeeded. last runs in its last transaction. It returns the outcome, which the row keeps as JSON, and the
// result.
func (t *Task[T, R]) Finish(ctx context.Context, last func(ctx context.Context, tx T) (outcome any, result R, err error)) error {
	return t.end(ctx, nil, last)
}

// Fail ends the operation as failed. last runs in its last transaction.
func (t *Task[T, R]) Fail(ctx context.Context, problem error, last func(ctx context.Context, tx T) error) error {
	if ctx.Err() != nil { // the failure comes from the controller's stop, not from the work
		return context.Cause(ctx)
	}
	t.e.cfg.Log.WarnContext(ctx, "operation failed", "operation_id", t.op.ID, "kind", t.op.Kind, "request_id", t.op.RequestID, "err", problem)
	return t.end(ctx, problemOf(problem), func(ctx context.Context, tx T) (any, R, error) {
		var none R
		return nil, none, last(ctx, tx)
	})
}

// Abandon ends the operation as failed and takes it back, as the engine does after an error of its Work.
func (t *Task[T, R]) Abandon(ctx context.Context, problem error) error {
	return t.work.TakeBack(ctx, t, problem)
}

// end writes the end. It repeats this while the database is unreachable, because the runner's work must not be forgotten. The fence
// of the lease epoch makes repeating safe.
func (t *Task[T, R]) end(ctx context.Context, problem *core.Error, last func(ctx context.Context, tx T) (any, R, error)) error {
	if err := beforeEnd.Hit(ctx); err != nil {
		return err
	}
	again := false
	for wait := firstPause; ; wait = min(2*wait, longestPause) {
		var ended Operation
		var result R
		err := t.e.store.InTx(ctx, scopeOf(t.op.ProjectID), func(tx T) (err error) {
			if again { // the attempt before may have been committed although its answer was lost: last must not run twice
				now, err := tx.Operation(ctx, t.op.ID)
				if err == nil && now.State.Done() {
					err = ErrLeaseLost
				}
				if err != nil {
					return err
				}
			}
			next := t.op
			next.State, next.Problem = core.OperationSucceeded, problem
			if problem != nil {
				next.State = core.OperationFailed
			}
			var outcome any
			if outcome, result, err = last(ctx, tx); err != nil {
				return err
			}
			if next.Result, err = json.Marshal(outcome); err != nil {
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
			return t.settled(ctx)
		case core.CodeOf(err) != core.CodeDatabaseUnavailable:
			return err
		}
		again = true
		if err := t.stalls(ctx, wait); err != nil {
			return err
		}
	}
}

// stalls tells the requests that wait that the database cannot be reached, and pauses.
func (t *Task[T, R]) stalls(ctx context.Context, pause time.Duration) error {
	t.stall.Do(func() { close(t.stalled) })
	return pace.Pause(ctx, pause)
}

// settled finds out whether the lease was lost, or whether our own commit had succeeded and only its answer was lost.
func (t *Task[T, R]) settled(ctx context.Context) error {
	scope := scopeOf(t.op.ProjectID)
	now, err := t.e.read(ctx, scope, t.op.ID)
	if err != nil || !now.State.Done() || now.LeaseEpoch != t.op.LeaseEpoch {
		return errors.Join(ErrLeaseLost, err)
	}
	t.op = now
	t.result, err = t.e.result(ctx, scope, now)
	return err
}

// Load runs a transaction in the middle of the operation until the database accepts it, because an accepted operation is not given up for
// that. fn may run again although an earlier attempt was committed.
func (t *Task[T, R]) Load(ctx context.Context, fn func(tx T) error) error {
	return t.insist(ctx, func(Operation) bool { return false }, fn)
}

// Advance runs a transaction that takes the operation to a named step, until the database accepts it. A resumed operation begins at that
// step. If the row says that the operation is there already, an earlier attempt was committed although its answer was lost: then fn does
// not run. The transaction writes the step before it runs fn, so that it changes nothing else after another controller has claimed the
// operation.
func (t *Task[T, R]) Advance(ctx context.Context, step string, fn func(tx T) error) error {
	there := func(now Operation) bool { return now.Step == step }
	err := t.insist(ctx, there, func(tx T) error {
		if err := tx.StepOperation(ctx, t.op, step); err != nil {
			return err
		}
		return fn(tx)
	})
	if err == nil {
		t.op.Step = step
		t.interruptResumed()
	}
	return err
}

// interruptResumed interrupts an operation that was canceled before it was resumed, once it has come to a step at which it can be interrupted.
func (t *Task[T, R]) interruptResumed() {
	if !t.op.CancelAt.IsZero() && t.e.cfg.Interruptible(t.op) {
		t.cancel(errCanceled)
	}
}

// Step records a named step in a transaction of the Work. A resumed operation begins there.
func (t *Task[T, R]) Step(ctx context.Context, tx T, name string) error {
	if err := tx.StepOperation(ctx, t.op, name); err != nil {
		return err
	}
	t.op.Step = name
	return nil
}

// Back takes the operation back to an earlier step in memory. The row learns it with the next step or with the end.
func (t *Task[T, R]) Back(step string) { t.op.Step = step }

// insist runs a transaction in the middle of the operation until the database accepts it. done says whether an earlier attempt was
// committed although its answer was lost.
func (t *Task[T, R]) insist(ctx context.Context, done func(now Operation) bool, fn func(tx T) error) error {
	for wait := firstPause; ; wait = min(2*wait, longestPause) {
		err := t.e.store.InTx(ctx, scopeOf(t.op.ProjectID), func(tx T) error {
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
		if err := t.stalls(ctx, wait); err != nil {
			return err
		}
	}
}

// span begins the span of the operation in a trace, below the span of its request.
func (t *Task[T, R]) span(ctx context.Context) (context.Context, trace.Span) {
	if t.request == nil {
		return ctx, trace.SpanFromContext(ctx)
	}
	return tracing.Start(trace.ContextWithSpan(ctx, t.request), string(t.op.Kind), trace.WithTimestamp(t.began),
		trace.WithAttributes(attribute.String("operation_id", string(t.op.ID)), attribute.String("request_id", t.op.RequestID)))
}

func (t *Task[T, R]) endSpan(ctx context.Context, span trace.Span) {
	if t.op.Problem != nil {
		tracing.Fail(span, t.op.Problem)
	}
	tracing.Fail(span, t.err)
	tracing.Stages(ctx, t.began, t.watch.Timings())
	span.End()
}
