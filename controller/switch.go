package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/identity"
	"github.com/coppice-dev/coppice/core"
)

// switchInput is the input of an operation that puts a workspace into its next epoch, in another sandbox.
type switchInput struct {
	Source  core.CheckpointID `json:"source,omitempty"`  // restored from
	Epoch   int64             `json:"epoch,omitempty"`   // of the workspace before
	Sandbox core.SandboxID    `json:"sandbox,omitempty"` // in that epoch; empty: it has none
	Next    core.SandboxID    `json:"next,omitempty"`    // the new one

	plan *restorePlan
}

// restorePlan has what a restore in place or a resume needs from the rows.
type restorePlan struct {
	workspace Workspace // in its old epoch and sandbox
	next      Sandbox
	source    Checkpoint
	loaded    bool // as in forkcall.Plan
}

func (in *switchInput) made() made { return made{next: in.Next} }

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
	addresses, err := identity.Addresses(ctx, tx, source.Tree, []Runner{runner}, source.Address, old)
	if err != nil {
		return Sandbox{}, err
	}
	id, err := identity.New(identity.Hostname(w.Name, plain), addresses[0])
	if err != nil {
		return Sandbox{}, err
	}
	next := Sandbox{
		ID: core.NewID[core.SandboxID](), ProjectID: w.ProjectID, WorkspaceID: w.ID, Epoch: w.Epoch + 1, RunnerID: runner.Info.RunnerID,
		Endpoint: runner.Endpoint, Resources: source.Resources, Identity: id, EgressKey: runner.Info.EgressKey, EgressURL: runner.Info.EgressURL, Tree: source.Tree,
	}
	tx.InsertSandboxes([]Sandbox{next})
	return next, fleet.Occupy(ctx, tx, runner)
}

func (in *switchInput) load(ctx context.Context, c *Controller, t *task) (*restorePlan, error) {
	if in.plan != nil {
		return in.plan, nil
	}
	plan := &restorePlan{loaded: true}
	err := t.Load(ctx, func(tx Tx) error {
		var err error
		if plan.workspace, err = tx.Workspace(ctx, t.Op().WorkspaceID); err != nil {
			return err
		}
		if plan.source, err = c.source(ctx, tx, in.Source); err != nil {
			return err
		}
		list, err := tx.Sandboxes(ctx, []core.SandboxID{in.Sandbox, in.Next})
		for _, s := range list {
			if s.ID == in.Next {
				plan.next = s
			} else {
				plan.workspace.Sandbox = s
			}
		}
		return err
	})
	return plan, err
}

// switchSandbox restores the new sandbox and puts the workspace into it. With sessions, its sessions go on there.
func (in *switchInput) switchSandbox(ctx context.Context, c *Controller, t *task, plan *restorePlan, sessions bool) error {
	child := plan.workspace
	child.Sandbox = plan.next
	child.Resources.DiskGiB = plan.source.Resources.DiskGiB
	fork := &forkcall.Plan{Children: []Workspace{child}, Source: plan.source, Loaded: plan.loaded}
	got, err := c.forks.Fork(ctx, fork)
	t.Lap("fork")
	if err == nil {
		err = got[0].Problem.Err()
	}
	if err != nil {
		return err
	}
	return t.Advance(ctx, "drop", func(tx Tx) error { return in.record(ctx, tx, t, plan, got, sessions) })
}

func (in *switchInput) record(ctx context.Context, tx Tx, t *task, plan *restorePlan, got []forkcall.Child, sessions bool) error {
	workspace := t.Op().WorkspaceID
	if _, err := tx.SwitchWorkspace(ctx, workspace, in.Epoch, plan.next.ID, plan.source, got[0].Given); err != nil {
		return err
	}
	if sessions {
		if err := tx.MoveSessions(ctx, workspace, in.Epoch, plan.next.ID); err != nil {
			return err
		}
	}
	child := plan.workspace
	child.Sandbox = plan.next
	tx.InsertReseals(reseals(t, &forkcall.Plan{Children: []Workspace{child}, Source: plan.source}, got))
	return nil
}
