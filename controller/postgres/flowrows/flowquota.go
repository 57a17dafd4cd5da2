package flowrows

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// flowRoom is what may still be kept of a workspace's flows, or of a project's, and what became of those that came.
type flowRoom struct {
	ProjectID core.ProjectID   `json:"project_id"`
	Workspace core.WorkspaceID `json:"workspace_id"` // empty: the project's
	Rows      int64            `json:"rows"`         // that were kept
	Effects   int64            `json:"effects"`      // of those
	Denied    int64            `json:"denied"`       // of those
	Omitted   int64            `json:"omitted"`
	First     *time.Time       `json:"omitted_first_at"`
	Last      *time.Time       `json:"omitted_last_at"`

	left map[flows.Kind]int64
}

// flowRooms are those that a batch is about.
type flowRooms struct {
	now        time.Time
	of         map[core.SandboxID]core.WorkspaceID
	counted    bool // something of these sandboxes is counted already
	workspaces map[core.WorkspaceID]*flowRoom
	projects   map[core.ProjectID]*flowRoom
}

type roomRow struct {
	ID               core.SandboxID   `db:"id"`
	ProjectID        core.ProjectID   `db:"project_id"`
	Workspace        core.WorkspaceID `db:"workspace_id"`
	Now              time.Time        `db:"now"`
	Counted          bool             `db:"counted"`
	WorkspaceRows    int64            `db:"workspace_rows"`
	WorkspaceEffects int64            `db:"workspace_effects"`
	WorkspaceDenied  int64            `db:"workspace_denied"`
	ProjectRows      int64            `db:"project_rows"`
	ProjectEffects   int64            `db:"project_effects"`
	ProjectDenied    int64            `db:"project_denied"`
}

// flowRooms reads the numbers of rows of the workspaces and projects of a runner's sandboxes.
func (t *Tx) flowRooms(ctx context.Context, runner core.RunnerID, list []core.Flow, q flows.Quota) (flowRooms, error) {
	out := flowRooms{of: map[core.SandboxID]core.WorkspaceID{}, workspaces: map[core.WorkspaceID]*flowRoom{}, projects: map[core.ProjectID]*flowRoom{}}
	var ids []core.SandboxID
	for _, f := range list {
		if _, ok := out.of[f.SandboxID]; !ok {
			out.of[f.SandboxID] = ""
			ids = append(ids, f.SandboxID)
		}
	}
	const sums = `SELECT coalesce(sum(r.rows), 0)::bigint AS rows, coalesce(sum(r.effects), 0)::bigint AS effects, coalesce(sum(r.denied), 0)::bigint AS denied FROM flow_rows r`
	rows, err := pgtx.Many[roomRow](ctx, t, `
		SELECT s.id, s.project_id, s.workspace_id, now() AS now, EXISTS (SELECT FROM flow_counts c WHERE c.sandbox_id = s.id) AS counted,
			w.rows AS workspace_rows, w.effects AS workspace_effects, w.denied AS workspace_denied,
			p.rows AS project_rows, p.effects AS project_effects, p.denied AS project_denied
		FROM sandboxes s
		CROSS JOIN LATERAL (`+sums+` WHERE r.project_id = s.project_id AND r.workspace_id = s.workspace_id) w
		CROSS JOIN LATERAL (`+sums+` WHERE r.project_id = s.project_id AND r.workspace_id = '') p
		WHERE s.id = ANY(@ids::text[]) AND s.runner_id = @runner`, pgtx.Args{"ids": pgtx.Texts(ids), "runner": runner})
	left := func(rows, effects, denied int64, of func(flows.RowQuota) int64) map[flows.Kind]int64 {
		return map[flows.Kind]int64{
			flows.KindRead: of(q.Reads) - (rows - effects - denied), flows.KindEffect: of(q.Effects) - effects, flows.KindDenied: of(q.Denied) - denied,
		}
	}
	for _, r := range rows {
		out.of[r.ID], out.now, out.counted = r.Workspace, r.Now, out.counted || r.Counted
		if out.workspaces[r.Workspace] == nil {
			out.workspaces[r.Workspace] = &flowRoom{
				ProjectID: r.ProjectID, Workspace: r.Workspace,
				left: left(r.WorkspaceRows, r.WorkspaceEffects, r.WorkspaceDenied, func(q flows.RowQuota) int64 { return q.Workspace }),
			}
		}
		if out.projects[r.ProjectID] == nil {
			out.projects[r.ProjectID] = &flowRoom{
				ProjectID: r.ProjectID, left: left(r.ProjectRows, r.ProjectEffects, r.ProjectDenied, func(q flows.RowQuota) int64 { return q.Project }),
			}
		}
	}
	return out, err
}

// both returns the rooms of a sandbox. There are none of a sandbox that is not the runner's.
func (r flowRooms) both(id core.SandboxID) []*flowRoom {
	ws := r.workspaces[r.of[id]]
	if ws == nil {
		return nil
	}
	return []*flowRoom{ws, r.projects[ws.ProjectID]}
}

// enough reports whether there is room for all of a batch, whatever it is.
func (r flowRooms) enough(n int) bool {
	for _, list := range [][]*flowRoom{slices.Collect(maps.Values(r.workspaces)), slices.Collect(maps.Values(r.projects))} {
		for _, room := range list {
			for _, left := range room.left {
				if left < int64(n) {
					return false
				}
			}
		}
	}
	return true
}

// take reports whether there is room for a flow, and takes it.
func (r flowRooms) take(f core.Flow) bool {
	rooms, kind := r.both(f.SandboxID), flows.KindOf(f)
	for _, room := range rooms {
		if room.left[kind] <= 0 {
			return false
		}
	}
	for _, room := range rooms {
		room.left[kind]--
	}
	return true
}

// omit counts a flow that has no row. The end of one says nothing new.
func (r flowRooms) omit(f core.Flow) {
	if isEnd(f) {
		return
	}
	at, last := f.At, f.At
	if !f.Last.IsZero() {
		last = f.Last
	}
	for _, room := range r.both(f.SandboxID) {
		if room.Omitted += f.Flows(); room.First == nil || at.Before(*room.First) {
			room.First = &at
		}
		if room.Last == nil || last.After(*room.Last) {
			room.Last = &last
		}
	}
}

// kept counts a row that was not there before.
func (r flowRooms) kept(f core.Flow) {
	for _, room := range r.both(f.SandboxID) {
		room.Rows++
		switch flows.KindOf(f) {
		case flows.KindEffect:
			room.Effects++
		case flows.KindDenied:
			room.Denied++
		case flows.KindRead:
		}
	}
}

// countFlows updates the counts of kept and omitted flows, always in one order, so that two batches never deadlock.
func (t *Tx) countFlows(ctx context.Context, rooms flowRooms) (omitted int64, err error) {
	var rows []*flowRoom
	for _, room := range rooms.projects {
		omitted += room.Omitted
		rows = append(rows, room)
	}
	for _, room := range rooms.workspaces {
		rows = append(rows, room)
	}
	rows = slices.DeleteFunc(rows, func(r *flowRoom) bool { return r.Rows+r.Omitted == 0 })
	if len(rows) == 0 {
		return omitted, nil
	}
	slices.SortFunc(rows, func(a, b *flowRoom) int {
		return cmp.Or(cmp.Compare(a.ProjectID, b.ProjectID), cmp.Compare(a.Workspace, b.Workspace))
	})
	_, err = t.Exec(ctx, `
		INSERT INTO flow_rows AS r (project_id, workspace_id, month, rows, effects, denied, omitted, omitted_first_at, omitted_last_at)
		SELECT v.project_id, v.workspace_id, date_trunc('month', now() AT TIME ZONE 'UTC')::date, v.rows, v.effects, v.denied, v.omitted, v.omitted_first_at, v.omitted_last_at
		FROM jsonb_to_recordset(@rows::jsonb) AS v (project_id text, workspace_id text, rows bigint, effects bigint, denied bigint, omitted bigint,
			omitted_first_at timestamptz, omitted_last_at timestamptz)
		ON CONFLICT ON CONSTRAINT flow_rows_pkey DO UPDATE SET rows = r.rows + excluded.rows, effects = r.effects + excluded.effects, denied = r.denied + excluded.denied,
			omitted = least(r.omitted + excluded.omitted, 1::bigint << 61),
			omitted_first_at = least(r.omitted_first_at, excluded.omitted_first_at), omitted_last_at = greatest(r.omitted_last_at, excluded.omitted_last_at)`, pgtx.Args{"rows": rows})
	return omitted, err
}

type omittedRow struct {
	Count int64      `db:"count"`
	First *time.Time `db:"first_at"`
	Last  *time.Time `db:"last_at"`
}

// OmittedFlows adds the months up.
func (t *Tx) OmittedFlows(ctx context.Context, id core.WorkspaceID) (flows.Omitted, error) {
	row, err := pgtx.One[omittedRow](ctx, t, nil, `
		SELECT coalesce(sum(r.omitted), 0)::bigint AS count, min(r.omitted_first_at) AS first_at, max(r.omitted_last_at) AS last_at
		FROM workspaces w JOIN flow_rows r ON r.project_id = w.project_id AND r.workspace_id = w.id WHERE w.id = @id`, pgtx.Args{"id": id})
	return flows.Omitted{Count: row.Count, First: pgtx.TimeOf(row.First).UTC(), Last: pgtx.TimeOf(row.Last).UTC()}, err
}
