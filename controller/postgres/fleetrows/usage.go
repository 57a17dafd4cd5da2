package fleetrows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// takeTotals keeps the largest of what was said of a sandbox. It comes after a relation of the columns of usage_totals.
const takeTotals = `
	ON CONFLICT (sandbox_id) DO UPDATE SET cpu_seconds = greatest(t.cpu_seconds, excluded.cpu_seconds), sent_bytes = greatest(t.sent_bytes, excluded.sent_bytes),
		received_bytes = greatest(t.received_bytes, excluded.received_bytes), sampled_at = greatest(t.sampled_at, excluded.sampled_at)`

// InsertUsage notes what a runner's own sandboxes have used.
func (t *Tx) InsertUsage(ctx context.Context, runner core.RunnerID, list []runnerapi.Usage) error {
	if len(list) == 0 {
		return nil
	}
	_, err := t.Exec(ctx, `
		INSERT INTO usage_totals AS t (sandbox_id, project_id, workspace_id, cpu_seconds, sent_bytes, received_bytes)
		SELECT s.id, s.project_id, s.workspace_id, greatest(max(v.cpu_seconds), 0), greatest(max(v.sent_bytes), 0), greatest(max(v.received_bytes), 0)
		FROM jsonb_to_recordset(@rows::jsonb) AS v (sandbox_id text, cpu_seconds float8, sent_bytes bigint, received_bytes bigint)
		JOIN sandboxes s ON s.id = v.sandbox_id AND s.runner_id = @runner
		GROUP BY s.id ORDER BY s.id`+takeTotals, pgtx.Args{"rows": list, "runner": runner})
	return err
}

type lastRow struct {
	Last string    `db:"last"`
	At   time.Time `db:"at"`
}

// RollUsage moves samples of earlier versions into the totals along the key, at most limit of them. A total is the largest report, so the samples
// of a sandbox may move in parts.
func (t *Tx) RollUsage(ctx context.Context, limit int) (int, error) {
	last, err := pgtx.InOrder[lastRow](ctx, t, `SELECT u.sandbox_id AS last, u.created_at AS at FROM usage_samples u ORDER BY u.sandbox_id, u.created_at OFFSET @limit - 1 LIMIT 1`, pgtx.Args{"limit": limit})
	if err != nil {
		return 0, err
	}
	where, a := ``, pgtx.Args{}
	if len(last) > 0 {
		where, a = ` WHERE (u.sandbox_id, u.created_at) <= (@last, @at::timestamptz)`, pgtx.Args{"last": last[0].Last, "at": last[0].At}
	}
	rows, err := pgtx.InOrder[int](ctx, t, `
		WITH gone AS (
			DELETE FROM usage_samples u`+where+` RETURNING u.*
		), kept AS (
			INSERT INTO usage_totals AS t (sandbox_id, project_id, workspace_id, cpu_seconds, sent_bytes, received_bytes, sampled_at)
			SELECT g.sandbox_id, min(g.project_id), min(g.workspace_id), max(g.cpu_seconds), max(g.sent_bytes), max(g.received_bytes), max(g.created_at)
			FROM gone g GROUP BY g.sandbox_id ORDER BY g.sandbox_id`+takeTotals+`
		)
		SELECT count(*)::int AS moved FROM gone`, a)
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	return rows[0], nil
}

type sumRow struct {
	Workspaces     int        `db:"workspaces"`
	Checkpoints    int        `db:"checkpoints"`
	CPUSeconds     float64    `db:"cpu_seconds"`
	GiBSeconds     float64    `db:"gib_seconds"`
	StoredBytes    int64      `db:"stored_bytes"`
	SentBytes      int64      `db:"sent_bytes"`
	ReceivedBytes  int64      `db:"received_bytes"`
	PreparedCPU    float64    `db:"prepared_cpu"`
	PreparedMemory int64      `db:"prepared_memory"`
	SampledAt      *time.Time `db:"sampled_at"`
}

// living are the states of checkpoints that count.
var living = pgtx.Quoted(core.CheckpointCaptured, core.CheckpointSealed)

// usageOf sums over the relations ws (ids of workspaces) and cps (ids of checkpoints). Reports are cumulative: the largest of a
// sandbox counts. A sample of an earlier version is in usage_samples until it is in the totals.
func (t *Tx) usageOf(ctx context.Context, with string, a pgtx.Args) (controller.Usage, error) {
	row, err := pgtx.One[sumRow](ctx, t, nil, with+`, used AS (
			SELECT max(u.cpu_seconds) AS cpu, max(u.sent_bytes) AS sent, max(u.received_bytes) AS received, max(u.at) AS at FROM (
				SELECT sandbox_id, cpu_seconds, sent_bytes, received_bytes, sampled_at AS at FROM usage_totals WHERE workspace_id IN (SELECT id FROM ws)
				UNION ALL SELECT sandbox_id, cpu_seconds, sent_bytes, received_bytes, created_at FROM usage_samples WHERE workspace_id IN (SELECT id FROM ws)
			) u GROUP BY u.sandbox_id
		)
		SELECT (SELECT count(*) FROM ws) AS workspaces, u.*, m.*, c.*, p.*
		FROM (SELECT coalesce(sum(cpu), 0)::float8 AS cpu_seconds, coalesce(sum(sent), 0)::bigint AS sent_bytes,
				coalesce(sum(received), 0)::bigint AS received_bytes, max(at) AS sampled_at FROM used) AS u,
			(SELECT coalesce(sum(extract(epoch FROM coalesce(s.ended_at, now()) - s.created_at) * s.memory_mib / 1024), 0)::float8 AS gib_seconds
				FROM sandboxes s WHERE s.workspace_id IN (SELECT id FROM ws)) AS m,
			(SELECT count(*) AS checkpoints, coalesce(sum(c.delta_bytes + c.device_state_bytes + c.disk_bytes), 0)::bigint AS stored_bytes
				FROM checkpoints c WHERE c.id IN (SELECT id FROM cps) AND c.state IN (`+living+`)) AS c,
			(SELECT coalesce(sum(p.wasted_cpu_seconds), 0)::float8 AS prepared_cpu, coalesce(sum(p.memory_bytes), 0)::bigint AS prepared_memory
				FROM prepared_checkpoints p WHERE p.checkpoint_id IN (SELECT id FROM cps)) AS p`, a)
	return controller.Usage{
		Workspaces: row.Workspaces, Checkpoints: row.Checkpoints, CPUSeconds: row.CPUSeconds, GiBSeconds: row.GiBSeconds, StoredBytes: row.StoredBytes,
		SentBytes: row.SentBytes, ReceivedBytes: row.ReceivedBytes, SampledAt: pgtx.TimeOf(row.SampledAt), PreparedCPUSeconds: row.PreparedCPU, PreparedMemoryBytes: row.PreparedMemory,
	}, err
}

// WorkspaceUsage sums one workspace, with the checkpoints that were taken of it.
func (t *Tx) WorkspaceUsage(ctx context.Context, id core.WorkspaceID) (controller.Usage, error) {
	return t.usageOf(ctx, `WITH ws AS (SELECT @id::text AS id), cps AS (SELECT c.id FROM checkpoints c WHERE c.workspace_id = @id)`, pgtx.Args{"id": id})
}

// CheckpointUsage sums a subtree: its checkpoints, and the workspaces that were forked from one of them.
func (t *Tx) CheckpointUsage(ctx context.Context, id core.CheckpointID) (controller.Usage, error) {
	return t.usageOf(ctx, `
		WITH RECURSIVE cps AS (
			SELECT c.id FROM checkpoints c WHERE c.id = @id
			UNION ALL SELECT c.id FROM checkpoints c JOIN cps ON c.parent_id = cps.id
		), ws AS (SELECT w.id FROM workspaces w WHERE w.parent_checkpoint_id IN (SELECT id FROM cps))`, pgtx.Args{"id": id})
}
