package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/core"
)

// terminateWorkspace is the kind terminate_workspace: it takes a workspace down for good. Nothing of it is taken back: a termination that is
// abandoned is begun again.
type terminateWorkspace struct {
	madeNothing
	Epoch int64 `json:"epoch,omitempty"` // of the workspace when the operation began
}

// Terminate takes a workspace down for good. Its checkpoints stay. It is no error if the workspace is gone. If a termination is under
// way, Terminate waits for it.
func (c *Controller) Terminate(ctx context.Context, project core.ProjectID, id core.WorkspaceID, wait time.Duration) (Answer, error) {
	for {
		w, err := c.Workspace(ctx, project, id)
		if err != nil {
			return Answer{}, err
		}
		switch w.State {
		case core.WorkspaceTerminated:
			return Answer{Done: true, Result: Result{Workspace: &w}}, nil
		case core.WorkspaceTerminating:
			answer, open, err := c.operations.Newest(ctx, project, id, OpTerminateWorkspace, wait)
			if err != nil || open {
				return answer, err
			}
		default: // it has still to be asked for
		}
		t, err := c.terminate(ctx, project, id)
		if core.CodeOf(err) == core.CodeStateConflict {
			continue // its state has changed meanwhile; the states lead to terminated only once, so this loop ends
		}
		if err != nil {
			return Answer{}, err
		}
		return t.Await(ctx, wait)
	}
}

func (c *Controller) terminate(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (*task, error) {
	return c.terminateIf(ctx, project, id, nil)
}

// terminateIf begins a termination. If there is a further condition, the workspace must meet it.
func (c *Controller) terminateIf(ctx context.Context, project core.ProjectID, id core.WorkspaceID, only func(context.Context, Tx) error) (*task, error) {
	op := Operation{ProjectID: project, Kind: OpTerminateWorkspace, Step: "drop", WorkspaceID: id}
	return c.begin(ctx, op, func(ctx context.Context, tx Tx, _ *Operation, _ int) (kind, error) {
		w, err := tx.Workspace(ctx, id)
		if err != nil {
			return nil, err
		}
		if only != nil {
			if err := only(ctx, tx); err != nil {
				return nil, err
			}
		}
		k := &terminateWorkspace{Epoch: w.Epoch}
		switch {
		case w.State == core.WorkspaceTerminated:
			return nil, core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s is terminated already", id)
		case w.State.Final(): // failed or lost: there is nothing to take down
			return k, nil
		case w.State == core.WorkspaceTerminating:
			return k, c.orphaned(ctx, tx, id)
		}
		_, err = tx.MoveWorkspace(ctx, id, w.Epoch, core.WorkspaceTerminating)
		return k, err
	})
}

// orphaned refuses a second termination of a workspace unless the first one has ended without effect. An operation and its workspace end
// in one transaction, so a workspace that is read after the end of its operation shows the effect.
func (c *Controller) orphaned(ctx context.Context, tx Tx, id core.WorkspaceID) error {
	op, err := operations.NewestOf(ctx, tx, id, OpTerminateWorkspace)
	if err != nil {
		return err
	}
	w, err := tx.Workspace(ctx, id)
	if err == nil && (!op.State.Done() || w.State != core.WorkspaceTerminating) {
		err = core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s is being terminated by operation %s", id, op.ID)
	}
	return err
}

// work does not end before the runner has taken every sandbox of the
// workspace down, or has been silent for so long that it has done so by itself.
func (k *terminateWorkspace) work(ctx context.Context, c *Controller, t *task) error {
	defer c.captures.Ended(t.Op().WorkspaceID)
	var sandboxes []Sandbox
	err := t.Load(ctx, func(tx Tx) error {
		var err error
		sandboxes, err = tx.WorkspaceSandboxes(ctx, t.Op().WorkspaceID)
		return err
	})
	if err != nil {
		return err
	}
	for _, s := range sandboxes {
		if err := c.fleet.TakeDown(ctx, s); err != nil {
			return err
		}
	}
	t.Lap("drop")
	return t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		list, err := tx.EndWorkspaces(ctx, []EndedWorkspace{{ID: t.Op().WorkspaceID, To: core.WorkspaceTerminated}})
		if err != nil {
			return nil, Result{}, err
		}
		if len(list) == 0 { // two terminations of a failed workspace: the other was first
			w, err := tx.Workspace(ctx, t.Op().WorkspaceID)
			if err != nil {
				return nil, Result{}, err
			}
			list = []Workspace{w}
		}
		return Outcome{Workspace: t.Op().WorkspaceID}, Result{Workspace: &list[0]}, nil
	})
}
