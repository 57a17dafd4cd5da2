package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

// restorePlan has what a restore in place needs from the rows.
type restorePlan struct {
	workspace Workspace // in its old epoch and sandbox
	next      Sandbox
	source    Checkpoint
	loaded    bool // see forkPlan
}

// RestoreWorkspace rolls a workspace back to a checkpoint, in place. A new sandbox is grown from the checkpoint and resealed before
// the old one is destroyed. If this fails, nothing has changed.
func (c *Controller) RestoreWorkspace(ctx context.Context, project core.ProjectID, id core.WorkspaceID, checkpoint core.CheckpointID, wait time.Duration) (Answer, error) {
	op := Operation{ProjectID: project, Kind: OpRestoreWorkspace, Step: "fork", WorkspaceID: id, CheckpointID: checkpoint}
	admit := func(ctx context.Context, tx Tx, _ *Operation, in *opInput, _ int) (any, error) {
		plan, err := c.admitRestore(ctx, tx, project, id, checkpoint)
		if err == nil {
			in.Source, in.Epoch, in.Sandbox, in.Next = checkpoint, plan.workspace.Epoch, plan.workspace.Sandbox.ID, plan.next.ID
		}
		return plan, err
	}
	t, err := c.admit(ctx, project, wait, func(ctx context.Context) (t *Task, err error) {
		err = c.whenReady(ctx, project, id, func() error {
			t, err = c.begin(ctx, InProject(project), op, admit)
			return err
		})
		return t, err
	})
	if err != nil {
		return Answer{}, err
	}
	return t.await(ctx, wait)
}

func (c *Controller) admitRestore(ctx context.Context, tx Tx, project core.ProjectID, id core.WorkspaceID, checkpoint core.CheckpointID) (*restorePlan, error) {
	tx.HoldRules(project)
	w, err := tx.Workspace(ctx, id)
	if err != nil {
		return nil, err
	}
	if w.State != core.WorkspaceReady {
		return nil, w.NotReady()
	}
	tx.HoldCheckpoint(checkpoint)
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
	w.Sandbox = old
	c.idle.Used(w)
	next, err := c.nextSandbox(ctx, tx, w, source, runners[0], false)
	return &restorePlan{workspace: w, next: next, source: source}, err
}

// nextSandbox inserts the sandbox of a workspace's next epoch. plain says that its hostname may be the workspace's name, because no
// other sandbox of the workspace lives.
func (c *Controller) nextSandbox(ctx context.Context, tx Tx, w Workspace, source Checkpoint, runner Runner, plain bool) (Sandbox, error) {
	if err := c.mayReachAll(ctx, tx, w.ProjectID, w.Egress); err != nil {
		return Sandbox{}, err
	}
	old := "" // the present sandbox is of another tree if the workspace is restored to a checkpoint of another tree
	if w.Sandbox.ID != "" {
		old = w.Sandbox.Identity.IP.String()
	}
	addresses, err := addressesFor(ctx, tx, source.Tree, []Runner{runner}, source.Address, old)
	if err != nil {
		return Sandbox{}, err
	}
	identity, err := newIdentity(hostnameOf(w.Name, plain), addresses[0])
	if err != nil {
		return Sandbox{}, err
	}
	next := Sandbox{
		ID: core.NewID[core.SandboxID](), ProjectID: w.ProjectID, WorkspaceID: w.ID, Epoch: w.Epoch + 1, RunnerID: runner.Info.RunnerID,
		Endpoint: runner.Endpoint, Resources: source.Resources, Identity: identity, EgressKey: runner.Info.EgressKey, EgressURL: runner.Info.EgressURL, Tree: source.Tree,
	}
	tx.InsertSandboxes([]Sandbox{next})
	return next, c.occupy(ctx, tx, runner)
}

func (c *Controller) loadRestore(ctx context.Context, t *Task) (*restorePlan, error) {
	if plan, ok := t.plan.(*restorePlan); ok {
		return plan, nil
	}
	plan := &restorePlan{loaded: true}
	err := t.load(ctx, func(tx Tx) error {
		var err error
		if plan.workspace, err = tx.Workspace(ctx, t.op.WorkspaceID); err != nil {
			return err
		}
		if plan.source, err = c.source(ctx, tx, t.in.Source); err != nil {
			return err
		}
		list, err := tx.Sandboxes(ctx, []core.SandboxID{t.in.Sandbox, t.in.Next})
		for _, s := range list {
			if s.ID == t.in.Next {
				plan.next = s
			} else {
				plan.workspace.Sandbox = s
			}
		}
		return err
	})
	return plan, err
}

// workRestore is the work of restore_workspace.
func (c *Controller) workRestore(ctx context.Context, t *Task) error {
	plan, err := c.loadRestore(ctx, t)
	if err != nil {
		return err
	}
	if t.op.Step == "fork" {
		if err := c.switchSandbox(ctx, t, plan); err != nil {
			return err
		}
	}
	// From here on the workspace is in its new epoch. The old sandbox has no living row: it is dropped now, or after a heartbeat.
	c.drop(ctx, t.in.Sandbox)
	c.reopenPorts(ctx, t.op.ProjectID, t.op.WorkspaceID, plan.next)
	t.watch.Lap("drop")
	return t.finish(ctx, func(ctx context.Context, tx Tx) (Outcome, Result, error) {
		w, err := tx.Workspace(ctx, t.op.WorkspaceID)
		if err != nil {
			return Outcome{}, Result{}, err
		}
		out := Outcome{Workspace: w.ID, Checkpoint: t.in.Source}
		result := Result{Workspace: &w, Checkpoint: &plan.source}
		list, err := tx.ResealsByOperation(ctx, t.op.ID, []core.WorkspaceID{w.ID})
		if err == nil && len(list) > 0 {
			result.Reseal = &list[0].Report
		}
		return out, result, err
	})
}

// switchSandbox grows the new sandbox and puts the workspace into it.
func (c *Controller) switchSandbox(ctx context.Context, t *Task, plan *restorePlan) error {
	child := plan.workspace
	child.Sandbox = plan.next
	child.Resources.DiskGiB = plan.source.Resources.DiskGiB
	grown := &forkPlan{children: []Workspace{child}, source: plan.source, loaded: plan.loaded}
	got, err := c.callFork(ctx, grown)
	t.watch.Lap("fork")
	if err == nil {
		err = got[0].Problem.Err()
	}
	if err != nil {
		return err
	}
	switched := func(now Operation) bool { return now.Step == "drop" }
	if err := t.insistTx(ctx, switched, func(tx Tx) error { return c.recordSwitch(ctx, tx, t, plan, grown.sent(child), got) }); err != nil {
		return err
	}
	t.op.Step = "drop"
	return nil
}

func (c *Controller) recordSwitch(ctx context.Context, tx Tx, t *Task, plan *restorePlan, sent grants.Given, got []runnerapi.ChildResult) error {
	if _, err := tx.SwitchWorkspace(ctx, t.op.WorkspaceID, t.in.Epoch, plan.next.ID, plan.source, sent); err != nil {
		return err
	}
	if t.op.Kind == OpResumeWorkspace {
		if err := tx.MoveSessions(ctx, t.op.WorkspaceID, t.in.Epoch, plan.next.ID); err != nil {
			return err
		}
	}
	child := plan.workspace
	child.Sandbox = plan.next
	tx.InsertReseals(reseals(t, &forkPlan{children: []Workspace{child}, source: plan.source}, got))
	return tx.StepOperation(ctx, t.op, "drop")
}
