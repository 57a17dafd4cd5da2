package postgres

import (
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

type subtreeRow struct {
	ID        core.CheckpointID `db:"id"`
	Parent    core.CheckpointID `db:"parent_id"`
	Depth     int               `db:"depth"`
	CreatedAt time.Time         `db:"created_at"`
	Bytes     int64             `db:"bytes"`
	Score     *float64          `db:"score"`
	Held      string            `db:"held"`
	Gone      bool              `db:"gone"`
}

const (
	subtreePage     = 2000 // rows of one statement
	subtreeParents  = 500  // parents whose children one statement reads
	subtreeChildren = 20   // children of one parent that one statement reads; a later statement reads the others
)

// subtreeColumns are the columns of the relation c. The lookups of what holds a node use indexes of live rows only.
const subtreeColumns = `
	c.id, coalesce(c.parent_id, '') AS parent_id, c.depth, c.created_at, c.delta_bytes + c.device_state_bytes + c.disk_bytes AS bytes,
	CASE WHEN jsonb_typeof(c.annotations -> @annotation) = 'number'
		THEN least(greatest((c.annotations ->> @annotation)::numeric, -1e300), 1e300)::float8 END AS score,
	CASE WHEN c.state = 'deleted' THEN ''
		WHEN c.kind = 'template' THEN 'template'
		WHEN c.pinned THEN 'pinned'
		WHEN EXISTS (SELECT 1 FROM project_images i WHERE i.checkpoint_id = c.id) THEN 'image'
		WHEN c.state = 'capturing' OR EXISTS (SELECT 1 FROM operations o WHERE o.checkpoint_id = c.id AND o.state IN ('pending', 'running')) THEN 'operation'
		WHEN EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = c.id AND ` + asleep + ` AND w.ended_at IS NULL) THEN 'suspended'
		WHEN EXISTS (SELECT 1 FROM workspaces w WHERE w.checkpoint_id = c.id AND w.ended_at IS NULL)
			OR EXISTS (SELECT 1 FROM workspaces w WHERE w.parent_checkpoint_id = c.id AND w.ended_at IS NULL) THEN 'workspace'
		ELSE '' END AS held,
	c.state = 'deleted' AS gone`

// Subtree returns the next part of a walk; see controller.Tx. A walk from a root reads the tree in the order of an index. A walk from another
// node looks for the children of the nodes that it has found, so it reads no other rows.
func (t *tx) Subtree(ctx context.Context, w retention.Walk, annotation string) ([]retention.Node, retention.Walk, error) {
	if !w.Begun {
		top, err := t.Checkpoint(ctx, w.ID)
		if err != nil {
			return nil, w, err
		}
		rows, err := pgtx.Many[subtreeRow](ctx, t, `SELECT`+subtreeColumns+` FROM checkpoints c WHERE c.id = @id`, pgtx.Args{"id": w.ID, "annotation": annotation})
		w.Begun, w.Root = true, top.Parent == "" && t.Scope() != controller.System()
		if w.Root {
			w.More = true
		} else {
			w.Open = []retention.Branch{{Parent: w.ID}}
		}
		return nodesOf(rows), w, err
	}
	if w.Root {
		rows, err := pgtx.InOrder[subtreeRow](ctx, t, `
			SELECT`+subtreeColumns+` FROM checkpoints c
			WHERE c.project_id = @project AND c.root_id = @id AND c.id <> @id AND`+shown+` AND (c.depth, c.id) > (@after_depth::int, @after::text)
			ORDER BY c.depth, c.id LIMIT @limit`,
			pgtx.Args{"project": t.Scope().String(), "id": w.ID, "annotation": annotation, "after_depth": w.Depth, "after": w.After, "limit": subtreePage})
		w.More = len(rows) == subtreePage
		if n := len(rows); n > 0 {
			w.Depth, w.After = rows[n-1].Depth, rows[n-1].ID
		}
		return nodesOf(rows), w, err
	}
	// The branches that were found last come first: this keeps the list of open branches short.
	next := w.Open[max(0, len(w.Open)-subtreeParents):]
	w.Open = slices.Clone(w.Open[:len(w.Open)-len(next)])
	parents, afters, found := make([]core.CheckpointID, len(next)), make([]core.CheckpointID, len(next)), make(map[core.CheckpointID]int, len(next))
	for i, b := range next {
		parents[i], afters[i] = b.Parent, b.After
	}
	rows, err := pgtx.InOrder[subtreeRow](ctx, t, `
		SELECT d.* FROM unnest(@parents::text[], @afters::text[]) AS p (id, after) CROSS JOIN LATERAL (
			SELECT`+subtreeColumns+` FROM checkpoints c WHERE c.parent_id = p.id AND c.id > p.after AND`+shown+` ORDER BY c.id LIMIT @limit
		) AS d`, pgtx.Args{"parents": pgtx.Texts(parents), "afters": pgtx.Texts(afters), "annotation": annotation, "limit": subtreeChildren})
	for _, r := range rows {
		w.Open = append(w.Open, retention.Branch{Parent: r.ID})
		if found[r.Parent]++; found[r.Parent] == subtreeChildren {
			w.Open = append(w.Open, retention.Branch{Parent: r.Parent, After: r.ID})
		}
	}
	return nodesOf(rows), w, err
}

func nodesOf(rows []subtreeRow) []retention.Node {
	list := make([]retention.Node, len(rows))
	for i, r := range rows {
		list[i] = retention.Node{ID: r.ID, Parent: r.Parent, CreatedAt: r.CreatedAt, Bytes: r.Bytes, Score: r.Score, Held: r.Held, Gone: r.Gone}
	}
	return list
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
	row, err := pgtx.One[retentionRow](ctx, t, noRetention(id), `SELECT`+retentionColumns+` FROM retention_policies WHERE checkpoint_id = @id`, pgtx.Args{"id": id})
	return row.retention(), err
}

// lastAudit is the newest audit record of the project of the relation p. It ignores records that are older than 40 days: a project without a
// record since then has not changed.
const lastAudit = ` LEFT JOIN LATERAL (
	SELECT a.id, a.created_at FROM audit_records a WHERE a.project_id = p.project_id AND a.created_at > now() - interval '40 days' ORDER BY a.id DESC LIMIT 1) last ON true`

// DueRetentions looks at each policy, and at the newest audit record of its project, which is at the end of an index. Projects take turns.
func (t *tx) DueRetentions(ctx context.Context, limit int) ([]controller.Retention, error) {
	rows, err := pgtx.InOrder[retentionRow](ctx, t, `
		SELECT p.project_id, p.checkpoint_id, p.policy, p.version, p.updated_at FROM retention_policies p
		LEFT JOIN retention_rounds r ON r.project_id = p.project_id AND r.checkpoint_id = p.checkpoint_id`+lastAudit+`
		WHERE r.project_id IS NULL OR r.claimed_until <= now()
			AND (r.policy_version <> p.version OR r.next_at <= now() AND (r.due_at <= now() OR r.audit_id IS DISTINCT FROM coalesce(last.id, 0)))
		ORDER BY row_number() OVER (PARTITION BY p.project_id ORDER BY coalesce(r.next_at, '-infinity')), coalesce(r.next_at, '-infinity') LIMIT @limit`, pgtx.Args{"limit": limit})
	return pgtx.Map(rows, retentionRow.retention), err
}

// ClaimRetention notes the newest audit record before the tree is read. An older transaction may still be open then, and its records may have
// lower ids. No transaction of a controller lasts longer than callTimeout, so a record that is twice as old has no such transaction beside it.
// If the newest record is younger, the mark is null, and the tree is read once more.
func (t *tx) ClaimRetention(ctx context.Context, r controller.Retention, lease time.Duration) (int64, error) {
	rows, err := pgtx.InOrder[int64](ctx, t, `
		INSERT INTO retention_rounds AS r (project_id, checkpoint_id, policy_version, audit_id, claimed_until)
		SELECT p.project_id, p.checkpoint_id, p.version,
			CASE WHEN last.id IS NULL THEN 0 WHEN last.created_at < now() - make_interval(secs => @settled) THEN last.id END,
			now() + make_interval(secs => @lease)
		FROM retention_policies p`+lastAudit+` WHERE p.project_id = @project AND p.checkpoint_id = @id AND p.version = @version
		ON CONFLICT ON CONSTRAINT retention_rounds_pkey DO UPDATE SET policy_version = excluded.policy_version, audit_id = excluded.audit_id,
			claimed_until = excluded.claimed_until, due_at = now(), turn = r.turn + 1
			WHERE r.claimed_until <= now() AND (r.policy_version <> excluded.policy_version OR r.next_at <= now())
		RETURNING turn`, pgtx.Args{"project": r.ProjectID, "id": r.Checkpoint, "version": r.Version, "lease": lease.Seconds(), "settled": (2 * callTimeout).Seconds()})
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	return rows[0], nil
}

// RenewRetention identifies the claim by its turn, and the policy by its version.
func (t *tx) RenewRetention(ctx context.Context, r controller.RetentionRound, lease time.Duration) error {
	n, err := t.Exec(ctx, `UPDATE retention_rounds SET claimed_until = now() + make_interval(secs => @lease) WHERE project_id = @project AND checkpoint_id = @id AND turn = @turn
			AND EXISTS (SELECT FROM retention_policies p WHERE p.project_id = @project AND p.checkpoint_id = @id AND p.version = @version)`,
		pgtx.Args{"project": r.ProjectID, "id": r.Checkpoint, "turn": r.Turn, "version": r.Version, "lease": lease.Seconds()})
	if err == nil && n == 0 {
		return core.Errorf(core.Conflict, core.CodeStateConflict, "another controller applies the policy of checkpoint %s, or the policy has changed", r.Checkpoint)
	}
	return err
}

// EndRetention counts the rest from now. If a round failed, the next one begins as soon as the rest is over.
func (t *tx) EndRetention(ctx context.Context, r controller.RetentionRound, end retention.End) error {
	_, err := t.Exec(ctx, `
		UPDATE retention_rounds SET claimed_until = '-infinity', next_at = now() + make_interval(secs => @pause),
			due_at = CASE WHEN @failed THEN now() ELSE @due END, audit_id = CASE WHEN @failed THEN NULL ELSE audit_id END
		WHERE project_id = @project AND checkpoint_id = @id AND turn = @turn`,
		pgtx.Args{"project": r.ProjectID, "id": r.Checkpoint, "turn": r.Turn, "pause": end.Pause.Seconds(), "failed": end.Failed, "due": end.Due})
	return err
}

// PutRetention inserts or replaces a policy.
func (t *tx) PutRetention(ctx context.Context, r controller.Retention) (controller.Retention, error) {
	p := policyJSON{
		KeepBest: r.Policy.KeepBest, Annotation: r.Policy.Annotation, KeepPathToRoot: r.Policy.KeepPathToRoot,
		MaxAgeSeconds: r.Policy.MaxAge.Seconds(), MaxBytes: r.Policy.MaxBytes,
	}
	row, err := pgtx.One[retentionRow](ctx, t, nil, `
		INSERT INTO retention_policies (project_id, checkpoint_id, policy) VALUES (@project, @id, @policy)
		ON CONFLICT ON CONSTRAINT retention_policies_pkey DO UPDATE SET policy = excluded.policy, version = retention_policies.version + 1, updated_at = now()
		RETURNING`+retentionColumns, pgtx.Args{"project": r.ProjectID, "id": r.Checkpoint, "policy": p})
	return row.retention(), err
}

// DeleteRetention removes a policy, if there is one.
func (t *tx) DeleteRetention(ctx context.Context, id core.CheckpointID) error {
	_, err := t.Exec(ctx, `DELETE FROM retention_policies WHERE checkpoint_id = @id`, pgtx.Args{"id": id})
	return err
}
