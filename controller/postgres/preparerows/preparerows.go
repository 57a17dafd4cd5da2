// Package preparerows keeps in PostgreSQL for which checkpoints machines are prepared.
package preparerows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/core"
)

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}

type stateRow struct {
	Asked            int           `db:"asked"`
	ExpiresAt        *time.Time    `db:"expires_at"`
	RunnerID         core.RunnerID `db:"runner_id"`
	Max              int           `db:"most"`
	Ready            int           `db:"ready"`
	MemoryBytes      int64         `db:"memory_bytes"`
	GivenUp          bool          `db:"given_up"`
	Hits             int64         `db:"hits"`
	Misses           int64         `db:"misses"`
	Wasted           int64         `db:"wasted"`
	TakenCPUSeconds  float64       `db:"taken_cpu_seconds"`
	WastedCPUSeconds float64       `db:"wasted_cpu_seconds"`
}

func (r stateRow) state() prepare.State {
	return prepare.State{
		Asked: r.Asked, ExpiresAt: pgtx.TimeOf(r.ExpiresAt), RunnerID: r.RunnerID, Max: r.Max, Ready: r.Ready, MemoryBytes: r.MemoryBytes, GivenUp: r.GivenUp,
		Counts: runnerapi.PreparedCounts{Hits: r.Hits, Misses: r.Misses, Wasted: r.Wasted, TakenCPUSeconds: r.TakenCPUSeconds, WastedCPUSeconds: r.WastedCPUSeconds},
	}
}

// stateColumns need the relation p. What is asked for ends at once when its time is up; the row is changed a little later.
const stateColumns = ` CASE WHEN p.expires_at > now() THEN p.count ELSE 0 END AS asked, p.expires_at, coalesce(p.runner_id, '') AS runner_id, p.most, p.ready, p.memory_bytes, p.given_up,
	p.hits, p.misses, p.wasted, p.taken_cpu_seconds, p.wasted_cpu_seconds`

// SetPrepared takes a lock that all asks of a project have in common, so that their sum stays within the bound.
func (t *Tx) SetPrepared(ctx context.Context, project core.ProjectID, id core.CheckpointID, w prepare.Wanted, most int) (prepare.State, error) {
	t.LockProject(project, "prepared")
	absent := core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "checkpoint %s does not exist", id)
	type found struct {
		State core.CheckpointState `db:"state"`
		Sum   int                  `db:"sum"`
	}
	got, err := pgtx.One[found](ctx, t, absent, `
		SELECT c.state, (SELECT coalesce(sum(p.count), 0)::int FROM prepared_checkpoints p WHERE p.project_id = @project AND p.checkpoint_id <> @id AND p.count > 0 AND p.expires_at > now()) AS sum
		FROM checkpoints c WHERE c.id = @id AND c.project_id = @project AND NOT c.pruned`, pgtx.Args{"id": id, "project": project})
	switch {
	case err != nil:
		return prepare.State{}, err
	case w.Count > 0 && (got.State == core.CheckpointFailed || got.State == core.CheckpointDeleted):
		return prepare.State{}, core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady, "checkpoint %s is %s, so no machine can be prepared for it", id, got.State)
	case got.Sum+w.Count > most:
		return prepare.State{}, core.Errorf(core.Exhausted, core.CodeQuotaExceeded,
			"the project asks for %d prepared machines of other checkpoints, and %d more would be above its limit of %d; ask for fewer, or end asks that are no longer needed", got.Sum, w.Count, most)
	}
	row, err := pgtx.One[stateRow](ctx, t, nil, `
		INSERT INTO prepared_checkpoints AS p (checkpoint_id, project_id, count, expires_at) VALUES (@id, @project, @count, now() + make_interval(secs => @ttl))
		ON CONFLICT (checkpoint_id) DO UPDATE SET count = excluded.count, expires_at = excluded.expires_at, version = p.version + 1, given_up = false
		RETURNING`+stateColumns, pgtx.Args{"id": id, "project": project, "count": w.Count, "ttl": w.TTL.Seconds()})
	return row.state(), err
}

// Prepared reads.
func (t *Tx) Prepared(ctx context.Context, id core.CheckpointID) (prepare.State, error) {
	rows, err := pgtx.Many[stateRow](ctx, t, `SELECT`+stateColumns+` FROM prepared_checkpoints p WHERE p.checkpoint_id = @id`, pgtx.Args{"id": id})
	if err != nil || len(rows) == 0 {
		return prepare.State{}, err
	}
	return rows[0].state(), nil
}

type askRow struct {
	Checkpoint core.CheckpointID `db:"checkpoint_id"`
	Project    core.ProjectID    `db:"project_id"`
	Egress     core.EgressPolicy `db:"egress_policy"`
	Count      int               `db:"count"`
	Version    int64             `db:"version"`
	Moves      int64             `db:"moves"`
	Left       float64           `db:"left_seconds"`
	RunnerID   core.RunnerID     `db:"runner_id"`
	Endpoint   string            `db:"endpoint"`
}

// PreparedAsks chooses a runner for each ask: the emptiest of those that hold the checkpoint, have a lease and take sandboxes. An ask that has ended goes
// to the runner that had it. A capture that goes on has no copy yet, so nothing is sent.
func (t *Tx) PreparedAsks(ctx context.Context, ids []core.CheckpointID, after core.CheckpointID, limit int) ([]prepare.Ask, error) {
	rows, err := pgtx.Many[askRow](ctx, t, `
		WITH due AS MATERIALIZED (
			SELECT p.* FROM prepared_checkpoints p
			WHERE CASE WHEN @some THEN p.checkpoint_id = ANY(@ids::text[]) ELSE p.count > 0 AND p.expires_at > now() AND p.checkpoint_id > @after END
			ORDER BY p.checkpoint_id LIMIT @limit FOR UPDATE
		), chosen AS (
			SELECT d.checkpoint_id, r.id AS runner_id, r.endpoint, coalesce(w.egress_policy, @deny::text) AS egress_policy
			FROM due d JOIN checkpoints c ON c.id = d.checkpoint_id LEFT JOIN workspaces w ON w.id = c.workspace_id
			LEFT JOIN LATERAL (
				SELECT r.id, r.endpoint, l.fill FROM checkpoint_copies k JOIN runner_loads l ON l.runner_id = k.runner_id JOIN runners r ON r.id = k.runner_id
				WHERE k.checkpoint_id = d.checkpoint_id AND l.open AND r.fenced_at IS NULL AND r.lease_expires_at > now() AND c.state IN (`+living+`)
					AND d.count > 0 AND d.expires_at > now()
				UNION ALL SELECT r.id, r.endpoint, 0 FROM runners r WHERE r.id = d.runner_id AND (d.count = 0 OR d.expires_at <= now()) AND r.fenced_at IS NULL
				ORDER BY fill, id LIMIT 1
			) r ON true
		), moved AS (
			UPDATE prepared_checkpoints p SET runner_id = x.runner_id, moves = p.moves + 1, ready = 0, memory_bytes = 0, instance = ''
			FROM chosen x WHERE p.checkpoint_id = x.checkpoint_id AND x.runner_id IS NOT NULL AND p.runner_id IS DISTINCT FROM x.runner_id
			RETURNING p.checkpoint_id
		)
		SELECT d.checkpoint_id, d.project_id, x.egress_policy, CASE WHEN d.expires_at > now() THEN d.count ELSE 0 END AS count, d.version,
			d.moves + CASE WHEN m.checkpoint_id IS NULL THEN 0 ELSE 1 END AS moves,
			greatest(extract(epoch FROM d.expires_at - now()), 0)::float8 AS left_seconds, coalesce(x.runner_id, '') AS runner_id, coalesce(x.endpoint, '') AS endpoint
		FROM due d JOIN chosen x ON x.checkpoint_id = d.checkpoint_id LEFT JOIN moved m ON m.checkpoint_id = d.checkpoint_id ORDER BY d.checkpoint_id`,
		pgtx.Args{"some": len(ids) > 0, "ids": pgtx.Texts(ids), "after": after, "limit": limit, "deny": core.EgressDenyAll})
	return pgtx.Map(rows, func(r askRow) prepare.Ask {
		return prepare.Ask{
			Checkpoint: r.Checkpoint, Project: r.Project, Egress: r.Egress, Count: r.Count, Version: r.Version, Moves: r.Moves,
			Left: time.Duration(r.Left * float64(time.Second)), RunnerID: r.RunnerID, Endpoint: r.Endpoint,
		}
	}), err
}

// living are the states of checkpoints that can be forked.
var living = pgtx.Quoted(core.CheckpointCaptured, core.CheckpointSealed)

// NotePrepared adds what the counts have grown by since the last answer of the same instance. An answer that was overtaken by a later one has smaller
// counts, and adds nothing.
func (t *Tx) NotePrepared(ctx context.Context, list []prepare.Report) error {
	n := len(list)
	ids, instances := make([]core.CheckpointID, n), make([]string, n)
	moves, most, ready, memory, hits, misses, wasted := make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n), make([]int64, n)
	taken, lost, givenUp := make([]float64, n), make([]float64, n), make([]bool, n)
	for i, r := range list {
		ids[i], instances[i], moves[i], most[i], ready[i], memory[i], givenUp[i] = r.Checkpoint, r.Instance, r.Moves, int64(r.Max), int64(r.Ready), r.MemoryBytes, r.GivenUp
		hits[i], misses[i], wasted[i], taken[i], lost[i] = r.Hits, r.Misses, r.Wasted, r.TakenCPUSeconds, r.WastedCPUSeconds
	}
	_, err := t.Exec(ctx, `
		WITH got AS MATERIALIZED (
			SELECT * FROM unnest(@ids::text[], @instances::text[], @moves::bigint[], @most::bigint[], @ready::bigint[], @memory::bigint[], @given_up::boolean[],
				@hits::bigint[], @misses::bigint[], @wasted::bigint[], @taken::float8[], @lost::float8[])
				AS g (id, instance, moves, most, ready, memory, given_up, hits, misses, wasted, taken, lost)
		), locked AS MATERIALIZED (
			SELECT p.checkpoint_id FROM prepared_checkpoints p WHERE p.checkpoint_id = ANY(@ids::text[]) ORDER BY p.checkpoint_id FOR UPDATE
		), grown AS (
			SELECT g.*, CASE WHEN p.instance = g.instance THEN p.seen_hits ELSE 0 END AS h, CASE WHEN p.instance = g.instance THEN p.seen_misses ELSE 0 END AS m,
				CASE WHEN p.instance = g.instance THEN p.seen_wasted ELSE 0 END AS w, CASE WHEN p.instance = g.instance THEN p.seen_taken_cpu ELSE 0 END AS t,
				CASE WHEN p.instance = g.instance THEN p.seen_wasted_cpu ELSE 0 END AS l
			FROM got g JOIN prepared_checkpoints p ON p.checkpoint_id = g.id JOIN locked ON locked.checkpoint_id = g.id WHERE g.instance <> ''
		)
		UPDATE prepared_checkpoints p SET most = least(g.most, 100000)::int, ready = g.ready::int, memory_bytes = g.memory, given_up = g.given_up, instance = g.instance,
			hits = p.hits + greatest(x.hits - x.h, 0), misses = p.misses + greatest(x.misses - x.m, 0), wasted = p.wasted + greatest(x.wasted - x.w, 0),
			taken_cpu_seconds = p.taken_cpu_seconds + greatest(x.taken - x.t, 0), wasted_cpu_seconds = p.wasted_cpu_seconds + greatest(x.lost - x.l, 0),
			seen_hits = greatest(x.hits, x.h), seen_misses = greatest(x.misses, x.m), seen_wasted = greatest(x.wasted, x.w),
			seen_taken_cpu = greatest(x.taken, x.t), seen_wasted_cpu = greatest(x.lost, x.l)
		FROM got g JOIN grown x ON x.id = g.id WHERE p.checkpoint_id = g.id AND p.moves = g.moves`,
		pgtx.Args{
			"ids": pgtx.Texts(ids), "instances": instances, "moves": moves, "most": most, "ready": ready, "memory": memory, "given_up": givenUp,
			"hits": hits, "misses": misses, "wasted": wasted, "taken": taken, "lost": lost,
		})
	return err
}

// EndPrepared keeps the rows with their counts, for the usage.
func (t *Tx) EndPrepared(ctx context.Context, limit int) (int, error) {
	n, err := t.Exec(ctx, `
		UPDATE prepared_checkpoints SET count = 0, ready = 0, memory_bytes = 0 WHERE checkpoint_id = ANY(ARRAY(
			SELECT p.checkpoint_id FROM prepared_checkpoints p JOIN checkpoints c ON c.id = p.checkpoint_id
			WHERE p.count > 0 AND (p.expires_at <= now() OR p.given_up OR c.state NOT IN ('capturing', `+living+`))
			ORDER BY p.checkpoint_id LIMIT @limit FOR UPDATE OF p SKIP LOCKED))`, pgtx.Args{"limit": limit})
	return int(n), err
}
