package flowrows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/flows"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
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
	ID    string `db:"id"`
	Final bool   `db:"final"`
}

type flowKey struct {
	ID    string
	Final bool
}

// InsertFlows gives flows rows as far as the quota goes, and counts the others.
func (t *Tx) InsertFlows(ctx context.Context, runner core.RunnerID, list []core.Flow, q flows.Quota) (flows.Kept, error) {
	if len(list) == 0 {
		return flows.Kept{}, nil
	}
	list, err := t.uncounted(ctx, runner, list)
	if err != nil || len(list) == 0 {
		return flows.Kept{}, err
	}
	rooms, err := t.flowRooms(ctx, runner, list, q)
	if err != nil {
		return flows.Kept{}, err
	}
	rowed, counts, err := t.place(ctx, list, rooms)
	if err != nil {
		return flows.Kept{}, err
	}
	fresh, err := t.insertFlowRows(ctx, runner, rowed)
	if err != nil {
		return flows.Kept{}, err
	}
	for _, f := range fresh {
		rooms.kept(f)
	}
	if err := t.saveCounts(ctx, runner, counts); err != nil {
		return flows.Kept{}, err
	}
	out := flows.Kept{Fresh: fresh}
	out.Omitted, err = t.countFlows(ctx, rooms)
	return out, err
}

// place decides which flows of a batch get rows and which are counted. Both records of a flow are
// kept in the same way. If one record has a row, the other one gets a row too: otherwise the flow
// would look open for ever. If the beginning was counted, the end does not count as a second flow.
func (t *Tx) place(ctx context.Context, list []core.Flow, rooms flowRooms) (rows []core.Flow, counts *flowCounts, err error) {
	counts = newFlowCounts(rooms.now)
	has := map[string]bool{}
	if !rooms.enough(len(list)) || rooms.counted {
		if has, err = t.haveRows(ctx, list); err != nil {
			return nil, nil, err
		}
		if err := t.loadCounts(ctx, list, counts); err != nil {
			return nil, nil, err
		}
	}
	for _, f := range list {
		keep := has[f.ID] || rooms.both(f.SandboxID) == nil // the insertion leaves out what is of no sandbox of this runner
		if !keep && isEnd(f) {
			_, counted := counts.found(f, flows.KindOf(f))
			keep = !counted && rooms.take(f)
		} else if !keep {
			keep = rooms.take(f)
		}
		if keep {
			rows, has[f.ID] = append(rows, f), true
			continue
		}
		counts.add(f)
		rooms.omit(f)
	}
	return rows, counts, nil
}

type flowAt struct {
	SandboxID core.SandboxID `json:"sandbox_id"`
	At        time.Time      `json:"at"`
	ID        string         `json:"id"`
}

// haveRows finds the flows of a batch that have a row.
func (t *Tx) haveRows(ctx context.Context, list []core.Flow) (map[string]bool, error) {
	asked := make([]flowAt, len(list))
	for i, f := range list {
		asked[i] = flowAt{SandboxID: f.SandboxID, At: f.At, ID: f.ID}
	}
	rows, err := pgtx.Many[string](ctx, t, `
		SELECT v.id FROM jsonb_to_recordset(@asked::jsonb) AS v (sandbox_id text, at timestamptz, id text)
		CROSS JOIN LATERAL (SELECT FROM flows f WHERE f.sandbox_id = v.sandbox_id AND f.at = v.at AND f.id = v.id LIMIT 1) f`, pgtx.Args{"asked": asked})
	has := make(map[string]bool, len(rows))
	for _, r := range rows {
		has[r] = true
	}
	return has, err
}

// insertFlowRows is one statement. It returns those that were not there yet.
func (t *Tx) insertFlowRows(ctx context.Context, runner core.RunnerID, list []core.Flow) ([]core.Flow, error) {
	if len(list) == 0 {
		return nil, nil
	}
	rows, of := make([]newFlow, 0, len(list)), make(map[flowKey]core.Flow, len(list))
	for _, f := range list {
		row := newFlow{
			SandboxID: f.SandboxID, ID: f.ID, At: f.At, Final: f.Final(), Changes: f.Changes(), Spoken: f.Spoken, Host: f.Host, Port: f.Port, Method: f.Method, Path: f.Path,
			Outcome: f.Outcome, Rule: f.Rule, Grant: f.Grant, Reason: f.Reason, Status: f.Status, Sent: f.Sent, Received: f.Received, Count: f.Flows(),
		}
		if !f.Ended.IsZero() {
			row.Ended = &f.Ended
		}
		if !f.Last.IsZero() {
			row.Last = &f.Last
		}
		rows, of[flowKey{f.ID, row.Final}] = append(rows, row), f
	}
	kept, err := pgtx.Many[keptRow](ctx, t, `
		INSERT INTO flows (project_id, workspace_id, sandbox_id, epoch, id, at, final, changes, spoken, host, port, method, path, outcome, rule, grant_id, reason,
			status, sent_bytes, received_bytes, ended_at, count, last_at)
		SELECT s.project_id, s.workspace_id, s.id, s.epoch, v.id, v.at, v.final, v.changes, v.spoken, v.host, v.port, v.method, v.path, v.outcome, v.rule, v.grant_id, v.reason,
			v.status, v.sent_bytes, v.received_bytes, v.ended_at, v.count, v.last_at
		FROM jsonb_to_recordset(@rows::jsonb) AS v (sandbox_id text, id text, at timestamptz, final boolean, changes boolean, spoken text, host text, port int,
			method text, path text, outcome text, rule text, grant_id text, reason text, status int, sent_bytes bigint, received_bytes bigint, ended_at timestamptz,
			count bigint, last_at timestamptz)
		JOIN LATERAL (SELECT * FROM sandboxes x WHERE x.id = v.sandbox_id LIMIT 1) s ON s.runner_id = @runner
		ON CONFLICT DO NOTHING RETURNING id, final`, pgtx.Args{"rows": rows, "runner": runner})
	fresh := make([]core.Flow, len(kept))
	for i, k := range kept {
		fresh[i] = of[flowKey(k)]
	}
	return fresh, err
}

// OwnSandboxes selects.
func (t *Tx) OwnSandboxes(ctx context.Context, runner core.RunnerID, ids []core.SandboxID) ([]core.SandboxID, error) {
	return pgtx.Many[core.SandboxID](ctx, t, `SELECT s.id FROM sandboxes s WHERE s.id = ANY(@ids::text[]) AND s.runner_id = @runner`, pgtx.Args{"ids": pgtx.Texts(ids), "runner": runner})
}

// flowColumns are those of the relation f.
const flowColumns = `
	f.workspace_id, f.sandbox_id, f.epoch, f.id, f.at, f.spoken, f.host, f.port, f.method, f.path, f.outcome, f.rule, f.grant_id, f.reason, f.status, f.sent_bytes, f.received_bytes, f.ended_at, f.count,
	f.last_at, false AS counted, false AS opaque`

// countColumns are those of flowColumns, for the relation n of counts. Their ids are made up, so that lists can be read page by page.
const countColumns = `
	n.workspace_id, n.sandbox_id, n.epoch, ` + countID + ` AS id, n.first_at AS at, n.spoken, n.host, n.port, '' AS method, '' AS path,
	CASE n.kind WHEN 'denied' THEN 'denied' ELSE 'allowed' END AS outcome, n.rule, n.grant_id, '' AS reason, 0 AS status, n.sent_bytes, n.received_bytes,
	NULL::timestamptz AS ended_at, n.count, n.last_at, true AS counted, n.opaque`

const countID = `'counted-' || md5(jsonb_build_array(n.sandbox_id, n.kind, n.daily, n.from_at, n.spoken, n.opaque, n.host, n.port, n.grant_id)::text)`

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
	Counted     bool             `db:"counted"`
	Opaque      bool             `db:"opaque"`
}

func (r flowRow) flow() flows.Flow {
	if r.Last == nil {
		r.Count = 0 // it is one flow
	}
	return flows.Flow{WorkspaceID: r.WorkspaceID, Counted: r.Counted, Opaque: r.Opaque, Flow: core.Flow{
		ID: r.ID, SandboxID: r.SandboxID, Epoch: r.Epoch, At: r.At.UTC(), Spoken: r.Spoken, Host: r.Host, Port: r.Port, Method: r.Method, Path: r.Path,
		Outcome: r.Outcome, Rule: r.Rule, Grant: r.Grant, Reason: r.Reason, Status: r.Status, Sent: r.Sent, Received: r.Received, Ended: pgtx.TimeOf(r.Ended).UTC(),
		Count: r.Count, Last: pgtx.TimeOf(r.Last).UTC(),
	}}
}

// WorkspaceFlows lists, newest first. A count has the place of its first flow.
func (t *Tx) WorkspaceFlows(ctx context.Context, id core.WorkspaceID, f flows.Filter) ([]flows.Flow, error) {
	q := &pgtx.Filter{Relation: "f", Args: pgtx.Args{"limit": f.Limit}}
	q.Equal("workspace_id", string(id))
	q.Equal("outcome", string(f.Outcome))
	q.Equal("host", f.Host)
	if f.After.ID != "" {
		q.Add("(f.at, f.id) < (@after_at::timestamptz, @after_id::text)", "after_at", f.After.At)
		q.Args["after_id"] = f.After.ID
	}
	counts := q.Where()
	q.Add(lastOfFlow, "", nil)
	rows, err := pgtx.Many[flowRow](ctx, t, `
		(SELECT`+flowColumns+` FROM flows f`+q.Where()+` ORDER BY f.at DESC, f.id DESC LIMIT @limit)
		UNION ALL
		(SELECT f.* FROM (SELECT`+countColumns+` FROM flow_counts n WHERE n.count > 0) f`+counts+` ORDER BY f.at DESC, f.id DESC LIMIT @limit)
		ORDER BY at DESC, id DESC LIMIT @limit`, q.Args)
	return pgtx.Map(rows, flowRow.flow), err
}

// segment is what a checkpoint c has behind it that its parent p has not: flows of the sandbox that it was captured from, since the parent was
// captured from it, too, or since it began; of each the row that says most. What lists effects and what counts them both take it.
const segment = ` f.sandbox_id = c.sandbox_id AND f.at > ` + segmentStart + ` AND f.at <= c.instant_at AND f.changes AND` + lastOfFlow

// countSegment is the same for counts. A count whose flows began on both sides of an instant belongs to both.
const countSegment = ` n.sandbox_id = c.sandbox_id AND n.kind = 'effect' AND n.count > 0 AND n.last_at > ` + segmentStart + ` AND n.first_at <= c.instant_at`

const segmentStart = `CASE WHEN p.sandbox_id = c.sandbox_id THEN p.instant_at ELSE '-infinity' END`

type effectRow struct {
	flowRow
	CheckpointID core.CheckpointID `db:"checkpoint_id"`
	Depth        int               `db:"depth"`
}

// Effects walks the path and looks at each segment along an index: at most limit rows and limit counts of each.
func (t *Tx) Effects(ctx context.Context, id core.CheckpointID, after flows.EffectMark, limit int) ([]flows.Effect, error) {
	const later = ` AND (c.depth > @depth OR (f.at, f.id) > (@after_at::timestamptz, @after_id::text))`
	rows, err := pgtx.Many[effectRow](ctx, t, `
		WITH RECURSIVE up AS (
			SELECT c.id, c.parent_id, c.depth, c.sandbox_id, c.instant_at FROM checkpoints c WHERE c.id = @id
			UNION ALL
			SELECT p.id, p.parent_id, p.depth, p.sandbox_id, p.instant_at FROM up CROSS JOIN LATERAL (
				SELECT x.id, x.parent_id, x.depth, x.sandbox_id, x.instant_at FROM checkpoints x WHERE x.id = up.parent_id LIMIT 1
			) p
		)
		SELECT c.id AS checkpoint_id, c.depth, f.*
		FROM (SELECT * FROM up WHERE depth >= @depth ORDER BY depth) c
		LEFT JOIN LATERAL (SELECT x.sandbox_id, x.instant_at FROM checkpoints x WHERE x.id = c.parent_id LIMIT 1) p ON true
		CROSS JOIN LATERAL (
			(SELECT`+flowColumns+` FROM flows f WHERE`+segment+later+` ORDER BY f.at, f.id LIMIT @limit)
			UNION ALL
			(SELECT f.* FROM (SELECT`+countColumns+` FROM flow_counts n WHERE`+countSegment+`) f WHERE true`+later+` ORDER BY f.at, f.id LIMIT @limit)
		) f
		ORDER BY c.depth, f.at, f.id LIMIT @limit`,
		pgtx.Args{"id": id, "depth": after.Depth, "after_at": after.At, "after_id": after.ID, "limit": limit})
	list := make([]flows.Effect, len(rows))
	for i, r := range rows {
		list[i] = flows.Effect{Flow: r.flow(), CheckpointID: r.CheckpointID, Depth: r.Depth}
	}
	return list, err
}

type effectCount struct {
	ID    core.CheckpointID `db:"id"`
	Count int               `db:"count"`
}

// CountEffects counts those of each of the nodes that its parent has not. It looks at a bounded number of rows of each node.
func (t *Tx) CountEffects(ctx context.Context, ids []core.CheckpointID) (map[core.CheckpointID]int, error) {
	rows, err := pgtx.Many[effectCount](ctx, t, `
		SELECT c.id, f.count + n.count AS count
		FROM checkpoints c LEFT JOIN LATERAL (SELECT * FROM checkpoints x WHERE x.id = c.parent_id LIMIT 1) p ON true
		CROSS JOIN LATERAL (SELECT count(*) FROM (SELECT FROM flows f WHERE`+segment+` LIMIT @most) few) f
		CROSS JOIN LATERAL (SELECT least(coalesce(sum(n.count), 0), 1::bigint << 61)::bigint AS count FROM flow_counts n WHERE`+countSegment+`) n
		WHERE c.id = ANY(@ids::text[]) AND c.sandbox_id IS NOT NULL AND f.count + n.count > 0`, pgtx.Args{"ids": pgtx.Texts(ids), "most": flows.MaxEffectRows})
	counts := make(map[core.CheckpointID]int, len(rows))
	for _, r := range rows {
		counts[r.ID] = r.Count
	}
	return counts, err
}

// TidyFlows has the owner do it: nobody else may.
func (t *Tx) TidyFlows(ctx context.Context, keep time.Duration) error {
	if _, err := t.Exec(ctx, `SELECT coppice_tidy_flows(make_interval(secs => @keep))`, pgtx.Args{"keep": keep.Seconds()}); err != nil {
		return err
	}
	_, err := t.Exec(ctx, `DELETE FROM flow_rows WHERE month + interval '1 month' <= (now() - make_interval(secs => @keep)) AT TIME ZONE 'UTC'`, pgtx.Args{"keep": keep.Seconds()})
	return err
}
