package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

// MaxAnnotations bounds a checkpoint's annotations, as JSON, in bytes.
const MaxAnnotations = 16 << 10

// read runs a query in a project's scope.
func read[T any](ctx context.Context, c *Controller, scope Scope, query func(Tx) (T, error)) (T, error) {
	var out T
	err := c.store.InTx(ctx, scope, func(tx Tx) error {
		var err error
		out, err = query(tx)
		return err
	})
	return out, err
}

// Workspace returns one.
func (c *Controller) Workspace(ctx context.Context, project core.ProjectID, id core.WorkspaceID) (Workspace, error) {
	return read(ctx, c, InProject(project), func(tx Tx) (Workspace, error) { return tx.Workspace(ctx, id) })
}

// Workspaces lists, newest first.
func (c *Controller) Workspaces(ctx context.Context, project core.ProjectID, f WorkspaceFilter) ([]Workspace, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]Workspace, error) { return tx.Workspaces(ctx, f) })
}

// PatchWorkspace changes labels, expiry and rules.
func (c *Controller) PatchWorkspace(ctx context.Context, project core.ProjectID, id core.WorkspaceID, p WorkspacePatch) (Workspace, error) {
	w, err := read(ctx, c, InProject(project), func(tx Tx) (Workspace, error) {
		if p.Allow != nil {
			if err := tx.LockRules(ctx, project); err != nil {
				return Workspace{}, err
			}
		}
		w, err := tx.PatchWorkspace(ctx, id, p)
		if err == nil && p.Allow != nil {
			if err = grants.ChangeRules(ctx, tx, w.ForGrants(), *p.Allow); err == nil {
				w, err = tx.Workspace(ctx, id)
			}
		}
		if err == nil {
			err = mayChangeTTL(ctx, w, p)
		}
		if err == nil && p.OnIdle != "" && w.Rest.IdleAfter == 0 {
			err = core.Errorf(core.Invalid, core.CodeInvalidField, "on_idle: it needs idle_seconds, and workspace %s has none", id)
		}
		if err == nil && len(w.Labels) > MaxLabels {
			err = core.Errorf(core.Invalid, core.CodeInvalidField, "labels: there would be %d; at most %d are kept", len(w.Labels), MaxLabels)
		}
		return w, err
	})
	if err == nil && p.Allow != nil {
		w = c.deliverRules(ctx, w)
	}
	return w, err
}

// MaxLabels bounds the labels of one object.
const MaxLabels = 64

// Reseals lists the reseal reports of a workspace, newest first.
func (c *Controller) Reseals(ctx context.Context, project core.ProjectID, id core.WorkspaceID, p Page) ([]ResealRecord, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]ResealRecord, error) {
		if _, err := tx.Workspace(ctx, id); err != nil {
			return nil, err
		}
		return tx.Reseals(ctx, id, p)
	})
}

// Checkpoint returns one.
func (c *Controller) Checkpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID) (Checkpoint, error) {
	cp, err := read(ctx, c, InProject(project), func(tx Tx) (Checkpoint, error) { return tx.Checkpoint(ctx, id) })
	c.ShowQueued(&cp)
	return cp, err
}

// Checkpoints lists.
func (c *Controller) Checkpoints(ctx context.Context, project core.ProjectID, f CheckpointFilter) ([]Checkpoint, error) {
	return c.checkpoints(ctx, project, func(tx Tx) ([]Checkpoint, error) {
		if f.WorkspaceID != "" && f.After == "" {
			if _, err := tx.Workspace(ctx, f.WorkspaceID); err != nil {
				return nil, err
			}
		}
		return tx.Checkpoints(ctx, f)
	})
}

func (c *Controller) checkpoints(ctx context.Context, project core.ProjectID, query func(Tx) ([]Checkpoint, error)) ([]Checkpoint, error) {
	list, err := read(ctx, c, InProject(project), query)
	for i := range list {
		c.ShowQueued(&list[i])
	}
	return list, err
}

// Children lists the direct children of a checkpoint, oldest first. A deleted child is in the list as long as it is an ancestor.
func (c *Controller) Children(ctx context.Context, project core.ProjectID, id core.CheckpointID, p Page) ([]Checkpoint, error) {
	return c.checkpoints(ctx, project, func(tx Tx) ([]Checkpoint, error) {
		if _, err := tx.Checkpoint(ctx, id); err != nil {
			return nil, err
		}
		return tx.Checkpoints(ctx, CheckpointFilter{
			Page: p, Parent: id, OldestFirst: true,
			States: []core.CheckpointState{core.CheckpointCaptured, core.CheckpointSealed, core.CheckpointDeleted},
		})
	})
}

// Lineage lists the path from a checkpoint to its root.
func (c *Controller) Lineage(ctx context.Context, project core.ProjectID, id core.CheckpointID, p Page) ([]Ancestor, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]Ancestor, error) {
		list, err := tx.Lineage(ctx, id, core.CheckpointID(p.After), p.Limit)
		if err == nil && len(list) == 0 && p.After == "" {
			_, err = tx.Checkpoint(ctx, id)
		}
		return list, err
	})
}

// Tree lists a checkpoint and everything that grew from it, breadth first.
func (c *Controller) Tree(ctx context.Context, project core.ProjectID, id core.CheckpointID, p TreePage) ([]TreeNode, error) {
	list, err := read(ctx, c, InProject(project), func(tx Tx) ([]TreeNode, error) { return tx.Tree(ctx, id, p) })
	for i := range list {
		c.ShowQueued(&list[i].Checkpoint)
	}
	return list, err
}

// PatchCheckpoint changes name, labels and annotations.
func (c *Controller) PatchCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID, p CheckpointPatch) (Checkpoint, error) {
	return read(ctx, c, InProject(project), func(tx Tx) (Checkpoint, error) {
		cp, err := tx.PatchCheckpoint(ctx, id, p)
		c.ShowQueued(&cp)
		switch {
		case err != nil:
		case len(cp.Labels) > MaxLabels:
			err = core.Errorf(core.Invalid, core.CodeInvalidField, "labels: there would be %d; at most %d are kept", len(cp.Labels), MaxLabels)
		case SizeOf(cp.Annotations) > MaxAnnotations:
			err = core.Errorf(core.Invalid, core.CodeInvalidField, "annotations: there would be %d bytes; at most %d are kept", SizeOf(cp.Annotations), MaxAnnotations)
		}
		return cp, err
	})
}

// Images lists the images of runners.
func (c *Controller) Images(ctx context.Context, project core.ProjectID, p Page) ([]Image, error) {
	if p.After == "" {
		if err := c.askImages(ctx, false); err != nil {
			c.log.InfoContext(ctx, "images as they were last known", "err", err)
		}
	}
	return read(ctx, c, InProject(project), func(tx Tx) ([]Image, error) { return tx.Images(ctx, p) })
}

// DrainRunner keeps new sandboxes away from a runner, or stops doing so. Its present sandboxes stay.
func (c *Controller) DrainRunner(ctx context.Context, id core.RunnerID, on bool) (Runner, error) {
	r, err := read(ctx, c, System(), func(tx Tx) (Runner, error) { return tx.DrainRunner(ctx, id, on) })
	if err == nil {
		c.log.InfoContext(ctx, "runner drains or not", "runner_id", id, "draining", on)
	}
	return r, err
}

// Runners lists.
func (c *Controller) Runners(ctx context.Context, project core.ProjectID, p Page) ([]Runner, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]Runner, error) { return tx.Runners(ctx, p) })
}
