package operations

import (
	"context"
	"errors"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// claimBatch is how many operations one transaction claims.
const claimBatch = 32

// leaseLoop renews the leases of this engine's operations, and claims operations that no controller works on.
func (e *Engine[T, R]) leaseLoop(ctx context.Context) {
	var due time.Duration // by the clock of leases
	pace.Every(ctx, e.cfg.Interval, e.wake, func() {
		if start := e.cfg.Clock(); start >= due {
			if err := e.renew(ctx); err != nil {
				e.cfg.Log.WarnContext(ctx, "operation leases were not renewed", "err", err)
				return // do not claim operations that may be our own
			}
			due = start + e.cfg.Lease/3
		}
		if err := e.claim(ctx); err != nil && ctx.Err() == nil {
			e.cfg.Log.WarnContext(ctx, "operations were not claimed", "err", err)
		}
		if err := e.interruptCanceled(ctx); err != nil && ctx.Err() == nil {
			e.cfg.Log.WarnContext(ctx, "canceled operations were not looked for", "err", err)
		}
	})
}

func (e *Engine[T, R]) renew(ctx context.Context) error {
	e.mu.Lock()
	tasks := make(map[core.OperationID]*Task[T, R], len(e.running))
	ids := make([]core.OperationID, 0, len(e.running))
	for id, t := range e.running {
		tasks[id], ids = t, append(ids, id)
	}
	e.mu.Unlock()
	if len(ids) == 0 {
		return nil
	}
	slices.Sort(ids)
	began := e.cfg.Clock()
	held, err := e.extend(ctx, ids)
	if err != nil {
		return err
	}
	for id, t := range tasks {
		if epoch, ok := held[id]; ok && epoch == t.accepted.LeaseEpoch {
			t.until.Store(int64(began + e.cfg.Lease))
			continue
		}
		// The operation has ended meanwhile, which needs no cancelling, or another controller has it now, which does.
		if op, err := e.read(ctx, model.System(), id); err == nil && !op.State.Done() && op.LeaseEpoch != t.accepted.LeaseEpoch {
			t.cancel(ErrLeaseLost)
		}
	}
	return nil
}

// extend extends the leases on these operations, and returns the epochs of those that this engine still has.
func (e *Engine[T, R]) extend(ctx context.Context, ids []core.OperationID) (held map[core.OperationID]int64, err error) {
	err = e.store.InTx(ctx, model.System(), func(tx T) error {
		held, err = tx.RenewOperations(ctx, e.owner, ids, e.cfg.Lease)
		return err
	})
	return held, err
}

// CheckLease returns nil while no other controller can have claimed the operation. It looks at the clock of leases, and when the lease has
// run out, at the row. A controller that may have stood still calls it before it tells a runner to do what cannot be undone.
func (t *Task[T, R]) CheckLease(ctx context.Context) error {
	for wait := firstPause; ; wait = min(2*wait, longestPause) {
		began := t.e.cfg.Clock()
		if began < time.Duration(t.until.Load()) {
			return nil
		}
		held, err := t.e.extend(ctx, []core.OperationID{t.op.ID})
		switch {
		case err == nil && held[t.op.ID] == t.op.LeaseEpoch:
			t.until.Store(int64(began + t.e.cfg.Lease))
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
func (e *Engine[T, R]) atWork() []core.OperationID {
	e.mu.Lock()
	defer e.mu.Unlock()
	ids := make([]core.OperationID, 0, len(e.running)+len(e.starting))
	for id := range e.running {
		ids = append(ids, id)
	}
	for id := range e.starting {
		ids = append(ids, id)
	}
	return ids
}

// claim resumes operations of controllers that are gone.
func (e *Engine[T, R]) claim(ctx context.Context) error {
	e.mu.Lock()
	closing := e.closing
	e.mu.Unlock()
	if closing {
		return nil
	}
	began, except := e.cfg.Clock(), e.atWork()
	var list []Operation
	err := e.store.InTx(ctx, model.System(), func(tx T) (err error) {
		list, err = tx.ClaimOperations(ctx, e.owner, except, e.cfg.Lease, claimBatch)
		return err
	})
	if err != nil {
		return err
	}
	for _, op := range list {
		err = errors.Join(err, e.resume(ctx, op, began+e.cfg.Lease))
	}
	return err
}

func (e *Engine[T, R]) resume(ctx context.Context, op Operation, until time.Duration) error {
	work, err := e.cfg.Read(op)
	if err != nil {
		return err
	}
	t := &Task[T, R]{e: e, op: op, work: work, watch: core.NewStopwatch(), done: make(chan struct{}), stalled: make(chan struct{})}
	t.until.Store(int64(until))
	for _, timing := range op.Timings {
		t.watch.Add(timing.Stage, time.Duration(timing.DurationMS*float64(time.Millisecond)))
	}
	if err := e.reserve(); err != nil {
		return err
	}
	e.cfg.Log.InfoContext(ctx, "operation resumed", "operation_id", op.ID, "kind", op.Kind, "step", op.Step, "lease_epoch", op.LeaseEpoch)
	e.start(t)
	return nil
}
