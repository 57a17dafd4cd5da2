package tenantrows

import (
	"context"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// Exceeded refuses what would go beyond a quota.
func Exceeded(quota string, used, more, limit int64) error {
	if used+more <= limit {
		return nil
	}
	return core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "the project's quota %s is used up: it has %d of %d and %d more were asked for", quota, used, limit, more)
}

// PatchQuotas changes limits.
func (t *Tx) PatchQuotas(ctx context.Context, id core.ProjectID, p controller.QuotasPatch) (controller.Project, error) {
	n, err := t.Exec(ctx, `
		UPDATE quotas SET version = version + 1, max_workspaces = coalesce(@workspaces, max_workspaces), max_forks_in_flight = coalesce(@forks, max_forks_in_flight),
			max_checkpoints = coalesce(@checkpoints, max_checkpoints), max_checkpoint_bytes = coalesce(@bytes, max_checkpoint_bytes),
			max_depth = coalesce(@depth, max_depth), max_children = coalesce(@children, max_children), max_keys = coalesce(@keys, max_keys),
			max_ports = coalesce(@ports, max_ports), allow_all_egress = coalesce(@allow_all, allow_all_egress)
		WHERE project_id = @id AND (@version::bigint = 0 OR version = @version)`,
		pgtx.Args{
			"id": id, "version": p.Version, "workspaces": p.Workspaces, "forks": p.ForksInFlight, "checkpoints": p.Checkpoints, "bytes": p.CheckpointBytes,
			"depth": p.Depth, "children": p.Children, "keys": p.Keys, "ports": p.Ports, "allow_all": p.AllowAll,
		})
	if err != nil {
		return controller.Project{}, err
	}
	now, err := t.Project(ctx, id)
	if err == nil && n == 0 {
		err = &controller.VersionConflictError{Object: "project " + string(id), Asked: p.Version, Current: now.Quotas.Version}
	}
	return now, err
}

type usageRow struct {
	Workspaces      int64 `db:"workspaces"`
	ForksInFlight   int64 `db:"forks_in_flight"`
	Checkpoints     int64 `db:"checkpoints"`
	CheckpointBytes int64 `db:"checkpoint_bytes"`
}

// counted counts what the quotas limit. The states are written as the partial indexes have them.
const counted = `
	(SELECT count(*) FROM workspaces WHERE project_id = @project AND state NOT IN ('terminated', 'failed', 'lost')) AS workspaces,
	(SELECT count(*) FROM workspaces WHERE project_id = @project AND state NOT IN ('terminated', 'failed', 'lost')
		AND state IN ('creating', 'restoring', 'quarantined')) AS forks_in_flight`

// QuotaUsage counts. It locks nothing.
func (t *Tx) QuotaUsage(ctx context.Context, id core.ProjectID) (controller.QuotaUsage, error) {
	row, err := pgtx.One[struct {
		usageRow
		Keys  int64 `db:"keys"`
		Ports int64 `db:"ports"`
	}](ctx, t, NoProject(id), `SELECT`+counted+`, checkpoints, checkpoint_bytes, (`+validKeys+`) AS keys,
		(SELECT count(*) FROM ports WHERE project_id = @project) AS ports FROM quotas WHERE project_id = @project`, pgtx.Args{"project": id})
	return controller.QuotaUsage{
		Workspaces: row.Workspaces, ForksInFlight: row.ForksInFlight, Checkpoints: row.Checkpoints, CheckpointBytes: row.CheckpointBytes, Keys: row.Keys, Ports: row.Ports,
	}, err
}

type admitRow struct {
	usageRow
	projectRow
}

// Admit adds to the counts and so locks them. Whoever is admitted later sees what this transaction has inserted.
func (t *Tx) Admit(ctx context.Context, id core.ProjectID, d controller.Demand) error {
	captures := int64(0)
	if d.Checkpoint != "" {
		captures = 1
	}
	if d == (controller.Demand{}) {
		return nil
	}
	row, err := pgtx.One[admitRow](ctx, t, NoProject(id), `
		WITH q AS (
			UPDATE quotas SET workspaces = workspaces + @workspaces, forks_in_flight = forks_in_flight + @forks, checkpoints = checkpoints + @captures
			WHERE project_id = @project RETURNING *
		)
		SELECT`+projectColumns+`, q.workspaces, q.forks_in_flight, q.checkpoints, q.checkpoint_bytes FROM q JOIN projects p ON p.id = q.project_id`,
		pgtx.Args{"project": id, "workspaces": d.Workspaces, "forks": d.ForksInFlight, "captures": captures})
	if err != nil {
		return err
	}
	used, limits := row.usageRow, row.project().Quotas
	if d.Workspaces > 0 && used.Workspaces > limits.Workspaces || d.ForksInFlight > 0 && used.ForksInFlight > limits.ForksInFlight {
		if used, err = t.recount(ctx, id, used); err != nil {
			return err
		}
	}
	for _, q := range []struct {
		name              string
		used, more, limit int64
	}{
		{"workspaces", used.Workspaces, int64(d.Workspaces), limits.Workspaces},
		{"forks_in_flight", used.ForksInFlight, int64(d.ForksInFlight), limits.ForksInFlight},
		{"checkpoints", used.Checkpoints, captures, limits.Checkpoints},
	} {
		if q.more == 0 {
			continue
		}
		if err := Exceeded(q.name, q.used-q.more, q.more, q.limit); err != nil {
			return err
		}
	}
	if captures == 0 {
		return nil
	}
	if used.CheckpointBytes >= limits.CheckpointBytes {
		return core.Errorf(core.Exhausted, core.CodeQuotaExceeded,
			"the project's quota checkpoint_bytes is used up: it has %d of %d; delete checkpoints first", used.CheckpointBytes, limits.CheckpointBytes)
	}
	if err := Exceeded("checkpoint_bytes", used.CheckpointBytes, d.CheckpointBytes, limits.CheckpointBytes); err != nil {
		return err
	}
	return t.admitNode(ctx, id, d.Checkpoint, limits)
}

// recount replaces the upper bounds by what there is. The transaction's own rows are in it.
func (t *Tx) recount(ctx context.Context, id core.ProjectID, used usageRow) (usageRow, error) {
	return pgtx.One[usageRow](ctx, t, NoProject(id), `
		WITH now AS (SELECT`+counted+`)
		UPDATE quotas SET workspaces = now.workspaces, forks_in_flight = now.forks_in_flight FROM now WHERE project_id = @project
		RETURNING now.workspaces, now.forks_in_flight, @checkpoints::bigint AS checkpoints, @bytes::bigint AS checkpoint_bytes`,
		pgtx.Args{"project": id, "checkpoints": used.Checkpoints, "bytes": used.CheckpointBytes})
}

type placeRow struct {
	Depth    int64 `db:"depth"`
	Siblings int64 `db:"siblings"`
}

// admitNode keeps the tree within its depth and width. The node is there already and counts.
func (t *Tx) admitNode(ctx context.Context, project core.ProjectID, id core.CheckpointID, limits controller.Quotas) error {
	absent := core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "there is no checkpoint %s", id)
	place, err := pgtx.One[placeRow](ctx, t, absent, `
		SELECT c.depth, (SELECT count(*) FROM (
			SELECT 1 FROM checkpoints k WHERE k.parent_id = c.parent_id AND k.project_id = @project AND k.state IN ('capturing', 'captured', 'sealed') LIMIT @most
		) AS there) AS siblings FROM checkpoints c WHERE c.id = @id`, pgtx.Args{"id": id, "project": project, "most": limits.Children + 1})
	if err != nil {
		return err
	}
	if err := Exceeded("depth", place.Depth-1, 1, limits.Depth); err != nil {
		return err
	}
	return Exceeded("children", place.Siblings-1, 1, limits.Children)
}
