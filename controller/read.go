package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

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
		if err == nil && len(w.Labels) > model.MaxLabels {
			err = core.Errorf(core.Invalid, core.CodeInvalidField, "labels: there would be %d; at most %d are kept", len(w.Labels), model.MaxLabels)
		}
		return w, err
	})
	if err == nil && p.Allow != nil {
		w = c.deliverRules(ctx, w)
	}
	return w, err
}

// Reseals lists the reseal reports of a workspace, newest first.
func (c *Controller) Reseals(ctx context.Context, project core.ProjectID, id core.WorkspaceID, p Page) ([]ResealRecord, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]ResealRecord, error) {
		if _, err := tx.Workspace(ctx, id); err != nil {
			return nil, err
		}
		return tx.Reseals(ctx, id, p)
	})
}
