package postgres_test

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// TestStepActionIsFenced: whoever has an old lease of the step moves no action of it, and of two who move an action from one phase the second
// fails. A transaction that moves an action does not keep the controller from renewing its leases.
func TestStepActionIsFenced(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	op := d.operation(controller.OpStepCheckpoint, "first", time.Hour)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		return tx.InsertStepActions(ctx, d.project, controller.OpStepCheckpoint, op.ID, []steps.Action{{}, {}}, 100)
	})
	ref := steps.Ref{ID: op.ID, Project: d.project, Epoch: op.LeaseEpoch}
	move := func(index int) steps.Move {
		return steps.Move{Index: index, From: steps.Pending, To: steps.Ended, Result: &steps.Result{Index: index}}
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.MoveStepAction(ctx, ref, move(0)); err != nil {
			return err
		}
		renewing, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		return d.store.InTx(renewing, controller.System(), func(other controller.AllTx) error {
			held, err := other.RenewOperations(renewing, "first", []core.OperationID{op.ID}, time.Hour)
			if err == nil && len(held) != 1 {
				t.Errorf("renewed: %v", held)
			}
			return err
		})
	})
	try := func(ref steps.Ref, index int) error {
		return d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error { return tx.MoveStepAction(ctx, ref, move(index)) })
	}
	if err := try(ref, 0); !errors.Is(err, steps.ErrMoved) {
		t.Errorf("out of a phase that it has left: %v", err)
	}
	d.exec(`UPDATE operations SET lease_epoch = lease_epoch + 1, lease_owner = 'second'`)
	if err := try(ref, 1); !errors.Is(err, controller.ErrLeaseLost) {
		t.Errorf("under an old lease: %v", err)
	}
	ref.Epoch++
	if err := try(ref, 1); err != nil {
		t.Errorf("under the new lease: %v", err)
	}
	d.exec(`UPDATE operations SET state = 'succeeded', result = '{}', ended_at = now(), lease_expires_at = NULL`)
	if err := try(ref, 1); !errors.Is(err, controller.ErrLeaseLost) {
		t.Errorf("after the end of the step: %v", err)
	}
}
