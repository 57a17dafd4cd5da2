package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// BeginImport inserts the row that must be there before any object is.
func (t *tx) BeginImport(ctx context.Context, project core.ProjectID, id core.CheckpointID, lease time.Duration) (string, error) {
	row, err := one[prefixRow](ctx, t, nil, `
		INSERT INTO imports (checkpoint_id, project_id, lease_expires_at) VALUES (@id, @project, now() + make_interval(secs => @lease))
		RETURNING coppice_seal_prefix(project_id, checkpoint_id, 1) AS prefix`, args{"id": id, "project": project, "lease": lease.Seconds()})
	return row.Prefix, err
}

// RenewImport changes nothing of one that was given up.
func (t *tx) RenewImport(ctx context.Context, id core.CheckpointID, lease time.Duration) error {
	n, err := t.exec(ctx, `UPDATE imports SET lease_expires_at = now() + make_interval(secs => @lease) WHERE checkpoint_id = @id`,
		args{"id": id, "lease": lease.Seconds()})
	if err == nil && n == 0 {
		err = controller.ErrImportLost
	}
	return err
}

// CommitImport makes the row of the checkpoint go through its states at once.
func (t *tx) CommitImport(ctx context.Context, cp controller.Checkpoint, in runnerapi.CommitSeal) (controller.Checkpoint, error) {
	row, err := one[prefixRow](ctx, t, controller.ErrImportLost, `
		SELECT coppice_seal_prefix(project_id, checkpoint_id, 1) AS prefix FROM imports WHERE checkpoint_id = @id FOR UPDATE`, args{"id": cp.ID})
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
	if _, err := t.exec(ctx, `
		UPDATE checkpoints SET state = @to, captured_at = now(), delta_bytes = @delta, device_state_bytes = @device, disk_bytes = @disk, pause_ms = @pause,
			timings = @timings, parent_reseal = @reseal, stale_processes = @stale
		WHERE id = @id`,
		args{
			"id": cp.ID, "to": core.CheckpointCaptured, "delta": cp.DeltaBytes, "device": cp.DeviceStateBytes, "disk": cp.DiskBytes, "pause": cp.PauseMS,
			"timings": orNone(cp.Timings), "reseal": orNone(cp.ParentReseal), "stale": orNone(cp.StaleProcesses),
		}); err != nil {
		return cp, err
	}
	if err := t.CommitSeal(ctx, controller.SealAttempt{Checkpoint: cp.ID, Project: cp.ProjectID, Attempt: 1, Prefix: row.Prefix}, in); err != nil {
		return cp, err
	}
	if _, err := t.exec(ctx, `DELETE FROM imports WHERE checkpoint_id = @id`, args{"id": cp.ID}); err != nil {
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
	row, err := one[deletedRow](ctx, t, noProject(project), `
		SELECT q.max_checkpoint_bytes AS most, coalesce((
			SELECT sum(bytes) FROM (
				SELECT key, bytes FROM store_objects WHERE condemned_at IS NOT NULL AND project_id = @project
				UNION
				SELECT o.key, o.bytes FROM store_released r JOIN store_objects o ON o.key = r.key WHERE r.project_id = @project AND `+needless+`
			) kept), 0)::bigint AS bytes
		FROM quotas q WHERE q.project_id = @project`, args{"project": project})
	if err != nil || row.Bytes < row.Limit {
		return err
	}
	return core.Errorf(core.Exhausted, core.CodeQuotaExceeded,
		"the store still keeps %d bytes of checkpoints that the project has deleted, and no more than its quota checkpoint_bytes, %d, may wait there; "+
			"repeat the import when the store has removed them", row.Bytes, row.Limit)
}

type endedRow struct {
	Committed bool `db:"committed"`
}

// EndImport leaves debris anew where there is no checkpoint: what was left before may have been removed while more was written.
func (t *tx) EndImport(ctx context.Context, project core.ProjectID, id core.CheckpointID) (bool, error) {
	if _, err := t.exec(ctx, `DELETE FROM imports WHERE checkpoint_id = @id`, args{"id": id}); err != nil {
		return false, err
	}
	row, err := one[endedRow](ctx, t, nil, `SELECT EXISTS (SELECT 1 FROM checkpoints WHERE id = @id) AS committed`, args{"id": id})
	if err != nil || row.Committed {
		return row.Committed, err
	}
	_, err = t.exec(ctx, `
		INSERT INTO store_debris (prefix, project_id) VALUES (coppice_seal_prefix(@project, @id, 1), @project)
		ON CONFLICT (prefix) DO UPDATE SET since = now()`, args{"project": project, "id": id})
	return false, err
}

// AbandonImports ends those that nobody renews, and frees the keys of their requests.
func (t *tx) AbandonImports(ctx context.Context) ([]core.CheckpointID, error) {
	rows, err := many[checkpointIDRow](ctx, t, `DELETE FROM imports WHERE lease_expires_at < now() RETURNING checkpoint_id AS id`, args{})
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	ids := make([]core.CheckpointID, len(rows))
	for i, r := range rows {
		ids[i] = r.ID
	}
	_, err = t.exec(ctx, `DELETE FROM idempotency_keys WHERE object_id = ANY(@ids::text[])`, args{"ids": texts(ids)})
	return ids, err
}
