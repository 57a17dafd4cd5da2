package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

// restoreWorkspace is the kind restore_workspace: it rolls a workspace back in place.
type restoreWorkspace struct{ switchInput }

// RestoreWorkspace rolls a workspace back to a checkpoint, in place. A new sandbox is restored from the checkpoint and resealed before
// the old one is destroyed. A suspended workspace has no old one, and runs afterwards. If this fails, nothing has changed.
func (c *Controller) RestoreWorkspace(ctx context.Context, project core.ProjectID, id core.WorkspaceID, checkpoint core.CheckpointID, wait time.Duration) (Answer, error) {
	op := Operation{ProjectID: project, Kind: OpRestoreWorkspace, Step: "fork", WorkspaceID: id, CheckpointID: checkpoint}
	admit := func(ctx context.Context, tx Tx, _ *Operation, attempt int) (kind, error) {
		plan, err := c.admitRestore(ctx, tx, project, id, checkpoint, attempt)
		if err != nil {
			return nil, err
		}
		return &restoreWorkspace{switchInput{
			Source: checkpoint, Epoch: plan.workspace.Epoch, Sandbox: plan.workspace.Sandbox.ID, Next: plan.next.ID, plan: plan,
		}}, nil
	}
	return c.queue(ctx, project, wait, func(ctx context.Context) (t *task, err error) {
		err = c.whenReady(ctx, project, id, func() error {
			t, err = c.begin(ctx, op, admit)
			return err
		})
		return t, err
	})
}

func (c *Controller) admitRestore(ctx context.Context, tx Tx, project core.ProjectID, id core.WorkspaceID, checkpoint core.CheckpointID, attempt int) (*restorePlan, error) {
	tx.HoldRules(project)
	w, err := tx.Workspace(ctx, id)
	if err != nil {
		return nil, err
	}
	asleep := w.State == core.WorkspaceSuspended
	if w.State != core.WorkspaceReady && !asleep {
		return nil, w.NotReady()
	}
	tx.LockCheckpoint(checkpoint)
	source, err := c.source(ctx, tx, checkpoint)
	if err != nil {
		return nil, err
	}
	if !source.State.Forkable() {
		return nil, notForkable(source)
	}
	if source.Image.Digest != w.Image.Digest || source.Resources.VCPUs != w.Resources.VCPUs || source.Resources.MemoryMiB != w.Resources.MemoryMiB {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField,
			"checkpoint_id: checkpoint %s is of another image or shape than workspace %s; restore it as a workspace of its own", checkpoint, id)
	}
	if from := source.Origin(); from != nil && from.ID != w.ID {
		if err := grants.CheckWithin(w.Egress, w.Rules.Allow, *from); err != nil {
			return nil, err
		}
	}
	runners, err := c.placeFrom(ctx, tx, source, 1, false)
	if err != nil {
		return nil, err
	}
	old := w.Sandbox
	if w, err = tx.MoveWorkspace(ctx, id, w.Epoch, core.WorkspaceRestoring); err != nil {
		return nil, err
	}
	if asleep { // as a resume does: it must not be suspended at once
		if err := tx.RenewTTL(ctx, id); err != nil {
			return nil, err
		}
	}
	w.Sandbox = old
	c.idle.Used(w)
	next, err := c.nextSandbox(ctx, tx, w, source, runners[0], asleep && attempt == 0)
	return &restorePlan{workspace: w, next: next, source: source}, err
}

// takeBack returns the workspace to its present sandbox, or leaves it suspended.
func (k *restoreWorkspace) takeBack(ctx context.Context, tx Tx, op Operation) error {
	if err := tx.EndSandboxes(ctx, []core.SandboxID{k.Next}); err != nil {
		return err
	}
	if k.Sandbox == "" {
		_, err := tx.MoveWorkspace(ctx, op.WorkspaceID, k.Epoch, core.WorkspaceSuspended)
		return err
	}
	_, err := tx.ReturnWorkspace(ctx, op.WorkspaceID, k.Epoch)
	return err
}

func (k *restoreWorkspace) work(ctx context.Context, c *Controller, t *task) error {
	plan, err := k.load(ctx, c, t)
	if err != nil {
		return err
	}
	op := t.Op()
	if op.Step == "fork" {
		if err := k.switchSandbox(ctx, c, t, plan, false); err != nil {
			return err
		}
	}
	// From here on the workspace is in its new epoch. The old sandbox has no living row: it is dropped now, or after a heartbeat.
	c.fleet.Drop(ctx, k.Sandbox)
	c.ports.Reopen(ctx, op.ProjectID, op.WorkspaceID, plan.next)
	t.Lap("drop")
	return t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		w, err := tx.Workspace(ctx, op.WorkspaceID)
		if err != nil {
			return nil, Result{}, err
		}
		out := Outcome{Workspace: w.ID, Checkpoint: k.Source}
		result := Result{Workspace: &w, Checkpoint: &plan.source}
		list, err := tx.ResealsByOperation(ctx, op.ID, []core.WorkspaceID{w.ID})
		if err == nil && len(list) > 0 {
			result.Reseal = &list[0].Report
		}
		return out, result, err
	})
}
