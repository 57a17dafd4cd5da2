package idle

import (
	"context"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// How many workspaces a round suspends, how many of them are of one project, and how many are suspended at the same time.
const (
	overdueBatch       = 64
	overdueOfProject   = 8
	overdueConcurrency = 8
)

// SuspendOverdue suspends workspaces whose time is up, if their policy says so. Such a suspension
// obeys the quotas of its project, like any other. If it fails, the workspace keeps running, and
// the suspension is tried again after a pause.
func (k *Keeper) SuspendOverdue(ctx context.Context) error {
	var due []model.Workspace
	err := k.store.InSystem(ctx, func(tx Tx) (err error) {
		due, err = tx.ClaimOverdue(ctx, overdueOfProject, overdueBatch)
		return err
	})
	if err != nil {
		return err
	}
	var group errgroup.Group
	group.SetLimit(overdueConcurrency)
	for _, w := range due {
		group.Go(func() error {
			switch err := k.cfg.Suspend(ctx, w, stillOverdue(w.ID)); core.CodeOf(err) {
			case "":
				k.cfg.Log.InfoContext(ctx, "workspace suspended at the end of its time", "workspace_id", w.ID)
			case core.CodeStateConflict, core.CodeWorkspaceNotReady, core.CodeControllerStopping: // another request was faster
			default:
				k.cfg.Log.WarnContext(ctx, "workspace was not suspended at the end of its time", "workspace_id", w.ID, "err", err)
			}
			return nil
		})
	}
	return group.Wait()
}

// stillOverdue refuses to suspend a workspace that was given more time.
func stillOverdue(id core.WorkspaceID) Check {
	return func(ctx context.Context, tx CheckTx) error {
		if due, err := tx.Overdue(ctx, id); err != nil || due {
			return err
		}
		return core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s was given more time", id)
	}
}
