package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// HoldRules and LockRules exclude each other by an advisory lock of the project.
func (t *tx) HoldRules(project core.ProjectID) {
	t.Soon(`SELECT pg_advisory_xact_lock_shared(hashtextextended('rules ' || @project::text, 0))`, pgtx.Args{"project": project})
}

// LockRules waits for holders.
func (t *tx) LockRules(ctx context.Context, project core.ProjectID) error {
	_, err := t.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended('rules ' || @project::text, 0))`, pgtx.Args{"project": project})
	return err
}

type ruledRow struct {
	ID     core.WorkspaceID  `db:"id" json:"id"`
	Parent core.WorkspaceID  `db:"parent" json:"-"`
	Egress core.EgressPolicy `db:"egress_policy" json:"-"`
	Allow  []string          `db:"egress_allow" json:"allow"`
}

// ForkedFrom returns the parent.
func (t *tx) ForkedFrom(ctx context.Context, id core.WorkspaceID) (*grants.WorkspaceRules, error) {
	rows, err := pgtx.Many[ruledRow](ctx, t, `
		SELECT p.id, '' AS parent, p.egress_policy, p.egress_allow FROM workspaces w JOIN checkpoints c ON c.id = w.parent_checkpoint_id
		JOIN workspaces p ON p.id = c.workspace_id AND NOT c.published WHERE w.id = @id`, pgtx.Args{"id": id})
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	parent := grants.WorkspaceRules(rows[0])
	return &parent, nil
}

// Forks returns children of workspaces.
func (t *tx) Forks(ctx context.Context, of []core.WorkspaceID) ([]grants.WorkspaceRules, error) {
	rows, err := pgtx.Many[ruledRow](ctx, t, `
		SELECT w.id, c.workspace_id AS parent, w.egress_policy, w.egress_allow FROM checkpoints c JOIN workspaces w ON w.parent_checkpoint_id = c.id
		WHERE c.workspace_id = ANY(@of::text[]) AND w.id <> c.workspace_id ORDER BY w.id`, pgtx.Args{"of": pgtx.Texts(of)})
	list := make([]grants.WorkspaceRules, len(rows))
	for i, r := range rows {
		list[i] = grants.WorkspaceRules(r)
	}
	return list, err
}

// SetRules is one statement for all. Rows are locked in the order of their ids.
func (t *tx) SetRules(ctx context.Context, list []grants.WorkspaceRules) error {
	rows := make([]ruledRow, len(list))
	for i, r := range list {
		rows[i] = ruledRow(r)
		rows[i].Allow = pgtx.OrNone(r.Allow)
	}
	_, err := t.Exec(ctx, `
		WITH v AS (
			SELECT * FROM jsonb_to_recordset(@rows::jsonb) AS v (id text, allow text[])
		), locked AS (
			SELECT w.id FROM workspaces w JOIN v ON v.id = w.id ORDER BY w.id FOR NO KEY UPDATE OF w
		)
		UPDATE workspaces w SET egress_allow = v.allow, egress_version = w.egress_version + 1
		FROM v JOIN locked ON locked.id = v.id WHERE w.id = v.id AND w.egress_allow <> v.allow`, pgtx.Args{"rows": rows})
	return err
}

// given are the rules that runners were given, as arrays.
type given struct {
	versions []int64
	keys     [][]byte
	untils   []time.Time
}

func newGiven(n int) given { return given{make([]int64, n), make([][]byte, n), make([]time.Time, n)} }

func (g given) set(i int, v grants.Given) {
	g.versions[i], g.keys[i], g.untils[i] = v.Version, v.Key, v.Until
	if v.Key == nil {
		g.keys[i] = []byte{}
	}
	if v.Until.IsZero() { // they were never sealed
		g.untils[i] = time.Unix(0, 0)
	}
}

// PendingRules lists what waits for a runner, of each project as much as of the others, and by chance: what no runner takes is tried again and
// again, and must not keep the rest waiting.
func (t *tx) PendingRules(ctx context.Context, limit int) ([]grants.Workspace, error) {
	found, err := t.workspaces(ctx, `
		SELECT`+workspaceColumns+` FROM (
			SELECT id FROM workspaces WHERE egress_applied < egress_version AND state IN ('ready', 'checkpointing')
			UNION
			SELECT id FROM workspaces WHERE grants_until IS NOT NULL AND state IN ('ready', 'checkpointing')
		) p JOIN workspaces w ON w.id = p.id`+workspaceJoins+`
		WHERE r.lease_expires_at > now() AND (w.egress_applied < w.egress_version OR r.egress_key <> '' AND (w.grants_until < now() OR w.grants_key <> r.egress_key))
		ORDER BY row_number() OVER (PARTITION BY w.project_id ORDER BY random()) LIMIT @limit`,
		pgtx.Args{"limit": limit})
	list := make([]grants.Workspace, len(found))
	for i, w := range found {
		list[i] = w.ForGrants()
	}
	return list, err
}

// RuledWorkspace reads the workspace.
func (t *tx) RuledWorkspace(ctx context.Context, id core.WorkspaceID) (grants.Workspace, error) {
	w, err := t.Workspace(ctx, id)
	return w.ForGrants(), err
}

// RulesFloor is that of the ids of events.
func (t *tx) RulesFloor(ctx context.Context) (int64, error) {
	return pgtx.One[int64](ctx, t, nil, `SELECT coppice_event_history() AS floor`, pgtx.Args{})
}

// RaiseRules locks rows in the order of their ids.
func (t *tx) RaiseRules(ctx context.Context, floor int64, limit int) (int, error) {
	n, err := t.Exec(ctx, `
		WITH behind AS (
			SELECT id FROM workspaces WHERE ended_at IS NULL AND egress_version < @floor ORDER BY id LIMIT @limit FOR NO KEY UPDATE
		)
		UPDATE workspaces w SET egress_version = @floor::bigint + 1 FROM behind WHERE w.id = behind.id`, pgtx.Args{"floor": floor, "limit": limit})
	return int(n), err
}

// ApplyRules is one statement for all.
func (t *tx) ApplyRules(ctx context.Context, list []grants.Applied) error {
	ids, sandboxes, given := make([]string, len(list)), make([]string, len(list)), newGiven(len(list))
	for i, a := range list {
		ids[i], sandboxes[i] = string(a.Workspace), string(a.Sandbox)
		given.set(i, a.Given)
	}
	_, err := t.Exec(ctx, `
		UPDATE workspaces w SET egress_applied = greatest(w.egress_applied, least(v.version, w.egress_version)),
			grants_key = CASE WHEN w.grants_key IS NOT NULL THEN v.sealed END, grants_until = CASE WHEN w.grants_until IS NOT NULL THEN v.until END
		FROM unnest(@ids::text[], @sandboxes::text[], @versions::bigint[], @keys::bytea[], @untils::timestamptz[]) AS v (id, sandbox_id, version, sealed, until)
		WHERE w.id = v.id AND w.sandbox_id = v.sandbox_id AND w.egress_applied <= v.version`,
		pgtx.Args{"ids": ids, "sandboxes": sandboxes, "versions": given.versions, "keys": given.keys, "untils": given.untils})
	return err
}
