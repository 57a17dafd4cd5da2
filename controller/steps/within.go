package steps

import (
	"context"

	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/core"
)

// When says when a step of a workspace makes a checkpoint.
type When string

// The times at which a step of a workspace makes a checkpoint.
const (
	Always    When = "always"
	OnChange  When = "on_change"  // unless the machine is unchanged
	OnSuccess When = "on_success" // if the command ends with the status 0
)

// Within completes an action that happens in a workspace, and refuses one that cannot be carried out.
func Within(when When, a Action) (Action, error) {
	switch when {
	case OnChange:
		a.OnlyIf.Changed = true
	case OnSuccess:
		a.OnlyIf.ExitCode = new(int)
	case Always, "":
	default:
		return a, core.Errorf(core.Invalid, core.CodeInvalidField, "when is %q; it must be %s, %s or %s", core.Clip(string(when)), Always, OnChange, OnSuccess)
	}
	if a.Command == nil && a.OnlyIf != (Condition{}) {
		return a, core.Errorf(core.Invalid, core.CodeInvalidField, "when is %s, which needs a command", when)
	}
	a.Keep = KeepCheckpoint
	return a, a.check()
}

// AdmitWithin inserts the action of a step of a workspace, in the transaction that begins the step.
func AdmitWithin(ctx context.Context, tx AdmitTx, op operations.Operation, a Action) error {
	return tx.InsertStepActions(ctx, op.ProjectID, op.Kind, op.ID, []Action{a}, maxWithin)
}

// Failure is why a step of a workspace failed as a whole. A step that has run its command has a result, even if its checkpoint failed.
func Failure(list []Result) error {
	if len(list) == 1 && list[0].Problem != nil && list[0].Session == "" && list[0].Checkpoint == "" {
		return list[0].Problem.Err()
	}
	return nil
}

// borrow gives the action the workspace that was there before.
func (w *work) borrow(ctx context.Context, row *Row) error {
	return w.move(ctx, Move{Index: row.Index, From: Pending, To: Forking, Workspace: w.Borrowed})
}

// mark reads the mark of the machine of an action. It is empty if it cannot be read: then the machine counts as changed.
func (w *work) mark(ctx context.Context, row *Row) (string, error) {
	var mark string
	err := w.insist(ctx, func() error {
		return w.uses.Insist(ctx, func() (err error) {
			mark, err = w.uses.Mark(ctx, w.Project, row.Workspace)
			return err
		})
	})
	switch {
	case err == nil:
		return mark, nil
	case stops(ctx, err):
		return "", stopped(ctx, err)
	}
	w.log.InfoContext(ctx, "no mark of a machine", "operation_id", w.ID, "workspace_id", row.Workspace, "err", err)
	return "", nil
}
