package controller

import (
	"context"

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

// Reseals lists the reseal reports of a workspace, newest first.
func (c *Controller) Reseals(ctx context.Context, project core.ProjectID, id core.WorkspaceID, p Page) ([]ResealRecord, error) {
	return read(ctx, c, InProject(project), func(tx Tx) ([]ResealRecord, error) {
		if _, err := tx.Workspace(ctx, id); err != nil {
			return nil, err
		}
		return tx.Reseals(ctx, id, p)
	})
}
