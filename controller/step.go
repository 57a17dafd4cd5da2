package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// stepCheckpoint is the kind step_checkpoint, which tries several actions from a checkpoint, and the kind step_workspace, which does one action
// in a workspace. Package steps does the work.
type stepCheckpoint struct {
	madeNothing

	Parallel int         `json:"parallel"`
	Fork     ForkRequest `json:"fork"` // of each action
}

// Step tries several actions from a checkpoint, each in a fork of its own.
func (c *Controller) Step(ctx context.Context, project core.ProjectID, id core.CheckpointID, actions []steps.Action, parallel int, fork ForkRequest, wait time.Duration) (Answer, error) {
	parallel, err := steps.Check(actions, parallel)
	if err != nil {
		return Answer{}, err
	}
	op := Operation{ProjectID: project, Kind: OpStepCheckpoint, Step: "act", CheckpointID: id}
	t, err := c.begin(ctx, op, func(ctx context.Context, tx Tx, op *Operation, _ int) (kind, error) {
		tx.LockCheckpoint(id)
		source, err := tx.Checkpoint(ctx, id)
		if err == nil && !source.State.Forkable() {
			err = notForkable(source)
		}
		if err == nil {
			err = steps.Admit(ctx, tx, *op, actions)
		}
		return &stepCheckpoint{Parallel: parallel, Fork: fork}, err
	})
	if err != nil {
		return Answer{}, err
	}
	return t.Await(ctx, wait)
}

func (k *stepCheckpoint) step(c *Controller, t *task) steps.Step {
	op := t.Op()
	fork := func(ctx context.Context, row *steps.Row, note steps.Note) error {
		req := k.Fork
		req.Count, req.Name, req.admitted = 1, row.Action.Name, note
		_, err := c.beginFork(ctx, op.ProjectID, OpForkCheckpoint, asFork, op.CheckpointID, req, c.cfg.AdmissionWait)
		return err
	}
	return steps.Step{Ref: steps.Ref{ID: op.ID, Project: op.ProjectID, Epoch: op.LeaseEpoch}, Parallel: k.Parallel, Created: op.CreatedAt, Borrowed: op.WorkspaceID, Fork: fork, Lease: t.CheckLease}
}

func (k *stepCheckpoint) work(ctx context.Context, c *Controller, t *task) error {
	if err := c.Steps.Run(ctx, k.step(c, t)); err != nil {
		return err
	}
	t.Lap("act")
	return t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		list, err := tx.StepResults(ctx, t.ID(), nil)
		if err == nil && t.Op().Kind == OpStepWorkspace {
			err = steps.Failure(list)
		}
		return Outcome{}, Result{Steps: list}, err
	})
}

// undo ends what the actions have begun, before the step itself ends.
func (k *stepCheckpoint) undo(ctx context.Context, c *Controller, t *task, why error) error {
	return c.Steps.TakeBack(ctx, k.step(c, t), why)
}

// StepWorkspace carries out an action in a workspace, and then makes a checkpoint of the workspace if when holds.
func (c *Controller) StepWorkspace(ctx context.Context, project core.ProjectID, id core.WorkspaceID, when steps.When, a steps.Action, wait time.Duration) (Answer, error) {
	a, err := steps.Within(when, a)
	if err != nil {
		return Answer{}, err
	}
	op := Operation{ProjectID: project, Kind: OpStepWorkspace, Step: "act", WorkspaceID: id}
	t, err := c.begin(ctx, op, func(ctx context.Context, tx Tx, op *Operation, _ int) (kind, error) {
		w, err := tx.Workspace(ctx, id)
		if err == nil && !w.Asleep() {
			err = w.Reachable()
		}
		if err == nil {
			err = steps.AdmitWithin(ctx, tx, *op, a)
		}
		return &stepCheckpoint{Parallel: 1}, err
	})
	if err != nil {
		return Answer{}, err
	}
	return t.Await(ctx, wait)
}

// newSteps gives the actions of steps the use cases of separate requests.
func newSteps(c *Controller) *steps.Stepper {
	return steps.New(steps.Uses{
		Capture: func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, node steps.Node, note steps.Note) error {
			_, err := c.beginCaptureInTurn(ctx, project, id, c.cfg.AdmissionWait, capturing{
				kind: OpCreateCheckpoint, request: CheckpointRequest{node.Name, node.Labels, node.Annotations, node.Pinned, node.Prepare},
				as: func(ctx context.Context, tx Tx, in captureInput, _ int) (kind, error) {
					return &createCheckpoint{in}, note(ctx, tx, steps.Begun{Checkpoint: in.Capture, Epoch: in.Epoch})
				},
			})
			return err
		},
		Terminate: func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, note steps.Note) (core.OperationID, error) {
			t, err := c.terminateIf(ctx, project, id, func(ctx context.Context, tx Tx) error { return note(ctx, tx, steps.Begun{}) })
			if err != nil {
				return "", err
			}
			return t.ID(), nil
		},
		Cancel: func(ctx context.Context, project core.ProjectID, id core.OperationID) error {
			_, err := c.CancelOperation(ctx, project, id, 0)
			return err
		},
		Await: func(ctx context.Context, project core.ProjectID, id core.OperationID, wait time.Duration) (bool, error) {
			a, err := c.Operation(ctx, project, id, wait)
			switch children := a.Result.Children; {
			case err != nil || !a.Done:
				return false, err
			case a.Operation.Problem != nil:
				return true, a.Operation.Problem
			case len(children) == 1 && children[0].Problem != nil:
				return true, children[0].Problem
			}
			return true, nil
		},
		Workspace: c.Workspace, Reach: c.reach, Checkpoint: c.Tree.Checkpoint,
		Write: c.guests.PutFile, Audit: c.Tenancy.AuditFile, Exec: c.ExecOnce, Mark: c.Mark, Insist: c.forks.Insist,
	}, partStore[steps.Tx]{c.store.Store, func(tx AllTx) steps.Tx { return tx }}, c.log)
}
