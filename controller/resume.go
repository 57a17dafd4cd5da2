package controller

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// resumeWorkspace is the kind resume_workspace: it continues a suspended workspace.
type resumeWorkspace struct{ switchInput }

// Resume continues a suspended workspace: it forks the checkpoint of the suspension, fully resealed, as the same workspace in its next
// epoch. The programs continue, and the sessions keep their ids. If it fails, the workspace stays suspended. It is no error if the
// workspace runs already. If a resume is under way, Resume waits for it.
func (c *Controller) Resume(ctx context.Context, project core.ProjectID, id core.WorkspaceID, wait time.Duration) (Answer, error) {
	for {
		w, err := c.Workspace(ctx, project, id)
		if err != nil {
			return Answer{}, err
		}
		switch w.State {
		case core.WorkspaceReady:
			return Answer{Done: true, Result: Result{Workspace: &w}}, nil
		case core.WorkspaceCheckpointing: // a capture, which does not matter, or the beginning of a suspension
			answer, open, err := c.operations.Newest(ctx, project, id, OpSuspendWorkspace, wait)
			if _, failed := errors.AsType[*OperationError](err); err != nil && !failed {
				return Answer{}, err
			} else if !open {
				return Answer{Done: true, Result: Result{Workspace: &w}}, nil
			} else if !failed && !answer.Done {
				return Answer{}, w.NotReady()
			}
			continue
		case core.WorkspaceRestoring:
			answer, open, err := c.operations.Newest(ctx, project, id, OpResumeWorkspace, wait)
			if err != nil || open {
				return answer, err
			}
			// The resume has ended since the workspace was read, or a restore in place is under way.
			if now, err := c.Workspace(ctx, project, id); err != nil || now.State == core.WorkspaceRestoring && now.Epoch == w.Epoch {
				return Answer{}, orNotReady(w, err)
			}
			continue
		case core.WorkspaceSuspended:
		case core.WorkspaceCreating, core.WorkspaceQuarantined, core.WorkspaceTerminating, core.WorkspaceTerminated, core.WorkspaceFailed, core.WorkspaceLost:
			return Answer{}, w.NotReady()
		}
		t, err := c.operations.Queue(ctx, project, wait, func(ctx context.Context) (*task, error) { return c.resumeSuspended(ctx, project, id) })
		if core.CodeOf(err) == core.CodeStateConflict {
			continue // somebody else was faster
		}
		if err != nil {
			return Answer{}, err
		}
		return t.Await(ctx, wait)
	}
}

func orNotReady(w Workspace, err error) error {
	if err != nil {
		return err
	}
	return w.NotReady()
}

func (c *Controller) resumeSuspended(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (*task, error) {
	op := Operation{ProjectID: project, Kind: OpResumeWorkspace, Step: "fork", WorkspaceID: id}
	return c.begin(ctx, op, func(ctx context.Context, tx Tx, op *Operation, attempt int) (kind, error) {
		w, err := tx.Workspace(ctx, id)
		if err != nil {
			return nil, err
		}
		if w.State != core.WorkspaceSuspended {
			return nil, core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s is %s, not suspended", id, w.State)
		}
		if w, err = tx.MoveWorkspace(ctx, id, w.Epoch, core.WorkspaceRestoring); err != nil {
			return nil, err
		}
		if err := tx.RenewTTL(ctx, id); err != nil { // before it is ready: it must not be suspended at once
			return nil, err
		}
		tx.LockCheckpoint(w.Head)
		source, err := c.source(ctx, tx, w.Head)
		if err != nil {
			return nil, err
		}
		if !source.State.Forkable() {
			return nil, notForkable(source)
		}
		runners, err := c.placeFrom(ctx, tx, source, 1, false)
		if err != nil {
			return nil, err
		}
		next, err := c.nextSandbox(ctx, tx, w, source, runners[0], attempt == 0)
		op.CheckpointID = source.ID
		return &resumeWorkspace{switchInput{
			Source: source.ID, Epoch: w.Epoch, Next: next.ID, plan: &restorePlan{workspace: w, next: next, source: source},
		}}, err
	})
}

// takeBack leaves the workspace suspended.
func (k *resumeWorkspace) takeBack(ctx context.Context, tx Tx, op Operation) error {
	if err := tx.EndSandboxes(ctx, []core.SandboxID{k.Next}); err != nil {
		return err
	}
	_, err := tx.MoveWorkspace(ctx, op.WorkspaceID, k.Epoch, core.WorkspaceSuspended)
	return err
}

func (k *resumeWorkspace) work(ctx context.Context, c *Controller, t *task) error {
	plan, err := k.load(ctx, c, t)
	if err != nil {
		return err
	}
	op := t.Op()
	if op.Step == "fork" {
		if err := k.switchSandbox(ctx, c, t, plan, true); err != nil {
			return err
		}
	}
	c.ports.Reopen(ctx, op.ProjectID, op.WorkspaceID, plan.next)
	t.Lap("ports")
	return t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		w, err := tx.Workspace(ctx, op.WorkspaceID)
		return Outcome{Workspace: op.WorkspaceID, Checkpoint: k.Source}, Result{Workspace: &w, Checkpoint: &plan.source}, err
	})
}

// awaken resumes a workspace with auto-resume, and returns it after that.
func (c *Controller) awaken(ctx context.Context, w Workspace) (Workspace, error) {
	if !w.Asleep() {
		return w, nil
	}
	answer, err := c.Resume(ctx, w.ProjectID, w.ID, DefaultWait)
	if err != nil || !answer.Done {
		return w, orNotReady(w, err)
	}
	return c.Workspace(ctx, w.ProjectID, w.ID)
}
