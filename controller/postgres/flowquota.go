package postgres

import (
	"cmp"
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// flowRoom is what may still be kept of a workspace's flows, or of a project's, and what became of those that came.
type flowRoom struct {
	ProjectID core.ProjectID   `json:"project_id"`
	Workspace core.WorkspaceID `json:"workspace_id"` // empty: the project's
	Rows      int64            `json:"rows"`         // that were kept
	Omitted   int64            `json:"omitted"`
	First     *time.Time       `json:"omitted_first_at"`
	Last      *time.Time       `json:"omitted_last_at"`

	left int64
}

// flowRooms are those that a batch is about.
type flowRooms struct {
	of         map[core.SandboxID]core.WorkspaceID
	workspaces map[core.WorkspaceID]*flowRoom
	projects   map[core.ProjectID]*flowRoom
}

type roomRow struct {
	ID            core.SandboxID   `db:"id"`
	ProjectID     core.ProjectID   `db:"project_id"`
	Workspace     core.WorkspaceID `db:"workspace_id"`
	WorkspaceRows int64            `db:"workspace_rows"`
	ProjectRows   int64            `db:"project_rows"`
}

// flowRooms reads the numbers of rows of the workspaces and projects of a runner's sandboxes.
func (t *tx) flowRooms(ctx context.Context, runner core.RunnerID, list []core.Flow, q controller.FlowQuota) (flowRooms, error) {
	out := flowRooms{of: map[core.SandboxID]core.WorkspaceID{}, workspaces: map[core.WorkspaceID]*flowRoom{}, projects: map[core.ProjectID]*flowRoom{}}
	var ids []core.SandboxID
	for _, f := range list {
		if _, ok := out.of[f.SandboxID]; !ok {
			out.of[f.SandboxID] = ""
			ids = append(ids, f.SandboxID)
		}
	}
	rows, err := many[roomRow](ctx, t, `
		SELECT s.id, s.project_id, s.workspace_id,
			coalesce((SELECT sum(r.rows) FROM flow_rows r WHERE r.project_id = s.project_id AND r.workspace_id = s.workspace_id), 0)::bigint AS workspace_rows,
			coalesce((SELECT sum(r.rows) FROM flow_rows r WHERE r.project_id = s.project_id AND r.workspace_id = ''), 0)::bigint AS project_rows
		FROM sandboxes s WHERE s.id = ANY(@ids::text[]) AND s.runner_id = @runner`, args{"ids": texts(ids), "runner": runner})
	for _, r := range rows {
		out.of[r.ID] = r.Workspace
		if out.workspaces[r.Workspace] == nil {
			out.workspaces[r.Workspace] = &flowRoom{ProjectID: r.ProjectID, Workspace: r.Workspace, left: q.Workspace - r.WorkspaceRows}
		}
		if out.projects[r.ProjectID] == nil {
			out.projects[r.ProjectID] = &flowRoom{ProjectID: r.ProjectID, left: q.Project - r.ProjectRows}
		}
	}
	return out, err
}

// takes reports whether a flow is kept. One that is not is counted when it has ended.
func (r flowRooms) takes(f core.Flow, final bool) bool {
	ws := r.workspaces[r.of[f.SandboxID]]
	if ws == nil {
		return true // the insertion leaves it out: it is no sandbox of this runner
	}
	project := r.projects[ws.ProjectID]
	if ws.left > 0 && project.left > 0 || !controller.MayOmit(f) {
		ws.left, project.left = ws.left-1, project.left-1
		return true
	}
	if !final {
		return false
	}
	at, last := f.At, f.At
	if !f.Last.IsZero() {
		last = f.Last
	}
	for _, room := range []*flowRoom{ws, project} {
		if room.Omitted += f.Flows(); room.First == nil || at.Before(*room.First) {
			room.First = &at
		}
		if room.Last == nil || last.After(*room.Last) {
			room.Last = &last
		}
	}
	return false
}

// kept counts a row that was not there before.
func (r flowRooms) kept(row keptRow) {
	for _, room := range []*flowRoom{r.workspaces[row.Workspace], r.projects[row.ProjectID]} {
		if room != nil {
			room.Rows++
		}
	}
}

// countFlows updates the counts of kept and omitted flows, always in one order, so that two batches never deadlock.
func (t *tx) countFlows(ctx context.Context, rooms flowRooms) (omitted int64, err error) {
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
	_, err = t.exec(ctx, `
		INSERT INTO flow_rows AS r (project_id, workspace_id, month, rows, omitted, omitted_first_at, omitted_last_at)
		SELECT v.project_id, v.workspace_id, date_trunc('month', now() AT TIME ZONE 'UTC')::date, v.rows, v.omitted, v.omitted_first_at, v.omitted_last_at
		FROM jsonb_to_recordset(@rows::jsonb) AS v (project_id text, workspace_id text, rows bigint, omitted bigint, omitted_first_at timestamptz, omitted_last_at timestamptz)
		ON CONFLICT ON CONSTRAINT flow_rows_pkey DO UPDATE SET rows = r.rows + excluded.rows, omitted = r.omitted + excluded.omitted,
			omitted_first_at = least(r.omitted_first_at, excluded.omitted_first_at), omitted_last_at = greatest(r.omitted_last_at, excluded.omitted_last_at)`, args{"rows": rows})
	return omitted, err
}

type omittedRow struct {
	Count int64      `db:"count"`
	First *time.Time `db:"first_at"`
	Last  *time.Time `db:"last_at"`
}

// OmittedFlows adds the months up.
func (t *tx) OmittedFlows(ctx context.Context, id core.WorkspaceID) (controller.OmittedFlows, error) {
	row, err := one[omittedRow](ctx, t, nil, `
		SELECT coalesce(sum(r.omitted), 0)::bigint AS count, min(r.omitted_first_at) AS first_at, max(r.omitted_last_at) AS last_at
		FROM workspaces w JOIN flow_rows r ON r.project_id = w.project_id AND r.workspace_id = w.id WHERE w.id = @id`, args{"id": id})
	return controller.OmittedFlows{Count: row.Count, First: timeOf(row.First).UTC(), Last: timeOf(row.Last).UTC()}, err
}
