package controller

import (
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
)

// How many workspaces a round suspends, how many of them are of one project, and how many are suspended at the same time.
const (
	overdueBatch       = 64
	overdueOfProject   = 8
	overdueConcurrency = 8
)

// TTLTx has the statements for workspaces that are suspended at the end of their time.
type TTLTx interface {
	// ClaimOverdue returns ready workspaces to suspend whose time is up, at most each of one project. A workspace is due again after growing pauses.
	ClaimOverdue(ctx context.Context, each, limit int) ([]Workspace, error)
	// Overdue reports whether a ready workspace is to be suspended because its time is up. Pauses do not count.
	Overdue(ctx context.Context, id core.WorkspaceID) (bool, error)
	// RenewTTL gives a workspace that is suspended at the end of its time all of its time again.
	RenewTTL(ctx context.Context, id core.WorkspaceID) error
}

// suspendOverdue suspends workspaces whose time is up, if their policy says so. Such a suspension
// obeys the quotas of its project, like any other. If it fails, the workspace keeps running, and
// the suspension is tried again after a pause.
func (c *Controller) suspendOverdue(ctx context.Context) error {
	due, err := read(ctx, c, System(), func(tx Tx) ([]Workspace, error) { return tx.ClaimOverdue(ctx, overdueOfProject, overdueBatch) })
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(overdueConcurrency)
	for _, w := range due {
		group.Go(func() error {
			switch err := c.suspendAtTTL(ctx, w); core.CodeOf(err) {
			case "":
				c.log.InfoContext(ctx, "workspace suspended at the end of its time", "workspace_id", w.ID)
			case core.CodeStateConflict, core.CodeWorkspaceNotReady, core.CodeControllerStopping: // another request was faster
			default:
				c.log.WarnContext(ctx, "workspace was not suspended at the end of its time", "workspace_id", w.ID, "err", err)
			}
			return nil
		})
	}
	return group.Wait()
}

func (c *Controller) suspendAtTTL(ctx context.Context, w Workspace) error {
	stillDue := func(ctx context.Context, tx Tx) error {
		if due, err := tx.Overdue(ctx, w.ID); err != nil || due {
			return err
		}
		return core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s was given more time", w.ID)
	}
	_, err := c.beginCapture(ctx, w.ProjectID, w.ID, suspension(stillDue))
	return err
}
