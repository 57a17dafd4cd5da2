package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/upkeep"
	"github.com/coppice-dev/coppice/core"
)

// Each statement here looks at a bounded number of rows along an index.

type sweptRow struct {
	Last    string `db:"last"` // that was looked at; empty: there were none
	Changed int    `db:"changed"`
}

// sweepSessions: rows of sessions that nobody can reach any more are those whose workspace has ended, or has had another machine for some time.
const sweepSessions = `
	WITH next AS MATERIALIZED (SELECT s.id, s.sandbox_id, s.workspace_id FROM sessions s WHERE s.id > @after ORDER BY s.id LIMIT @limit),
	dead AS MATERIALIZED (
		SELECT n.id, n.sandbox_id FROM next n
		CROSS JOIN LATERAL (SELECT * FROM sandboxes x WHERE x.id = n.sandbox_id LIMIT 1) b
		CROSS JOIN LATERAL (SELECT * FROM workspaces x WHERE x.id = n.workspace_id LIMIT 1) w
		WHERE w.ended_at < now() - make_interval(secs => @kept)
			OR w.sandbox_id IS DISTINCT FROM b.id AND b.epoch < w.epoch AND b.ended_at < now() - make_interval(secs => @kept)
	), gone AS (
		DELETE FROM sessions WHERE id = ANY(ARRAY(
			SELECT s.id FROM dead d JOIN sessions s ON s.id = d.id AND s.sandbox_id = d.sandbox_id FOR UPDATE OF s SKIP LOCKED)) RETURNING id
	)
	SELECT coalesce(max(n.id), '') AS last, (SELECT count(*) FROM gone) AS changed FROM next n`

// SweepSessions walks along the primary key.
func (t *tx) SweepSessions(ctx context.Context, after core.SessionID, kept time.Duration, limit int) (core.SessionID, int, error) {
	row, err := pgtx.One[sweptRow](ctx, t, nil, sweepSessions, pgtx.Args{"after": after, "kept": kept.Seconds(), "limit": limit})
	return core.SessionID(row.Last), row.Changed, err
}

const countSessions = `
	WITH next AS MATERIALIZED (
		SELECT p.id, (SELECT count(*) FROM (SELECT FROM sessions s WHERE s.project_id = p.id LIMIT @most) few) AS rows FROM (SELECT id FROM projects WHERE id > @after ORDER BY id LIMIT @limit) p
	), gone AS (
		DELETE FROM session_counts c USING next n WHERE c.project_id = n.id AND n.rows = 0
	), saved AS (
		INSERT INTO session_counts (project_id, rows) SELECT n.id, n.rows FROM next n WHERE n.rows > 0
		ON CONFLICT (project_id) DO UPDATE SET rows = excluded.rows, counted_at = now()
	)
	SELECT coalesce(max(n.id), '') AS last, count(*) AS changed FROM next n`

// CountSessions counts along an index that begins with the project.
func (t *tx) CountSessions(ctx context.Context, after core.ProjectID, limit int) (core.ProjectID, error) {
	row, err := pgtx.One[sweptRow](ctx, t, nil, countSessions, pgtx.Args{"after": after, "limit": limit, "most": controller.MaxSessionsCounted})
	return core.ProjectID(row.Last), err
}

const sweepExpired = `
	DELETE FROM attach_tokens WHERE hash = ANY(ARRAY(
		SELECT hash FROM attach_tokens WHERE expires_at < now() - interval '1 hour' ORDER BY expires_at LIMIT @limit FOR UPDATE SKIP LOCKED))`

// SweepTokens goes by their expiry.
func (t *tx) SweepTokens(ctx context.Context, limit int) (int, error) {
	n, err := t.Exec(ctx, sweepExpired, pgtx.Args{"limit": limit})
	return int(n), err
}

const pruneDeleted = `SELECT c.id FROM checkpoints c WHERE c.state = 'deleted' AND NOT c.pruned AND c.id > @after ORDER BY c.id LIMIT @limit`

// PruneDeleted walks along an index of what is deleted and still shown.
func (t *tx) PruneDeleted(ctx context.Context, after core.CheckpointID, limit int) (core.CheckpointID, error) {
	ids, err := pgtx.Many[core.CheckpointID](ctx, t, pruneDeleted, pgtx.Args{"after": after, "limit": limit})
	if err != nil || len(ids) == 0 {
		return "", err
	}
	return ids[len(ids)-1], t.prune(ctx, ids)
}

// MakePartitions has the owner do it: nobody else may.
func (t *tx) MakePartitions(ctx context.Context, table upkeep.Table, keep time.Duration, batch int) (int, error) {
	return pgtx.One[int](ctx, t, nil, `SELECT coppice_make_partitions_of(@table, make_interval(secs => @keep), @batch::int) AS moved`,
		pgtx.Args{"table": string(table), "keep": keep.Seconds(), "batch": batch})
}
