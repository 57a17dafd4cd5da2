package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

type newFlow struct {
	SandboxID core.SandboxID `json:"sandbox_id"`
	ID        string         `json:"id"`
	At        time.Time      `json:"at"`
	Final     bool           `json:"final"`
	Changes   bool           `json:"changes"`
	Spoken    core.Spoken    `json:"spoken"`
	Host      string         `json:"host"`
	Port      uint16         `json:"port"`
	Method    string         `json:"method"`
	Path      string         `json:"path"`
	Outcome   core.Outcome   `json:"outcome"`
	Rule      string         `json:"rule"`
	Grant     string         `json:"grant_id"`
	Reason    string         `json:"reason"`
	Status    int            `json:"status"`
	Sent      int64          `json:"sent_bytes"`
	Received  int64          `json:"received_bytes"`
	Ended     *time.Time     `json:"ended_at"`
	Count     int64          `json:"count"`
	Last      *time.Time     `json:"last_at"`
}

type keptRow struct {
	ID        string           `db:"id"`
	Final     bool             `db:"final"`
	ProjectID core.ProjectID   `db:"project_id"`
	Workspace core.WorkspaceID `db:"workspace_id"`
}

type flowKey struct {
	ID    string
	Final bool
}

// InsertFlows is one statement for all that are kept, between two that look at the quota and count.
func (t *tx) InsertFlows(ctx context.Context, runner core.RunnerID, list []core.Flow, q controller.FlowQuota) (controller.KeptFlows, error) {
	if len(list) == 0 {
		return controller.KeptFlows{}, nil
	}
	rooms, err := t.flowRooms(ctx, runner, list, q)
	if err != nil {
		return controller.KeptFlows{}, err
	}
	rows, of := make([]newFlow, 0, len(list)), make(map[flowKey]core.Flow, len(list))
	for _, f := range list {
		row := newFlow{
			SandboxID: f.SandboxID, ID: f.ID, At: f.At, Final: !f.Ended.IsZero() || f.Outcome == core.FlowDenied, Changes: f.Changes(), Spoken: f.Spoken, Host: f.Host, Port: f.Port,
			Method: f.Method, Path: f.Path, Outcome: f.Outcome, Rule: f.Rule, Grant: f.Grant, Reason: f.Reason, Status: f.Status, Sent: f.Sent, Received: f.Received, Count: f.Flows(),
		}
		if !rooms.takes(f, row.Final) {
			continue
		}
		if !f.Ended.IsZero() {
			row.Ended = &f.Ended
		}
		if !f.Last.IsZero() {
			row.Last = &f.Last
		}
		rows, of[flowKey{f.ID, row.Final}] = append(rows, row), f
	}
	kept, err := many[keptRow](ctx, t, `
		INSERT INTO flows (project_id, workspace_id, sandbox_id, epoch, id, at, final, changes, spoken, host, port, method, path, outcome, rule, grant_id, reason,
			status, sent_bytes, received_bytes, ended_at, count, last_at)
		SELECT s.project_id, s.workspace_id, s.id, s.epoch, v.id, v.at, v.final, v.changes, v.spoken, v.host, v.port, v.method, v.path, v.outcome, v.rule, v.grant_id, v.reason,
			v.status, v.sent_bytes, v.received_bytes, v.ended_at, v.count, v.last_at
		FROM jsonb_to_recordset(@rows::jsonb) AS v (sandbox_id text, id text, at timestamptz, final boolean, changes boolean, spoken text, host text, port int,
			method text, path text, outcome text, rule text, grant_id text, reason text, status int, sent_bytes bigint, received_bytes bigint, ended_at timestamptz,
			count bigint, last_at timestamptz)
		JOIN LATERAL (SELECT * FROM sandboxes x WHERE x.id = v.sandbox_id LIMIT 1) s ON s.runner_id = @runner
		ON CONFLICT DO NOTHING RETURNING id, final, project_id, workspace_id`, args{"rows": rows, "runner": runner})
	if err != nil {
		return controller.KeptFlows{}, err
	}
	out := controller.KeptFlows{Fresh: make([]core.Flow, len(kept))}
	for i, k := range kept {
		out.Fresh[i] = of[flowKey{k.ID, k.Final}]
		rooms.kept(k)
	}
	out.Omitted, err = t.countFlows(ctx, rooms)
	return out, err
}

type sandboxIDRow struct {
	ID core.SandboxID `db:"id"`
}

// OwnSandboxes selects.
func (t *tx) OwnSandboxes(ctx context.Context, runner core.RunnerID, ids []core.SandboxID) ([]core.SandboxID, error) {
	rows, err := many[sandboxIDRow](ctx, t, `SELECT s.id FROM sandboxes s WHERE s.id = ANY(@ids::text[]) AND s.runner_id = @runner`, args{"ids": texts(ids), "runner": runner})
	list := make([]core.SandboxID, len(rows))
	for i, r := range rows {
		list[i] = r.ID
	}
	return list, err
}

// flowColumns are those of the relation f.
const flowColumns = `
	f.workspace_id, f.sandbox_id, f.epoch, f.id, f.at, f.spoken, f.host, f.port, f.method, f.path, f.outcome, f.rule, f.grant_id, f.reason, f.status, f.sent_bytes, f.received_bytes, f.ended_at, f.count,
	f.last_at`

// lastOfFlow leaves of each flow the row that says most.
const lastOfFlow = ` (f.final OR NOT EXISTS (SELECT 1 FROM flows e WHERE e.sandbox_id = f.sandbox_id AND e.at = f.at AND e.id = f.id AND e.final))`

type flowRow struct {
	WorkspaceID core.WorkspaceID `db:"workspace_id"`
	SandboxID   core.SandboxID   `db:"sandbox_id"`
	Epoch       int64            `db:"epoch"`
	ID          string           `db:"id"`
	At          time.Time        `db:"at"`
	Spoken      core.Spoken      `db:"spoken"`
	Host        string           `db:"host"`
	Port        uint16           `db:"port"`
	Method      string           `db:"method"`
	Path        string           `db:"path"`
	Outcome     core.Outcome     `db:"outcome"`
	Rule        string           `db:"rule"`
	Grant       string           `db:"grant_id"`
	Reason      string           `db:"reason"`
	Status      int              `db:"status"`
	Sent        int64            `db:"sent_bytes"`
	Received    int64            `db:"received_bytes"`
	Ended       *time.Time       `db:"ended_at"`
	Count       int64            `db:"count"`
	Last        *time.Time       `db:"last_at"`
}

func (r flowRow) flow() controller.Flow {
	if r.Last == nil {
		r.Count = 0 // it is one flow
	}
	return controller.Flow{WorkspaceID: r.WorkspaceID, Flow: core.Flow{
		ID: r.ID, SandboxID: r.SandboxID, Epoch: r.Epoch, At: r.At.UTC(), Spoken: r.Spoken, Host: r.Host, Port: r.Port, Method: r.Method, Path: r.Path,
		Outcome: r.Outcome, Rule: r.Rule, Grant: r.Grant, Reason: r.Reason, Status: r.Status, Sent: r.Sent, Received: r.Received, Ended: timeOf(r.Ended).UTC(),
		Count: r.Count, Last: timeOf(r.Last).UTC(),
	}}
}

// WorkspaceFlows lists, newest first.
func (t *tx) WorkspaceFlows(ctx context.Context, id core.WorkspaceID, f controller.FlowFilter) ([]controller.Flow, error) {
	q := &filter{relation: "f", args: args{"limit": f.Limit}}
	q.equal("workspace_id", string(id))
	q.equal("outcome", string(f.Outcome))
	q.equal("host", f.Host)
	q.add(lastOfFlow, "", nil)
	if f.After.ID != "" {
		q.add("(f.at, f.id) < (@after_at::timestamptz, @after_id::text)", "after_at", f.After.At)
		q.args["after_id"] = f.After.ID
	}
	rows, err := many[flowRow](ctx, t, `SELECT`+flowColumns+` FROM flows f`+q.where()+` ORDER BY f.at DESC, f.id DESC LIMIT @limit`, q.args)
	list := make([]controller.Flow, len(rows))
	for i, r := range rows {
		list[i] = r.flow()
	}
	return list, err
}

// segment is what a checkpoint c has behind it that its parent p has not: flows of the sandbox that it was captured from, since the parent was
// captured from it, too, or since it began; of each the row that says most. What lists effects and what counts them both take it.
const segment = ` f.sandbox_id = c.sandbox_id AND f.at > CASE WHEN p.sandbox_id = c.sandbox_id THEN p.instant_at ELSE '-infinity' END AND f.at <= c.instant_at AND f.changes AND` + lastOfFlow

type effectRow struct {
	flowRow
	CheckpointID core.CheckpointID `db:"checkpoint_id"`
	Depth        int               `db:"depth"`
}

// Effects walks the path and looks at each segment along an index.
func (t *tx) Effects(ctx context.Context, id core.CheckpointID, after controller.EffectMark, limit int) ([]controller.Effect, error) {
	rows, err := many[effectRow](ctx, t, `
		WITH RECURSIVE up AS (
			SELECT c.id, c.parent_id, c.depth, c.sandbox_id, c.instant_at FROM checkpoints c WHERE c.id = @id
			UNION ALL
			SELECT p.id, p.parent_id, p.depth, p.sandbox_id, p.instant_at FROM up CROSS JOIN LATERAL (
				SELECT x.id, x.parent_id, x.depth, x.sandbox_id, x.instant_at FROM checkpoints x WHERE x.id = up.parent_id LIMIT 1
			) p
		)
		SELECT c.id AS checkpoint_id, c.depth,`+flowColumns+`
		FROM up c LEFT JOIN up p ON p.id = c.parent_id CROSS JOIN LATERAL (
			SELECT * FROM flows f WHERE`+segment+` AND (c.depth > @depth OR (f.at, f.id) > (@after_at::timestamptz, @after_id::text))
			ORDER BY f.at, f.id LIMIT @limit
		) f
		WHERE c.depth >= @depth ORDER BY c.depth, f.at, f.id LIMIT @limit`,
		args{"id": id, "depth": after.Depth, "after_at": after.At, "after_id": after.ID, "limit": limit})
	list := make([]controller.Effect, len(rows))
	for i, r := range rows {
		list[i] = controller.Effect{Flow: r.flow(), CheckpointID: r.CheckpointID, Depth: r.Depth}
	}
	return list, err
}

// effects counts those of each of the nodes that its parent has not.
func (t *tx) effects(ctx context.Context, ids []core.CheckpointID) (map[core.CheckpointID]int, error) {
	rows, err := many[countRow](ctx, t, `
		SELECT c.id AS parent_id, f.count FROM checkpoints c LEFT JOIN LATERAL (SELECT * FROM checkpoints x WHERE x.id = c.parent_id LIMIT 1) p ON true
		CROSS JOIN LATERAL (SELECT count(*) FROM flows f WHERE`+segment+`) f
		WHERE c.id = ANY(@ids::text[]) AND c.sandbox_id IS NOT NULL AND f.count > 0`, args{"ids": texts(ids)})
	counts := make(map[core.CheckpointID]int, len(rows))
	for _, r := range rows {
		counts[r.ID] = r.Count
	}
	return counts, err
}

// TidyFlows has the owner do it: nobody else may.
func (t *tx) TidyFlows(ctx context.Context, keep time.Duration) error {
	if _, err := t.exec(ctx, `SELECT coppice_tidy_flows(make_interval(secs => @keep))`, args{"keep": keep.Seconds()}); err != nil {
		return err
	}
	_, err := t.exec(ctx, `DELETE FROM flow_rows WHERE month + interval '1 month' <= (now() - make_interval(secs => @keep)) AT TIME ZONE 'UTC'`, args{"keep": keep.Seconds()})
	return err
}
