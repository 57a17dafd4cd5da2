package controller

import (
	"context"

	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/core"
)

// Previews returns the previews of workspaces.
func (c *Controller) Previews() *previews.Manager { return c.previews }

// newPreviews makes the manager of a controller.
func newPreviews(c *Controller) *previews.Manager {
	return previews.New(previews.Config{Reach: c.reach, Used: c.idle.Used},
		partStore[previews.Tx]{c.store.Store, func(tx AllTx) previews.Tx { return tx }}, c.runners)
}

// keyEnded hears that a key was revoked, here or at another controller.
func (c *Controller) keyEnded(id core.KeyID) {
	c.Tenancy.KeyEnded(id)
	c.previews.KeyEnded(id)
}

// inheritPreviews gives children the previews that their parent workspace has now.
func inheritPreviews(ctx context.Context, tx Tx, source Checkpoint, children []Workspace) error {
	var ids []core.WorkspaceID
	for _, child := range children {
		ids = append(ids, child.ID)
	}
	return previews.Inherit(ctx, tx, source.ProjectID, source.WorkspaceID, ids)
}
