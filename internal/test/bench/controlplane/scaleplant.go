package controlplane

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"net/netip"
	"regexp"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// What each simulated runner has. Its projects are on it alone.
const (
	scaleSlots    = 64
	projectsEach  = 10  // of a runner
	nodesEach     = 100 // checkpoints of a project, of which the first is sealed
	livesEach     = 5   // live workspaces of a project
	chainEach     = 30  // nodes of a project that are one chain; the others are leaves on it
	workspaceEach = projectsEach * livesEach
)

// numbered makes an id from a number: digits are letters of the alphabet of ids too, and the last of them stands for
// only three bits.
func numbered[T ~string](prefix string, n int64) T { return T(fmt.Sprintf("%s_%025d0", prefix, n)) }

func projectID(p int) core.ProjectID { return numbered[core.ProjectID]("prj", int64(p)+1) }
func runnerID(r int) core.RunnerID   { return numbered[core.RunnerID]("rnr", int64(r)+1) }

// projectToken is the secret of a project's API key.
func projectToken(p int) string { return fmt.Sprint("coppice_bench-", p) }

// nodeID is a checkpoint of a project. Like real ids, they sort by the time of their insertion, across projects.
func nodeID(step, node, p int) core.CheckpointID {
	return numbered[core.CheckpointID]("ckpt", int64(step+1)*1_000_000_000_000+int64(node)*1_000_000+int64(p))
}

// planting is a part of the fleet that is inserted at once: runners from..to-1.
type planting struct {
	step, from, to int
	workspace      string // a real one, the model of all
	checkpoint     string // a real one, the model of all
}

// plantSQL inserts the rows of a planting, in the order of its statements. The triggers that run write history (events,
// the audit log, operations, reports). They are off for checkpoints, because a checkpoint cannot begin as captured;
// their counts are corrected afterwards.
var plantSQL = []string{
	`INSERT INTO projects (id, name) SELECT 'prj_' || lpad((p + 1)::text, 25, '0') || '0', 'bench-' || p FROM generate_series(@from * @projects, @to * @projects - 1) AS p`,
	`INSERT INTO api_keys (id, project_id, name, prefix, hash, scopes)
		SELECT 'key_' || lpad((p + 1)::text, 25, '0') || '0', 'prj_' || lpad((p + 1)::text, 25, '0') || '0', 'bench', 'coppice_', sha256(convert_to('coppice_bench-' || p, 'UTF8')), @scopes::text[]
		FROM generate_series(@from * @projects, @to * @projects - 1) AS p`,
	`SET session_replication_role = replica`,
	`INSERT INTO checkpoints (id, project_id, kind, state, parent_project_id, parent_id, root_id, depth, workspace_id, workspace_epoch,
			image_name, image_digest, vcpus, memory_mib, disk_gib, runner_id, runner_class, class_key, base_id, annotations, pause_ms, timings, parent_reseal,
			stale_processes, delta_bytes, device_state_bytes, disk_bytes, operation_id, captured_at, sealed_at, manifest_key, manifest_digest, manifest_bytes, stored_bytes)
		SELECT 'ckpt_' || lpad(((@step + 1) * 1000000000000::bigint + i * 1000000::bigint + p)::text, 25, '0') || '0', 'prj_' || lpad((p + 1)::text, 25, '0') || '0', 'user',
			CASE WHEN i = 0 THEN 'sealed' ELSE 'captured' END,
			CASE WHEN i = 0 THEN s.parent_project_id ELSE 'prj_' || lpad((p + 1)::text, 25, '0') || '0' END,
			CASE WHEN i = 0 THEN s.root_id ELSE 'ckpt_' || lpad(((@step + 1) * 1000000000000::bigint + up * 1000000::bigint + p)::text, 25, '0') || '0' END,
			s.root_id, node.deep, 'ws_' || lpad((p * @lives + i % @lives + 1)::text, 25, '0') || '0', 1,
			s.image_name, s.image_digest, s.vcpus, s.memory_mib, s.disk_gib, 'rnr_' || lpad((p / @projects + 1)::text, 25, '0') || '0', s.runner_class, s.class_key, s.base_id,
			jsonb_build_object('score', i / 100.0), s.pause_ms, s.timings, s.parent_reseal, s.stale_processes, s.delta_bytes, s.device_state_bytes, s.disk_bytes,
			'op_' || lpad((i * 1000000::bigint + p)::text, 25, '0') || '0', now(),
			CASE WHEN i = 0 THEN now() END, CASE WHEN i = 0 THEN 'v1/prj_' || lpad((p + 1)::text, 25, '0') || '0' || '/1/manifest' END,
			CASE WHEN i = 0 THEN s.image_digest END, CASE WHEN i = 0 THEN 4096 END, CASE WHEN i = 0 THEN s.delta_bytes END
		FROM checkpoints s,
			(SELECT i, CASE WHEN i < @chain THEN i - 1 ELSE i % @chain END AS up, CASE WHEN i < @chain THEN i + 1 ELSE i % @chain + 2 END AS deep
				FROM generate_series(0, @nodes - 1) AS i) AS node,
			generate_series(@from * @projects, @to * @projects - 1) AS p
		WHERE s.id = @checkpoint ORDER BY i, p`,
	`INSERT INTO checkpoint_copies (checkpoint_id, runner_id, project_id, id_sum) SELECT c.id, c.runner_id, c.project_id, coppice_id_sum(c.id) FROM checkpoints c
		WHERE c.id >= 'ckpt_' || lpad(((@step + 1) * 1000000000000::bigint)::text, 25, '0') || '0' AND c.id < 'ckpt_' || lpad(((@step + 2) * 1000000000000::bigint)::text, 25, '0') || '0'`,
	`SET session_replication_role = origin`,
	`UPDATE quotas q SET checkpoints = n.checkpoints, checkpoint_bytes = n.bytes, workspaces = @lives
		FROM (SELECT project_id, count(*) AS checkpoints, sum(delta_bytes + device_state_bytes + disk_bytes) AS bytes FROM checkpoints
			WHERE id >= 'ckpt_' || lpad(((@step + 1) * 1000000000000::bigint)::text, 25, '0') || '0' AND id < 'ckpt_' || lpad(((@step + 2) * 1000000000000::bigint)::text, 25, '0') || '0'
			GROUP BY project_id) AS n
		WHERE q.project_id = n.project_id`,
}

// liveSQL inserts the live workspaces of a planting, with all triggers. Their runners have registered already.
var liveSQL = []string{
	`INSERT INTO workspaces SELECT (jsonb_populate_record(w, jsonb_build_object('id', 'ws_' || lpad((n + 1)::text, 25, '0') || '0', 'project_id', prj, 'name', 'ws-' || n, 'state', 'restoring',
			'sandbox_id', NULL, 'ready_at', NULL, 'checkpoint_id', NULL, 'checkpoint_project_id', NULL, 'parent_project_id', prj, 'parent_checkpoint_id', node, 'created_at', now()))).*
		FROM workspaces w, (` + livesOf + `) AS l WHERE w.id = @workspace`,
	`INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, mac, ip)
		SELECT 'sbx_' || lpad((n + 1)::text, 25, '0') || '0', prj, 'ws_' || lpad((n + 1)::text, 25, '0') || '0', 1, rnr, s.vcpus, s.memory_mib, 'bench-' || n, 'ws-' || n, md5(n::text),
			'02:00:' || lpad(to_hex(n / 65536), 2, '0') || ':' || lpad(to_hex(n / 256 % 256), 2, '0') || ':' || lpad(to_hex(n % 256), 2, '0') || ':00', '10.83.' || 1 + n / 256 || '.' || n % 256
		FROM sandboxes s, (` + livesOf + `) AS l WHERE s.workspace_id = @workspace AND s.ended_at IS NULL`,
	`UPDATE workspaces w SET state = 'ready', ready_at = now(), sandbox_id = 'sbx_' || lpad((n + 1)::text, 25, '0') || '0', checkpoint_id = node, checkpoint_project_id = prj
		FROM (` + livesOf + `) AS l WHERE w.id = 'ws_' || lpad((n + 1)::text, 25, '0') || '0' AND w.id <> @workspace`,
}

// livesOf lists live workspaces: all workspaces of a project are on the last node of its chain.
const livesOf = `SELECT n, 'prj_' || lpad((n / @lives + 1)::text, 25, '0') || '0' AS prj, 'rnr_' || lpad((n / @lives / @projects + 1)::text, 25, '0') || '0' AS rnr,
	'ckpt_' || lpad(((@step + 1) * 1000000000000::bigint + (@chain - 1) * 1000000::bigint + n / @lives)::text, 25, '0') || '0' AS node
	FROM generate_series(@from * @projects * @lives, @to * @projects * @lives - 1) AS n`

// liveInstance is a live workspace on its runner.
func liveInstance(step, n int, like runnerapi.Checkpoint, at time.Time) runnerapi.Sandbox {
	return runnerapi.Sandbox{
		ID: numbered[core.SandboxID]("sbx", int64(n)+1), WorkspaceID: numbered[core.WorkspaceID]("ws", int64(n)+1), Epoch: 1, State: runnerapi.SandboxReady,
		Checkpoint: nodeID(step, chainEach-1, n/livesEach), Resources: like.Resources, StartedAt: at,
		Identity: core.Identity{
			Generation: fmt.Sprint("bench-", n), Hostname: fmt.Sprint("ws-", n), IP: netip.AddrFrom4([4]byte{10, 83, byte(1 + n/256), byte(n % 256)}), //nolint:gosec // G115: less than 65,280
		},
	}
}

// arguments are the arguments of plantSQL and liveSQL; each statement uses those that it names.
func (p planting) arguments() map[string]any {
	scopes := make([]string, len(core.ProjectScopes))
	for i, s := range core.ProjectScopes {
		scopes[i] = string(s)
	}
	return map[string]any{
		"step": p.step, "from": p.from, "to": p.to, "projects": projectsEach, "lives": livesEach, "nodes": nodesEach, "chain": chainEach,
		"scopes": scopes, "workspace": p.workspace, "checkpoint": p.checkpoint,
	}
}

// run executes statements in one transaction, so that either all rows are inserted or none.
func (p planting) run(ctx context.Context, db *pgx.Conn, statements []string) error {
	return runAll(ctx, db, statements, p.arguments())
}

func runAll(ctx context.Context, db *pgx.Conn, statements []string, values map[string]any) error {
	return pgx.BeginFunc(ctx, db, func(tx pgx.Tx) error {
		for _, sql := range statements {
			if _, err := tx.Exec(ctx, inline(sql, values)); err != nil {
				return fmt.Errorf("%s: %w", sql[:min(len(sql), 60)], err)
			}
		}
		return nil
	})
}

var parameter = regexp.MustCompile(`@[a-z]+`)

// inline puts values into a statement. They are numbers, ids and scopes that this program has made, and their types
// would be ambiguous as parameters. A name without a value stays, and the server refuses the statement.
func inline(sql string, values map[string]any) string {
	return parameter.ReplaceAllStringFunc(sql, func(name string) string {
		switch v := values[name[1:]].(type) {
		case nil:
			return name
		case string:
			return "'" + v + "'"
		case []string:
			return "'{" + strings.Join(v, ",") + "}'"
		default:
			return fmt.Sprint(v)
		}
	})
}

// searchSQL inserts one tree of many sealed nodes in its own project: the parent of node n is (n-1)/2, so the tree is
// about log2(n) deep.
var searchSQL = []string{
	`INSERT INTO projects (id, name) VALUES (@project, 'bench-search')`,
	`INSERT INTO api_keys (id, project_id, name, prefix, hash, scopes) VALUES ('key_' || right(@project, 26), @project, 'bench', 'coppice_', sha256(convert_to(@token, 'UTF8')), @scopes::text[])`,
	`INSERT INTO workspaces SELECT (jsonb_populate_record(w, jsonb_build_object('id', @searcher, 'project_id', @project, 'name', 'search', 'state', 'restoring',
			'sandbox_id', NULL, 'ready_at', NULL, 'checkpoint_id', NULL, 'checkpoint_project_id', NULL, 'created_at', now()))).* FROM workspaces w WHERE w.id = @workspace`,
	`UPDATE workspaces SET state = 'terminating' WHERE id = @searcher`,
	`UPDATE workspaces SET state = 'terminated', ended_at = now() WHERE id = @searcher`,
	`SET session_replication_role = replica`,
	`INSERT INTO checkpoints (id, project_id, kind, state, parent_project_id, parent_id, root_id, depth, workspace_id, workspace_epoch,
			image_name, image_digest, vcpus, memory_mib, disk_gib, runner_id, runner_class, class_key, base_id, annotations, pause_ms, timings, parent_reseal,
			stale_processes, delta_bytes, device_state_bytes, disk_bytes, captured_at, sealed_at, manifest_key, manifest_digest, manifest_bytes, stored_bytes)
		SELECT 'ckpt_' || lpad((9000000000000000 + n)::text, 25, '0') || '0', @project, 'user', 'sealed',
			CASE WHEN n = 0 THEN s.parent_project_id ELSE @project END,
			CASE WHEN n = 0 THEN s.root_id ELSE 'ckpt_' || lpad((9000000000000000 + (n - 1) / 2)::text, 25, '0') || '0' END,
			s.root_id, floor(log(2.0, n + 1) + 1e-9)::int + 1, @searcher, 1, s.image_name, s.image_digest, s.vcpus, s.memory_mib, s.disk_gib, s.runner_id, s.runner_class, s.class_key, s.base_id,
			jsonb_build_object('score', n % 1000), s.pause_ms, s.timings, s.parent_reseal, s.stale_processes, s.delta_bytes, s.device_state_bytes, s.disk_bytes, now(),
			now(), 'v1/' || n || '/manifest', s.image_digest, 4096, s.delta_bytes
		FROM checkpoints s, generate_series(0, @nodes - 1) AS n WHERE s.id = @checkpoint`,
	`SET session_replication_role = origin`,
	`UPDATE quotas q SET checkpoints = n.checkpoints, checkpoint_bytes = n.bytes, max_checkpoints = 2 * n.checkpoints
		FROM (SELECT count(*) AS checkpoints, sum(delta_bytes + device_state_bytes + disk_bytes) AS bytes FROM checkpoints WHERE project_id = @project) AS n WHERE q.project_id = @project`,
}

// searchRoot is the first node of the tree of searchSQL.
var searchRoot = numbered[core.CheckpointID]("ckpt", 9_000_000_000_000_000)

// invariants are queries that return 0 if the rows are consistent.
var invariants = map[string]string{
	"projects whose count of checkpoints is wrong": `SELECT count(*) FROM quotas q JOIN (SELECT project_id, count(*) FILTER (WHERE state IN ('capturing', 'captured', 'sealed')) AS n,
			coalesce(sum(delta_bytes + device_state_bytes + disk_bytes) FILTER (WHERE state IN ('captured', 'sealed')), 0) AS bytes FROM checkpoints WHERE kind = 'user' GROUP BY project_id) AS c USING (project_id)
		WHERE (q.checkpoints, q.checkpoint_bytes) <> (c.n, c.bytes)`,
	"projects whose count of workspaces is too small": `SELECT count(*) FROM quotas q JOIN (SELECT project_id, count(*) AS n FROM workspaces WHERE state NOT IN ('terminated', 'failed', 'lost')
			GROUP BY project_id) AS w USING (project_id) WHERE q.workspaces < w.n`,
	"runners whose load is wrong": `SELECT count(*) FROM runner_loads l LEFT JOIN (SELECT runner_id, count(*) AS n, sum(vcpus) AS vcpus, sum(memory_mib) AS memory_mib FROM sandboxes
			WHERE ended_at IS NULL GROUP BY runner_id) AS s USING (runner_id)
		WHERE (l.sandboxes, l.vcpus, l.memory_mib) <> (coalesce(s.n, 0), coalesce(s.vcpus, 0), coalesce(s.memory_mib, 0))`,
	"captured checkpoints that no runner holds": `SELECT count(*) FROM checkpoints c WHERE c.state = 'captured'
		AND NOT EXISTS (SELECT 1 FROM checkpoint_copies k WHERE k.checkpoint_id = c.id AND k.runner_id = c.runner_id)`,
	"living sandboxes of dead workspaces": `SELECT count(*) FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id
		WHERE s.ended_at IS NULL AND (w.ended_at IS NOT NULL OR w.sandbox_id <> s.id)`,
	"ready workspaces without a living sandbox": `SELECT count(*) FROM workspaces w WHERE w.state = 'ready'
		AND NOT EXISTS (SELECT 1 FROM sandboxes s WHERE s.id = w.sandbox_id AND s.ended_at IS NULL)`,
	"checkpoints whose depth is wrong": `SELECT count(*) FROM checkpoints c JOIN checkpoints p ON p.id = c.parent_id WHERE c.depth <> p.depth + 1 OR c.root_id <> p.root_id`,
}

// foreignKeys makes a query for each foreign key of the tables that plantings write. It counts rows whose referenced
// row is missing, because the triggers that check this were off.
const foreignKeys = `
	SELECT 'rows of ' || k.conrelid::regclass || ' against ' || k.conname,
		format('SELECT count(*) FROM %s a WHERE %s AND NOT EXISTS (SELECT 1 FROM %s b WHERE %s)', k.conrelid::regclass,
			string_agg(format('a.%I IS NOT NULL', f.attname), ' AND '), k.confrelid::regclass, string_agg(format('b.%I = a.%I', t.attname, f.attname), ' AND '))
	FROM pg_constraint k, unnest(k.conkey, k.confkey) AS u (f, t), pg_attribute f, pg_attribute t
	WHERE k.contype = 'f' AND k.conrelid::regclass::text IN ('projects', 'api_keys', 'checkpoints', 'checkpoint_copies', 'workspaces', 'sandboxes', 'quotas', 'runner_loads')
		AND f.attrelid = k.conrelid AND f.attnum = u.f AND t.attrelid = k.confrelid AND t.attnum = u.t
	GROUP BY k.oid, k.conname, k.conrelid, k.confrelid`

// verify checks the rows against their constraints and counts.
func verify(ctx context.Context, db *pgx.Conn, withKeys bool) error {
	queries := maps.Clone(invariants)
	if withKeys {
		rows, err := db.Query(ctx, foreignKeys)
		if err != nil {
			return err
		}
		var what, sql string
		if _, err := pgx.ForEachRow(rows, []any{&what, &sql}, func() error {
			queries[what] = sql
			return nil
		}); err != nil {
			return err
		}
		if len(queries) == len(invariants) {
			return errors.New("the foreign keys of the tables were not found")
		}
	}
	var wrong []error
	for what, sql := range queries {
		var n int
		if err := db.QueryRow(ctx, sql).Scan(&n); err != nil {
			return fmt.Errorf("count %s: %w", what, err)
		}
		if n > 0 {
			wrong = append(wrong, fmt.Errorf("%d %s", n, what))
		}
	}
	return errors.Join(wrong...)
}
