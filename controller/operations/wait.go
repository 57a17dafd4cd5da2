package operations

import (
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

const (
	pollInterval = 500 * time.Millisecond // of an operation that another controller runs, should its notification be lost
	notifyBatch  = 256
)

// Operation returns an operation of a project, waiting up to wait for its end. The result is there when it succeeded.
func (e *Engine[T, R]) Operation(ctx context.Context, project core.ProjectID, id core.OperationID, wait time.Duration) (Answer[R], error) {
	scope := model.InProject(project)
	op, err := e.Wait(ctx, scope, id, wait)
	if err != nil || !op.State.Done() || op.Problem != nil {
		return Answer[R]{Operation: op, Done: op.State.Done()}, err
	}
	result, err := e.result(ctx, scope, op)
	return Answer[R]{Operation: op, Done: true, Result: result}, err
}

// NewestOf returns the newest operation of a kind on a workspace.
func NewestOf(ctx context.Context, tx Tx, id core.WorkspaceID, kind Kind) (Operation, error) {
	list, err := tx.Operations(ctx, Filter{Page: model.Page{Limit: 1}, WorkspaceID: id, Kinds: []Kind{kind}})
	if err == nil && len(list) == 0 {
		err = core.Errorf(core.NotFound, core.CodeOperationNotFound, "there is no %s of workspace %s", kind, id)
	}
	if err != nil {
		return Operation{}, err
	}
	return list[0], nil
}

// Newest returns the newest operation of a kind on a workspace, and waits up to wait for its end. open says that it had not ended before.
// If there is none, open is false.
func (e *Engine[T, R]) Newest(ctx context.Context, project core.ProjectID, workspace core.WorkspaceID, kind Kind, wait time.Duration) (a Answer[R], open bool, err error) {
	var op Operation
	err = e.store.InTx(ctx, model.InProject(project), func(tx T) (err error) {
		op, err = NewestOf(ctx, tx, workspace, kind)
		return err
	})
	if core.CategoryOf(err) == core.NotFound || err == nil && op.State.Done() {
		return a, false, nil
	}
	if err != nil {
		return a, false, err
	}
	a, err = e.Operation(ctx, project, op.ID, wait)
	if err == nil && a.Operation.Problem != nil {
		err = &Error{op.ID, a.Operation.Problem}
	}
	return a, true, err
}

// Wait waits up to wait for the end of an operation, whoever runs it, and returns its row. With no time to wait, it only reads the row.
func (e *Engine[T, R]) Wait(ctx context.Context, scope model.Scope, id core.OperationID, wait time.Duration) (Operation, error) {
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	for {
		ended, forget := e.subscribe(id)
		op, err := e.read(ctx, scope, id)
		if err != nil || op.State.Done() || wait <= 0 {
			forget()
			return op, err
		}
		poll := time.NewTimer(pollInterval)
		select {
		case <-ended:
		case <-poll.C:
		case <-timeout.C:
			wait = 0 // look once more, for it may have ended just now
		case <-ctx.Done():
			err = context.Cause(ctx)
		}
		poll.Stop()
		forget()
		if err != nil {
			return Operation{}, err
		}
	}
}

func (e *Engine[T, R]) read(ctx context.Context, scope model.Scope, id core.OperationID) (op Operation, err error) {
	err = e.store.InTx(ctx, scope, func(tx T) error {
		op, err = tx.Operation(ctx, id)
		return err
	})
	return op, err
}

func (e *Engine[T, R]) result(ctx context.Context, scope model.Scope, op Operation) (result R, err error) {
	err = e.store.InTx(ctx, scope, func(tx T) error {
		result, err = e.cfg.Result(ctx, tx, op)
		return err
	})
	return result, err
}

// subscribe returns a channel that is closed when the end of the operation is announced.
func (e *Engine[T, R]) subscribe(id core.OperationID) (<-chan struct{}, func()) {
	ch := make(chan struct{})
	e.mu.Lock()
	defer e.mu.Unlock()
	e.waiters[id] = append(e.waiters[id], ch)
	return ch, func() {
		e.mu.Lock()
		defer e.mu.Unlock()
		list := slices.DeleteFunc(e.waiters[id], func(w chan struct{}) bool { return w == ch })
		if e.waiters[id] = list; len(list) == 0 {
			delete(e.waiters, id)
		}
	}
}

// announce wakes the waiters on this controller at once, and those on other controllers soon.
func (e *Engine[T, R]) announce(id core.OperationID) {
	e.WakeWaiters(id)
	select {
	case e.ended <- id:
	default: // they poll
	}
}

// WakeWaiters wakes those who wait here for the end of an operation, which another controller has announced.
func (e *Engine[T, R]) WakeWaiters(id core.OperationID) {
	e.cfg.Hint()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, w := range e.waiters[id] {
		close(w)
	}
	delete(e.waiters, id)
}

// notifyLoop sends notifications in batches, apart from the transactions that they are about: a NOTIFY inside them would
// serialise all their commits.
func (e *Engine[T, R]) notifyLoop(ctx context.Context) {
	for {
		var batch []core.OperationID
		select {
		case <-ctx.Done():
			return
		case id := <-e.ended:
			batch = append(batch, id)
		}
		for more := true; more && len(batch) < notifyBatch; {
			select {
			case id := <-e.ended:
				batch = append(batch, id)
			default:
				more = false
			}
		}
		if err := e.store.Notify(ctx, batch); err != nil && ctx.Err() == nil {
			e.cfg.Log.DebugContext(ctx, "operation ends were not announced", "err", err) // pollers find out
		}
	}
}
