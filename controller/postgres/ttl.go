package postgres

import (
	"context"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// OverdueWorkspaces lists what runs and is to be suspended because its time is up.
func (t *tx) OverdueWorkspaces(ctx context.Context, ids []core.WorkspaceID, limit int) ([]controller.Workspace, error) {
	where := ""
	if ids != nil {
		where = ` AND w.id = ANY(@ids::text[])`
	}
	return t.workspaces(ctx, `
		SELECT`+workspaceColumns+` FROM workspaces w`+workspaceJoins+`
		WHERE w.expires_at <= now() AND w.ended_at IS NULL AND w.on_ttl = 'suspend' AND w.state = 'ready'`+where+` ORDER BY w.expires_at LIMIT @limit`,
		args{"limit": limit, "ids": texts(ids)})
}

// RenewTTL starts the time of a workspace anew, if it ends in a suspension.
func (t *tx) RenewTTL(ctx context.Context, id core.WorkspaceID) error {
	_, err := t.exec(ctx, `
		UPDATE workspaces SET expires_at = now() + make_interval(secs => ttl_seconds)
		WHERE id = @id AND on_ttl = 'suspend' AND ttl_seconds IS NOT NULL AND expires_at IS NOT NULL`, args{"id": id})
	return err
}
