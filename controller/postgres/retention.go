package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

type subtreeRow struct {
	ID        core.CheckpointID `db:"id"`
	Parent    core.CheckpointID `db:"parent_id"`
	CreatedAt time.Time         `db:"created_at"`
	Bytes     int64             `db:"bytes"`
	Score     *float64          `db:"score"`
	Held      string            `db:"held"`
	Gone      bool              `db:"gone"`
}

// Subtree reads a tree with what is needed to decide what goes. Those of its nodes that this scope may not see are not in it.
func (t *tx) Subtree(ctx context.Context, id core.CheckpointID, annotation string) ([]retention.Node, error) {
	if _, err := t.Checkpoint(ctx, id); err != nil {
		return nil, err
	}
	rows, err := many[subtreeRow](ctx, t, `
		WITH RECURSIVE down AS (
			SELECT c.id FROM checkpoints c WHERE c.id = @id
			UNION ALL SELECT c.id FROM checkpoints c JOIN down ON c.parent_id = down.id WHERE`+shown+`
		)
		SELECT c.id, coalesce(c.parent_id, '') AS parent_id, c.created_at, c.delta_bytes + c.device_state_bytes + c.disk_bytes AS bytes,
			CASE WHEN jsonb_typeof(c.annotations -> @annotation) = 'number'
				THEN least(greatest((c.annotations ->> @annotation)::numeric, -1e300), 1e300)::float8 END AS score,
			CASE WHEN c.state = 'deleted' THEN ''
				WHEN c.kind = 'template' THEN 'template'
				WHEN c.pinned THEN 'pinned'
				WHEN c.state = 'capturing' OR EXISTS (SELECT 1 FROM operations o WHERE o.checkpoint_id = c.id AND o.state IN ('pending', 'running')) THEN 'operation'
				WHEN EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = c.id AND w.state = 'suspended') THEN 'suspended'
				WHEN EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = c.id AND w.ended_at IS NULL)
					OR EXISTS (SELECT 1 FROM workspaces w WHERE w.parent_checkpoint_id = c.id AND w.ended_at IS NULL) THEN 'workspace'
				ELSE '' END AS held,
			c.state = 'deleted' AS gone
		FROM down JOIN checkpoints c ON c.id = down.id`, args{"id": id, "annotation": annotation})
	list := make([]retention.Node, len(rows))
	for i, r := range rows {
		list[i] = retention.Node(r)
	}
	return list, err
}

type retentionRow struct {
	ProjectID  core.ProjectID    `db:"project_id"`
	Checkpoint core.CheckpointID `db:"checkpoint_id"`
	Policy     policyJSON        `db:"policy"`
	Version    int64             `db:"version"`
	UpdatedAt  time.Time         `db:"updated_at"`
}

// policyJSON is how a policy is stored.
type policyJSON struct {
	KeepBest       int     `json:"keep_best,omitempty"`
	Annotation     string  `json:"annotation,omitempty"`
	KeepPathToRoot bool    `json:"keep_path_to_root,omitempty"`
	MaxAgeSeconds  float64 `json:"max_age_seconds,omitempty"`
	MaxBytes       int64   `json:"max_bytes,omitempty"`
}

func (r retentionRow) retention() controller.Retention {
	p := r.Policy
	return controller.Retention{
		ProjectID: r.ProjectID, Checkpoint: r.Checkpoint, Version: r.Version, UpdatedAt: r.UpdatedAt,
		Policy: controller.RetentionPolicy{Annotation: p.Annotation, Policy: retention.Policy{
			KeepBest: p.KeepBest, KeepPathToRoot: p.KeepPathToRoot, MaxAge: time.Duration(p.MaxAgeSeconds * float64(time.Second)), MaxBytes: p.MaxBytes,
		}},
	}
}

const retentionColumns = ` project_id, checkpoint_id, policy, version, updated_at`

func noRetention(id core.CheckpointID) error {
	return core.Errorf(core.NotFound, core.CodeRetentionNotFound, "checkpoint %s has no stored policy", id)
}

// Retention returns the policy of a checkpoint.
func (t *tx) Retention(ctx context.Context, id core.CheckpointID) (controller.Retention, error) {
	row, err := one[retentionRow](ctx, t, noRetention(id), `SELECT`+retentionColumns+` FROM retention_policies WHERE checkpoint_id = @id`, args{"id": id})
	return row.retention(), err
}

// Retentions returns all policies that the scope may see.
func (t *tx) Retentions(ctx context.Context) ([]controller.Retention, error) {
	rows, err := many[retentionRow](ctx, t, `SELECT`+retentionColumns+` FROM retention_policies ORDER BY project_id, checkpoint_id`, args{})
	list := make([]controller.Retention, len(rows))
	for i, r := range rows {
		list[i] = r.retention()
	}
	return list, err
}

// PutRetention inserts or replaces a policy.
func (t *tx) PutRetention(ctx context.Context, r controller.Retention) (controller.Retention, error) {
	p := policyJSON{
		KeepBest: r.Policy.KeepBest, Annotation: r.Policy.Annotation, KeepPathToRoot: r.Policy.KeepPathToRoot,
		MaxAgeSeconds: r.Policy.MaxAge.Seconds(), MaxBytes: r.Policy.MaxBytes,
	}
	row, err := one[retentionRow](ctx, t, nil, `
		INSERT INTO retention_policies (project_id, checkpoint_id, policy) VALUES (@project, @id, @policy)
		ON CONFLICT ON CONSTRAINT retention_policies_pkey DO UPDATE SET policy = excluded.policy, version = retention_policies.version + 1, updated_at = now()
		RETURNING`+retentionColumns, args{"project": r.ProjectID, "id": r.Checkpoint, "policy": p})
	return row.retention(), err
}

// DeleteRetention removes a policy, if there is one.
func (t *tx) DeleteRetention(ctx context.Context, id core.CheckpointID) error {
	_, err := t.exec(ctx, `DELETE FROM retention_policies WHERE checkpoint_id = @id`, args{"id": id})
	return err
}
