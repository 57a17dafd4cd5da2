package controller

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

const (
	pollInterval = 500 * time.Millisecond // of an operation that another controller runs, should its notification be lost
	claimBatch   = 32
	notifyBatch  = 256
)

// Operation returns an operation of a project, waiting up to wait for its end. The result is there when it succeeded.
func (c *Controller) Operation(ctx context.Context, project core.ProjectID, id core.OperationID, wait time.Duration) (Answer, error) {
	scope := InProject(project)
	op, err := c.waitOperation(ctx, scope, id, wait)
	if err != nil || !op.State.Done() || op.Problem != nil {
		return Answer{Operation: op, Done: op.State.Done()}, err
	}
	result, err := c.result(ctx, scope, op)
	return Answer{Operation: op, Done: true, Result: result}, err
}

// waitOperation waits for the end of an operation, whoever runs it.
func (c *Controller) waitOperation(ctx context.Context, scope Scope, id core.OperationID, wait time.Duration) (Operation, error) {
	timeout := time.NewTimer(wait)
	defer timeout.Stop()
	for {
		ended, forget := c.subscribe(id)
		op, err := c.operation(ctx, scope, id)
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

func (c *Controller) operation(ctx context.Context, scope Scope, id core.OperationID) (op Operation, err error) {
	err = c.store.InTx(ctx, scope, func(tx Tx) error {
		op, err = tx.Operation(ctx, id)
		return err
	})
	return op, err
}

// subscribe returns a channel that is closed when the end of the operation is announced.
func (c *Controller) subscribe(id core.OperationID) (<-chan struct{}, func()) {
	ch := make(chan struct{})
	c.mu.Lock()
	defer c.mu.Unlock()
	c.waiters[id] = append(c.waiters[id], ch)
	return ch, func() {
		c.mu.Lock()
		defer c.mu.Unlock()
		list := slices.DeleteFunc(c.waiters[id], func(w chan struct{}) bool { return w == ch })
		if c.waiters[id] = list; len(list) == 0 {
			delete(c.waiters, id)
		}
	}
}

// announce wakes the waiters on this controller at once, and those on other controllers soon.
func (c *Controller) announce(id core.OperationID) {
	c.wakeWaiters(id)
	select {
	case c.ended <- id:
	default: // they poll
	}
}

func (c *Controller) wakeWaiters(id core.OperationID) {
	c.Events.Hint()
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, w := range c.waiters[id] {
		close(w)
	}
	delete(c.waiters, id)
}

// notifyLoop sends notifications in batches, apart from the transactions that they are about: a NOTIFY inside them would
// serialise all their commits.
func (c *Controller) notifyLoop(ctx context.Context) {
	for {
		var batch []core.OperationID
		select {
		case <-ctx.Done():
			return
		case id := <-c.ended:
			batch = append(batch, id)
		}
		for more := true; more && len(batch) < notifyBatch; {
			select {
			case id := <-c.ended:
				batch = append(batch, id)
			default:
				more = false
			}
		}
		if err := c.store.Notify(ctx, batch); err != nil && ctx.Err() == nil {
			c.log.DebugContext(ctx, "operation ends were not announced", "err", err) // pollers find out
		}
	}
}

// listenLoop listens for operations that other controllers have ended, and for keys that they have revoked.
func (c *Controller) listenLoop(ctx context.Context) {
	pace.Every(ctx, c.cfg.LoopInterval, nil, func() {
		if err := c.store.Listen(ctx, c.wakeWaiters, c.Tenancy.KeyEnded); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "notifications ended", "err", err)
		}
	})
}

// leaseLoop renews the leases of this controller's operations, and claims operations that no controller works on.
func (c *Controller) leaseLoop(ctx context.Context) {
	var due time.Duration // by the clock of leases
	pace.Every(ctx, c.cfg.LoopInterval, c.wake, func() {
		if start := c.cfg.Clock(); start >= due {
			if err := c.renew(ctx); err != nil {
				c.log.WarnContext(ctx, "operation leases were not renewed", "err", err)
				return // do not claim operations that may be our own
			}
			due = start + c.cfg.OperationLease/3
		}
		if err := c.claim(ctx); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "operations were not claimed", "err", err)
		}
		if err := c.interruptCanceled(ctx); err != nil && ctx.Err() == nil {
			c.log.WarnContext(ctx, "canceled operations were not looked for", "err", err)
		}
	})
}

func (c *Controller) renew(ctx context.Context) error {
	c.mu.Lock()
	tasks := make(map[core.OperationID]*Task, len(c.running))
	ids := make([]core.OperationID, 0, len(c.running))
	for id, t := range c.running {
		tasks[id], ids = t, append(ids, id)
	}
	c.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	slices.Sort(ids)
	began := c.cfg.Clock()
	var held map[core.OperationID]int64
	err := c.store.InTx(ctx, System(), func(tx Tx) error {
		var err error
		held, err = tx.RenewOperations(ctx, c.owner, ids, c.cfg.OperationLease)
		return err
	})
	if err != nil {
		return err
	}
	for id, t := range tasks {
		if epoch, ok := held[id]; ok && epoch == t.accepted.LeaseEpoch {
			t.until.Store(int64(began + c.cfg.OperationLease))
			continue
		}
		// The operation has ended meanwhile, which needs no cancelling, or another controller has it now, which does.
		if op, err := c.operation(ctx, System(), id); err == nil && !op.State.Done() && op.LeaseEpoch != t.accepted.LeaseEpoch {
			t.cancel(ErrLeaseLost)
		}
	}
	return nil
}

// hold returns nil while no other controller can have claimed the operation. It looks at the clock of leases, and when the lease has run
// out, at the row. A controller that may have stood still calls it before it tells a runner to do what cannot be undone.
func (t *Task) hold(ctx context.Context) error {
	for wait := 50 * time.Millisecond; ; wait = min(2*wait, 2*time.Second) {
		began := t.c.cfg.Clock()
		if began < time.Duration(t.until.Load()) {
			return nil
		}
		held, err := read(ctx, t.c, System(), func(tx Tx) (map[core.OperationID]int64, error) {
			return tx.RenewOperations(ctx, t.c.owner, []core.OperationID{t.op.ID}, t.c.cfg.OperationLease)
		})
		switch {
		case err == nil && held[t.op.ID] == t.op.LeaseEpoch:
			t.until.Store(int64(began + t.c.cfg.OperationLease))
			return nil
		case err == nil:
			return ErrLeaseLost
		case core.CodeOf(err) != core.CodeDatabaseUnavailable:
			return err
		}
		if err := pace.Pause(ctx, wait); err != nil {
			return err
		}
	}
}

// atWork lists the operations that this process works on. It never claims them, however late it renews their leases.
func (c *Controller) atWork() []core.OperationID {
	c.mu.Lock()
	defer c.mu.Unlock()
	ids := make([]core.OperationID, 0, len(c.running)+len(c.starting))
	for id := range c.running {
		ids = append(ids, id)
	}
	for id := range c.starting {
		ids = append(ids, id)
	}
	return ids
}

// claim resumes operations of controllers that are gone.
func (c *Controller) claim(ctx context.Context) error {
	c.mu.Lock()
	closing := c.closing
	c.mu.Unlock()
	if closing {
		return nil
	}
	began, except := c.cfg.Clock(), c.atWork()
	list, err := read(ctx, c, System(), func(tx Tx) ([]Operation, error) {
		return tx.ClaimOperations(ctx, c.owner, except, c.cfg.OperationLease, claimBatch)
	})
	if err != nil {
		return err
	}
	for _, op := range list {
		err = errors.Join(err, c.resume(ctx, op, began+c.cfg.OperationLease))
	}
	return err
}

func (c *Controller) resume(ctx context.Context, op Operation, until time.Duration) error {
	k, err := kindOf(op)
	if err != nil {
		return err
	}
	t := &Task{c: c, op: op, kind: k, watch: core.NewStopwatch(), done: make(chan struct{}), stalled: make(chan struct{})}
	t.until.Store(int64(until))
	for _, timing := range op.Timings {
		t.watch.Add(timing.Stage, time.Duration(timing.DurationMS*float64(time.Millisecond)))
	}
	if err := c.reserve(); err != nil {
		return err
	}
	c.log.InfoContext(ctx, "operation resumed", "operation_id", op.ID, "kind", op.Kind, "step", op.Step, "lease_epoch", op.LeaseEpoch)
	c.start(t)
	return nil
}

// result loads the objects of an operation that succeeded, as they are now.
func (c *Controller) result(ctx context.Context, scope Scope, op Operation) (Result, error) {
	var out Outcome
	if err := json.Unmarshal(op.Result, &out); err != nil {
		return Result{}, fmt.Errorf("read outcome of operation %s: %w", op.ID, err)
	}
	var result Result
	err := c.store.InTx(ctx, scope, func(tx Tx) error {
		result = Result{Prune: out.Prune}
		ids := make([]core.WorkspaceID, 0, len(out.Children)+1)
		for _, child := range out.Children {
			ids = append(ids, child.Workspace)
		}
		if out.Workspace != "" {
			ids = append(ids, out.Workspace)
		}
		list, err := tx.WorkspacesByID(ctx, ids)
		if err != nil {
			return err
		}
		reseals, err := tx.ResealsByOperation(ctx, op.ID, ids)
		if err != nil {
			return err
		}
		workspaces, reports := map[core.WorkspaceID]*Workspace{}, map[core.WorkspaceID]*core.ResealReport{}
		for i := range list {
			workspaces[list[i].ID] = &list[i]
		}
		for i := range reseals {
			reports[reseals[i].WorkspaceID] = &reseals[i].Report
		}
		result.Workspace, result.Reseal = workspaces[out.Workspace], reports[out.Workspace]
		for _, child := range out.Children {
			next := Child{Reseal: reports[child.Workspace], Timings: child.Timings}
			if child.Problem != nil {
				next.Problem = core.Errorf(child.Problem.Category, child.Problem.Code, "%s", child.Problem.Message)
			} else {
				next.Workspace = workspaces[child.Workspace]
			}
			result.Children = append(result.Children, next)
		}
		if out.Checkpoint == "" {
			return nil
		}
		cp, err := tx.Checkpoint(ctx, out.Checkpoint)
		switch {
		case err == nil:
			c.ShowQueued(&cp)
			result.Checkpoint = &cp
		case core.CodeOf(err) == core.CodeCheckpointNotFound: // deleted since
			err = nil
		}
		return err
	})
	return result, err
}
