package postgres_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/upkeep"
	"github.com/coppice-dev/coppice/core"
)

const year = 365 * 24 * time.Hour

// makePartitions calls until nothing is in the way, and returns how often something was.
func (d *db) makePartitions(table upkeep.Table, keep time.Duration, batch int) (calls int) {
	d.t.Helper()
	for {
		var n int
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			n, err = tx.MakePartitions(ctx, table, keep, batch)
			return err
		})
		if n == 0 {
			return calls
		}
		if calls++; calls > 1000 {
			d.t.Fatal("it does not end")
		}
	}
}

// partitioned tells how to put rows of a time into a table, past its triggers.
var partitioned = map[upkeep.Table]struct{ column, insert string }{
	upkeep.Reseals: {"created_at", `INSERT INTO reseal_reports (project_id, workspace_id, sandbox_id, operation_id, checkpoint_id, generation, complete, steps, stale_processes, duration_ms, created_at)
		SELECT '%[1]s', 'w', 's' || i, 'o', 'c', 'g', true, '[]', '[]', 1, %[2]s FROM generate_series(1, %[3]d) i`},
	upkeep.Usage: {"created_at", `INSERT INTO usage_samples (project_id, workspace_id, sandbox_id, cpu_seconds, sent_bytes, received_bytes, created_at)
		SELECT '%[1]s', 'w', 's' || i, 1, 1, 1, %[2]s FROM generate_series(1, %[3]d) i`},
	upkeep.Audit: {"created_at", `INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, created_at)
		SELECT '%[1]s', '', 'a', '', 'a', 'o', '', '', 'succeeded', '', %[2]s FROM generate_series(1, %[3]d) i`},
	upkeep.Attestations: {"created_at", `INSERT INTO attestations (project_id, workspace_id, epoch, sandbox_id, runner_id, digest, envelope, created_at)
		SELECT '%[1]s', 'w', 1, 's' || i, 'r', 'sha256:' || encode(sha256('x'), 'hex'), 'x', %[2]s FROM generate_series(1, %[3]d) i`},
	upkeep.Flows: {"at", `INSERT INTO flows (project_id, workspace_id, sandbox_id, epoch, id, at, final, changes, spoken, host, port, method, path, outcome, rule, grant_id, reason, status,
			sent_bytes, received_bytes)
		SELECT '%[1]s', 'w', 's', 1, 'f' || i, %[2]s, true, true, 'http', 'a', 80, 'POST', '/', 'allowed', 'a', '', '', 200, 1, 1 FROM generate_series(1, %[3]d) i`},
	upkeep.Events: {"created_at", `INSERT INTO events (project_id, type, workspace_id, data, created_at)
		SELECT '%[1]s', 'workspace.ready', 'w', '{}', %[2]s FROM generate_series(1, %[3]d) i`},
}

// TestPartitionsAfterALongTime: for months nobody made partitions, and what came is in the default partition. It moves, in batches and without
// being out of sight, and this month has its partition, which takes what comes next. What a clock that is wrong said stays.
func TestPartitionsAfterALongTime(t *testing.T) {
	t.Parallel()
	for table, how := range partitioned {
		t.Run(string(table), func(t *testing.T) {
			t.Parallel()
			d := newDB(t)
			name, unit, rest := string(table), "month", string(table)+"_default"
			if table == upkeep.Events {
				unit = "day"
			}
			for _, part := range d.partitions(name) {
				if part != rest {
					d.exec(`DROP TABLE ` + part)
				}
			}
			before := d.number(`SELECT count(*) FROM ` + name)
			insert := func(at string, n int) { d.exec(fmt.Sprintf(how.insert, d.project, at, n)) }
			insert("now() + i * interval '1 us'", 100)
			insert("now()", 30) // one time
			insert("date_trunc('"+unit+"', now()) + interval '1 "+unit+" 1 hour' + i * interval '1 ms'", 20)
			insert("date_trunc('"+unit+"', now()) - interval '1 "+unit+"' + i * interval '1 ms'", 40)
			insert("now() - interval '30 years'", 1)
			insert("now() + interval '30 years'", 1)
			insert("now() - interval '3 years'", 1)
			all := before + 100 + 30 + 20 + 40 + 3
			seen := func(what string) {
				t.Helper()
				if n := d.number(`SELECT count(*) FROM ` + name); n != all {
					t.Fatalf("%s: %d rows are seen, want %d", what, n, all)
				}
			}
			seen("before")
			d.system(func(ctx context.Context, tx controller.AllTx) error {
				n, err := tx.MakePartitions(ctx, table, year, 7)
				if n < 7 || n > 40 {
					t.Errorf("%d rows moved at once", n)
				}
				return err
			})
			seen("after a batch")
			insert("now()", 1) // while it goes on
			all++
			if calls := d.makePartitions(table, year, 7); calls < 15 {
				t.Errorf("all moved in %d batches", calls)
			}
			seen("after all")
			if n := d.number(`SELECT count(*) FROM ` + rest); n != 3 {
				t.Errorf("%d rows are left in the default partition", n)
			}
			insert("now()", 1)
			all++
			seen("at last")
			if n := d.number(`SELECT count(*) FROM ` + rest); n != 3 {
				t.Errorf("what comes now goes to the default partition")
			}
			if n := len(d.partitions(name)); n != 1+1+3 {
				t.Errorf("partitions: %v", d.partitions(name))
			}
			for _, part := range d.partitions(name) {
				if d.number(`SELECT count(*) FROM `+part) == 0 {
					continue
				}
				if _, err := d.conn().Exec(t.Context(), `DELETE FROM `+part); err == nil && table != upkeep.Events && table != upkeep.Usage {
					t.Errorf("rows of %s can be deleted", part)
				}
			}
			d.refused(`DELETE FROM `+rest, `SELECT coppice_make_partitions_of('projects', '1 day', 1)`, `SELECT coppice_make_partitions_of('`+name+`', '1 day', 0)`)
			if calls := d.makePartitions(table, year, 7); calls != 0 {
				t.Errorf("%d batches of nothing", calls)
			}
		})
	}
}

// TestPartitionsKeepAuditWhole: records that move are the sealed ones.
func TestPartitionsKeepAuditWhole(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	for _, part := range d.partitions("audit_records") {
		if part != "audit_records_default" {
			d.exec(`ALTER TABLE audit_records DETACH PARTITION ` + part)
			d.exec(`INSERT INTO audit_records OVERRIDING SYSTEM VALUE SELECT * FROM ` + part)
			d.exec(`DROP TABLE ` + part)
		}
	}
	template := d.template()
	d.ready(d.project, template)
	d.sealAll()
	if calls := d.makePartitions(upkeep.Audit, year, 1); calls < 2 {
		t.Errorf("%d batches", calls)
	}
	d.ready(d.project, template)
	d.sealAll()
	if got := d.check(); got.Seals < 2 || got.Unsealed != 0 || got.Broken != 0 {
		t.Errorf("%+v", got)
	}
}

// manyRows is how many rows of each kind the sweep has before it.
const manyRows = 100_000

// TestSweepOfManyRows: no statement of the sweep reads a whole table, and all of it reads each row a few times.
func TestSweepOfManyRows(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	living, dead := d.ready(d.project, template), d.ready(d.project, template)
	node := d.node(living, template.ID)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.EndWorkspaces(ctx, []controller.EndedWorkspace{{ID: dead.ID, To: core.WorkspaceLost, Failure: &controller.Failure{Code: core.CodeSandboxLost, Message: "gone"}}})
		return err
	})
	conn := d.conn()
	for _, sql := range []string{
		`SET session_replication_role = replica`, // without the triggers
		`UPDATE workspaces SET ended_at = now() - interval '1 day' WHERE id = '` + string(dead.ID) + `'`,
		fmt.Sprintf(`INSERT INTO sessions (id, project_id, workspace_id, sandbox_id, guest_id) SELECT 'sess_' || lpad(i::text, 26, '0'),
			CASE WHEN i %% 50 = 1 THEN '%s' ELSE 'prj_' || i %% 50 END, CASE WHEN i %% 10 = 0 THEN '%s' ELSE '%s' END,
			CASE WHEN i %% 10 = 0 THEN '%s' ELSE '%s' END, 'g' || i FROM generate_series(1, %d) i`, d.project, dead.ID, living.ID, dead.Sandbox.ID, living.Sandbox.ID, manyRows),
		fmt.Sprintf(`INSERT INTO attach_tokens (hash, project_id, session_id, sandbox_id, expires_at) SELECT sha256(i::text::bytea), '%s', 'sess_' || lpad(i::text, 26, '0'), 's',
			now() + CASE WHEN i %% 10 = 0 THEN interval '-2 h' ELSE interval '1 h' END FROM generate_series(1, %d) i`, d.project, manyRows),
		// A tenth is deleted, and of that a half has no child.
		fmt.Sprintf(`CREATE TEMP TABLE one AS SELECT * FROM checkpoints WHERE id = '%s'`, node.ID),
		`UPDATE one SET name = NULL`,
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	var columns string
	if err := conn.QueryRow(t.Context(), `SELECT string_agg(CASE attname WHEN 'id' THEN '''ckpt_'' || lpad(i::text, 26, ''0'')'
			WHEN 'state' THEN 'CASE WHEN i % 10 = 0 THEN ''deleted'' ELSE ''captured'' END' WHEN 'ended_at' THEN 'CASE WHEN i % 10 = 0 THEN now() END'
			WHEN 'parent_id' THEN 'CASE WHEN i % 20 = 1 THEN ''ckpt_'' || lpad((i - 1)::text, 26, ''0'') ELSE o.parent_id END' ELSE 'o.' || quote_ident(attname) END, ', ' ORDER BY attnum)
		FROM pg_attribute WHERE attrelid = 'checkpoints'::regclass AND attnum > 0 AND NOT attisdropped`).Scan(&columns); err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{
		fmt.Sprintf(`INSERT INTO checkpoints SELECT %s FROM one o CROSS JOIN generate_series(1, %d) i`, columns, manyRows),
		`VACUUM ANALYZE sessions`, `ANALYZE attach_tokens`, `ANALYZE checkpoints`, `ANALYZE workspaces`, `ANALYZE sandboxes`,
	} {
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	for name, sql := range postgres.SweepStatements() {
		for arg, value := range map[string]string{"@after": "''", "@limit": "1000", "@kept": "3600", "@most": "1000000"} {
			sql = strings.ReplaceAll(sql, arg, value)
		}
		rows, err := conn.Query(t.Context(), `EXPLAIN `+sql)
		if err != nil {
			t.Fatal(err)
		}
		var plan []string
		for rows.Next() {
			var line string
			if err := rows.Scan(&line); err != nil {
				t.Fatal(err)
			}
			plan = append(plan, line)
		}
		if i := slices.IndexFunc(plan, func(line string) bool {
			return strings.Contains(line, "Seq Scan on sessions") || strings.Contains(line, "Seq Scan on checkpoints") || strings.Contains(line, "Seq Scan on attach_tokens")
		}); i >= 0 || rows.Err() != nil {
			t.Errorf("%s reads a whole table: %v\n%s", name, rows.Err(), strings.Join(plan, "\n"))
		}
	}
	d.countFew()
	d.sweepAll()
}

// countFew counts the sessions of a project up to a bound.
func (d *db) countFew() {
	sql := postgres.SweepStatements()["CountSessions"]
	for arg, value := range map[string]string{"@after": "''", "@limit": "1000", "@most": "7"} {
		sql = strings.ReplaceAll(sql, arg, value)
	}
	d.exec(sql)
	var most int
	if err := d.conn().QueryRow(d.t.Context(), `SELECT max(rows) FROM session_counts`).Scan(&most); err != nil || most != 7 {
		d.t.Errorf("%d sessions are counted, %v; want no more than 7", most, err)
	}
}

// sweepAll sweeps all rows and compares what is left.
func (d *db) sweepAll() {
	t := d.t
	d.walkAll()
	for sql, want := range map[string]int64{
		`SELECT count(*) FROM checkpoints WHERE state = 'deleted' AND pruned`:     manyRows/20 + 1, // the last has no child
		`SELECT count(*) FROM checkpoints WHERE state = 'deleted' AND NOT pruned`: manyRows/20 - 1,
		`SELECT count(*) FROM sessions`:                                           manyRows - manyRows/10,
		`SELECT rows FROM session_counts`:                                         manyRows / 50,
		`SELECT count(*) FROM attach_tokens`:                                      manyRows - manyRows/10,
	} {
		if n := d.number(sql); n != want {
			t.Errorf("%s: %d, want %d", sql, n, want)
		}
	}
}

// walkAll does all steps of the sweep, and bounds what the database reads for them.
func (d *db) walkAll() {
	t := d.t
	t.Helper()
	walkAll := func() {
		walk := func(step func(context.Context, controller.AllTx, string) (string, error)) {
			t.Helper()
			for after := ""; ; {
				d.system(func(ctx context.Context, tx controller.AllTx) error {
					var err error
					after, err = step(ctx, tx, after)
					return err
				})
				if after == "" {
					return
				}
			}
		}
		walk(func(ctx context.Context, tx controller.AllTx, after string) (string, error) {
			last, err := tx.PruneDeleted(ctx, core.CheckpointID(after), 2000)
			return string(last), err
		})
		walk(func(ctx context.Context, tx controller.AllTx, after string) (string, error) {
			n, err := tx.SweepTokens(ctx, 10_000)
			if n < 10_000 {
				return "", err
			}
			return "more", err
		})
		walk(func(ctx context.Context, tx controller.AllTx, after string) (string, error) {
			last, _, err := tx.SweepSessions(ctx, core.SessionID(after), time.Hour, 5000)
			return string(last), err
		})
		walk(func(ctx context.Context, tx controller.AllTx, after string) (string, error) {
			last, err := tx.CountSessions(ctx, core.ProjectID(after), 1)
			return string(last), err
		})
	}
	// Each step goes on where the last one ended: about 12 rows are read for each row that there is. Steps that begin again read far more.
	if got := d.counted(walkAll); got > 18*manyRows {
		t.Errorf("%d rows are read to sweep three tables of %d", got, manyRows)
	} else {
		t.Logf("%d rows are read to sweep three tables of %d", got, manyRows)
	}
}
