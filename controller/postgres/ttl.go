package postgres

import (
	"context"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// expired and overdue are conditions on the relation w. Their words are literals, and no arguments: so the planner sees that the partial
// indexes apply, whatever the arguments are.
const (
	expired = ` w.expires_at <= now() AND w.ended_at IS NULL AND w.on_ttl = 'terminate'`
	overdue = ` w.expires_at <= now() AND w.ended_at IS NULL AND w.on_ttl = 'suspend' AND w.state = 'ready'`
)

const expiredWorkspaces = `
	SELECT` + workspaceColumns + ` FROM workspaces w` + workspaceJoins + `
	WHERE` + expired + ` AND w.state = ANY(@from::text[]) ORDER BY w.expires_at LIMIT @limit`

// dueNow are the workspaces whose next try is due, in the order of the index. (coalesce would keep the planner from the index: under a policy
// it uses no expression that could leak, and counts coalesce among them.)
const dueNow = `
	SELECT w.id, w.project_id, greatest(w.suspend_next_at, w.expires_at) AS at FROM workspaces w
	WHERE` + overdue + ` AND greatest(w.suspend_next_at, w.expires_at) <= now() ORDER BY greatest(w.suspend_next_at, w.expires_at)`

// ExpiredWorkspaces lists what is too old, of all projects when the scope is the system's.
func (t *tx) ExpiredWorkspaces(ctx context.Context, limit int) ([]controller.Workspace, error) {
	return pgtx.Planned(t, func() ([]controller.Workspace, error) {
		return t.plainWorkspaces(ctx, expiredWorkspaces, pgtx.Args{"limit": limit, "from": pgtx.Texts(core.WorkspaceTerminating.Sources())})
	})
}

// ClaimOverdue takes the first few of each project. For the rows that it has locked it asks for the time alone: with the whole condition
// the planner would read all of the index instead of the keys. Overdue asks for the rest.
func (t *tx) ClaimOverdue(ctx context.Context, each, limit int) ([]controller.Workspace, error) {
	return pgtx.Planned(t, func() ([]controller.Workspace, error) {
		return t.plainWorkspaces(ctx, `
			WITH due AS MATERIALIZED (`+dueNow+`
			), few AS (
				SELECT id FROM (SELECT id, at, row_number() OVER (PARTITION BY project_id ORDER BY at) AS n FROM due) AS ranked
				WHERE n <= @each ORDER BY at LIMIT @limit
			), locked AS (
				SELECT w.id FROM workspaces w WHERE w.id = ANY(ARRAY(SELECT id FROM few)) AND w.expires_at <= now() FOR UPDATE SKIP LOCKED
			), w AS (
				UPDATE workspaces SET suspend_tries = suspend_tries + 1,
					suspend_next_at = now() + least(interval '1 hour', interval '1 minute' * 2 ^ least(suspend_tries, 6))
				WHERE id = ANY(ARRAY(SELECT id FROM locked)) RETURNING *
			)
			SELECT`+workspaceColumns+` FROM w`+workspaceJoins+` ORDER BY w.expires_at`, pgtx.Args{"each": each, "limit": limit})
	})
}

// Overdue probes the key.
func (t *tx) Overdue(ctx context.Context, id core.WorkspaceID) (bool, error) {
	n, err := t.Exec(ctx, `SELECT FROM workspaces w WHERE w.id = @id AND`+overdue, pgtx.Args{"id": id})
	return n > 0, err
}

// RenewTTL starts the time of a workspace again, if it ends in a suspension.
func (t *tx) RenewTTL(ctx context.Context, id core.WorkspaceID) error {
	_, err := t.Exec(ctx, `UPDATE workspaces SET expires_at = now() + coalesce(make_interval(secs => ttl_seconds), expires_at - created_at),
			suspend_next_at = NULL, suspend_tries = 0
		WHERE id = @id AND on_ttl = 'suspend' AND expires_at IS NOT NULL`, pgtx.Args{"id": id})
	return err
}
