package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/postgres/tenantrows"
	"github.com/coppice-dev/coppice/controller/transfer"
	"github.com/coppice-dev/coppice/core"
)

// BeginImport inserts the row that must be there before any object is.
func (t *tx) BeginImport(ctx context.Context, project core.ProjectID, id core.CheckpointID, lease time.Duration) (string, error) {
	return pgtx.One[string](ctx, t, nil, `
		INSERT INTO imports (checkpoint_id, project_id, lease_expires_at) VALUES (@id, @project, now() + make_interval(secs => @lease))
		RETURNING coppice_seal_prefix(project_id, checkpoint_id, 1) AS prefix`, pgtx.Args{"id": id, "project": project, "lease": lease.Seconds()})
}

// RenewImport changes nothing of one that was given up.
func (t *tx) RenewImport(ctx context.Context, id core.CheckpointID, lease time.Duration) error {
	n, err := t.Exec(ctx, `UPDATE imports SET lease_expires_at = now() + make_interval(secs => @lease) WHERE checkpoint_id = @id`,
		pgtx.Args{"id": id, "lease": lease.Seconds()})
	if err == nil && n == 0 {
		err = transfer.ErrImportLost
	}
	return err
}

// CommitImport makes the row of the checkpoint go through its states at once.
func (t *tx) CommitImport(ctx context.Context, cp controller.Checkpoint, in runnerapi.CommitSeal) (controller.Checkpoint, error) {
	prefix, err := pgtx.One[string](ctx, t, transfer.ErrImportLost, `
		SELECT coppice_seal_prefix(project_id, checkpoint_id, 1) AS prefix FROM imports WHERE checkpoint_id = @id FOR UPDATE`, pgtx.Args{"id": cp.ID})
	if err != nil {
		return cp, err
	}
	if err := t.InsertCheckpoint(ctx, cp); err != nil {
		return cp, err
	}
	bytes := cp.DeltaBytes + cp.DeviceStateBytes + cp.DiskBytes
	if err := t.Admit(ctx, cp.ProjectID, controller.Demand{Checkpoint: cp.ID, CheckpointBytes: bytes}); err != nil {
		return cp, err
	}
	if err := t.admitDeleted(ctx, cp.ProjectID); err != nil {
		return cp, err
	}
	if _, err := t.Exec(ctx, `
		UPDATE checkpoints SET state = @to, captured_at = now(), delta_bytes = @delta, device_state_bytes = @device, disk_bytes = @disk, pause_ms = @pause,
			timings = @timings, parent_reseal = @reseal, stale_processes = @stale
		WHERE id = @id`,
		pgtx.Args{
			"id": cp.ID, "to": core.CheckpointCaptured, "delta": cp.DeltaBytes, "device": cp.DeviceStateBytes, "disk": cp.DiskBytes, "pause": cp.PauseMS,
			"timings": pgtx.OrNone(cp.Timings), "reseal": pgtx.OrNone(cp.ParentReseal), "stale": pgtx.OrNone(cp.StaleProcesses),
		}); err != nil {
		return cp, err
	}
	if err := t.CommitSeal(ctx, controller.SealAttempt{Checkpoint: cp.ID, Project: cp.ProjectID, Attempt: 1, Prefix: prefix}, in); err != nil {
		return cp, err
	}
	if _, err := t.Exec(ctx, `DELETE FROM imports WHERE checkpoint_id = @id`, pgtx.Args{"id": cp.ID}); err != nil {
		return cp, err
	}
	return t.Checkpoint(ctx, cp.ID)
}

type deletedRow struct {
	Bytes int64 `db:"bytes"`
	Limit int64 `db:"most"`
}

// admitDeleted refuses an import while the store still keeps as many bytes of deleted checkpoints of the project as its quota allows live
// ones. It follows Admit, which holds the row of the quotas, so that imports at the same time are counted one after the other.
func (t *tx) admitDeleted(ctx context.Context, project core.ProjectID) error {
	row, err := pgtx.One[deletedRow](ctx, t, tenantrows.NoProject(project), `
		SELECT q.max_checkpoint_bytes AS most, coalesce((
			SELECT sum(bytes) FROM (
				SELECT key, bytes FROM store_objects WHERE condemned_at IS NOT NULL AND project_id = @project
				UNION
				SELECT o.key, o.bytes FROM store_released r JOIN store_objects o ON o.key = r.key WHERE r.project_id = @project AND `+needless+`
			) kept), 0)::bigint AS bytes
		FROM quotas q WHERE q.project_id = @project`, pgtx.Args{"project": project})
	if err != nil || row.Bytes < row.Limit {
		return err
	}
	return core.Errorf(core.Exhausted, core.CodeQuotaExceeded,
		"the store still keeps %d bytes of checkpoints that the project has deleted, and no more than its quota checkpoint_bytes, %d, may wait there; "+
			"repeat the import when the store has removed them", row.Bytes, row.Limit)
}

// EndImport leaves debris again where there is no checkpoint: what was left before may have been removed while more was written.
func (t *tx) EndImport(ctx context.Context, project core.ProjectID, id core.CheckpointID) (bool, error) {
	if _, err := t.Exec(ctx, `DELETE FROM imports WHERE checkpoint_id = @id`, pgtx.Args{"id": id}); err != nil {
		return false, err
	}
	committed, err := pgtx.One[bool](ctx, t, nil, `SELECT EXISTS (SELECT 1 FROM checkpoints WHERE id = @id) AS committed`, pgtx.Args{"id": id})
	if err != nil || committed {
		return committed, err
	}
	_, err = t.Exec(ctx, `
		INSERT INTO store_debris (prefix, project_id) VALUES (coppice_seal_prefix(@project, @id, 1), @project)
		ON CONFLICT (prefix) DO UPDATE SET since = now()`, pgtx.Args{"project": project, "id": id})
	return false, err
}

// AbandonImports ends those that nobody renews, and frees the keys of their requests.
func (t *tx) AbandonImports(ctx context.Context) ([]core.CheckpointID, error) {
	ids, err := pgtx.Many[core.CheckpointID](ctx, t, `DELETE FROM imports WHERE lease_expires_at < now() RETURNING checkpoint_id AS id`, pgtx.Args{})
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	_, err = t.Exec(ctx, `DELETE FROM idempotency_keys WHERE object_id = ANY(@ids::text[])`, pgtx.Args{"ids": pgtx.Texts(ids)})
	return ids, err
}
