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
	"github.com/coppice-dev/coppice/core"
)

// doze has workspaces suspended at the end of their time, which was a while ago.
func (d *db) doze(list ...controller.Workspace) {
	d.t.Helper()
	for i, w := range list {
		d.exec(`UPDATE workspaces SET on_ttl = 'suspend', ttl_seconds = 3600, expires_at = now() - make_interval(hours => $2) WHERE id = $1`, w.ID, 100-i)
	}
}

// claimed is a round.
func (d *db) claimed(each, limit int) (ids []core.WorkspaceID) {
	d.t.Helper()
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		list, err := tx.ClaimOverdue(ctx, each, limit)
		for _, w := range list {
			ids = append(ids, w.ID)
		}
		return err
	})
	return ids
}

// TestOverdueTakeTurns: a project full of workspaces whose suspension always fails does not stop that of another project, which is due
// for a shorter time.
func TestOverdueTakeTurns(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	template := d.template()
	var full []controller.Workspace
	for range 12 {
		full = append(full, d.ready(d.project, template))
	}
	other := d.ready(d.newProject("other"), template)
	d.doze(append(slices.Clone(full), other)...)
	if got := d.claimed(4, 4); len(got) != 4 || got[0] != full[0].ID || got[3] != full[3].ID {
		t.Errorf("the first round takes %v, not the first four", got)
	}
	if got := d.claimed(4, 100); len(got) != 5 || !slices.Contains(got, other.ID) || slices.Contains(got, full[0].ID) {
		t.Errorf("the second round takes %v, not four of the full project and the other one", got)
	}
	if got := d.claimed(100, 100); len(got) != 4 {
		t.Errorf("the third round takes %v, not the rest", got)
	}
	if got := d.claimed(100, 100); len(got) != 0 {
		t.Errorf("the fourth round takes %v; all have been tried", got)
	}
}

// TestOverduePauses: the pauses between two tries grow from a minute to an hour, and a change of the time ends them.
func TestOverduePauses(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	d.doze(w)
	pause := func() int64 {
		t.Helper()
		if got := d.claimed(8, 64); len(got) != 1 || len(d.claimed(8, 64)) != 0 {
			t.Fatalf("a round takes %v, and the next one is not empty", got)
		}
		var due bool
		d.mine(func(ctx context.Context, tx controller.AllTx) (err error) {
			due, err = tx.Overdue(ctx, w.ID)
			return err
		})
		if !due {
			t.Error("what was taken is not overdue any more") // the admission of its suspension asks
		}
		// What is left of the pause passes at once. Whole minutes are the pause: the test takes less than one.
		left := d.number(`SELECT ceil(extract(epoch FROM suspend_next_at - now()) / 60)::bigint FROM workspaces`)
		d.exec(`UPDATE workspaces SET suspend_next_at = now()`)
		return left
	}
	for i, want := range []int64{1, 2, 4, 8, 16, 32, 60, 60} {
		if got := pause(); got != want {
			t.Errorf("the pause after try %d is %d minutes, want %d", i+1, got, want)
		}
	}
	hour := time.Hour
	for name, change := range map[string]func(context.Context, controller.AllTx) error{
		"a resume": func(ctx context.Context, tx controller.AllTx) error { return tx.RenewTTL(ctx, w.ID) },
		"a change of the time": func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.PatchWorkspace(ctx, w.ID, controller.WorkspacePatch{TTL: &hour})
			return err
		},
		"a change of the end": func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.PatchWorkspace(ctx, w.ID, controller.WorkspacePatch{OnTTL: controller.IdleSuspend})
			return err
		},
	} {
		d.doze(w)
		d.claimed(8, 64)
		d.mine(change)
		d.doze(w)
		if got := pause(); got != 1 {
			t.Errorf("the first pause after %s is %d minutes", name, got)
		}
	}
	// Another change does not.
	d.claimed(8, 64)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.PatchWorkspace(ctx, w.ID, controller.WorkspacePatch{Labels: map[string]*string{"k": nil}})
		return err
	})
	if got := d.claimed(8, 64); len(got) != 0 {
		t.Errorf("a change of the labels ends the pause: %v", got)
	}
}

// TestTerminateAfterTheTime: a workspace that sleeps past the end of its time and is to be terminated from now on gets its time again. One
// that was to be terminated anyway does not.
func TestTerminateAfterTheTime(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	d.doze(w)
	d.exec(`UPDATE workspaces SET state = 'checkpointing'`)
	d.exec(`UPDATE workspaces SET state = 'suspended', sandbox_id = NULL`)
	patch := func(p controller.WorkspacePatch) time.Duration {
		t.Helper()
		var got controller.Workspace
		d.mine(func(ctx context.Context, tx controller.AllTx) (err error) {
			got, err = tx.PatchWorkspace(ctx, w.ID, p)
			return err
		})
		return time.Until(got.ExpiresAt)
	}
	if left := patch(controller.WorkspacePatch{OnTTL: controller.IdleTerminate}); left < 50*time.Minute || left > 70*time.Minute {
		t.Errorf("it has %s left, not its hour", left)
	}
	d.exec(`UPDATE workspaces SET expires_at = now() - interval '1 s'`)
	if left := patch(controller.WorkspacePatch{OnTTL: controller.IdleTerminate}); left > 0 {
		t.Errorf("what is to be terminated already gets %s more", left)
	}
	d.doze(w)
	minute := time.Minute
	if left := patch(controller.WorkspacePatch{OnTTL: controller.IdleTerminate, TTL: &minute}); left > 2*time.Minute {
		t.Errorf("it has %s left, not the minute that was asked for", left)
	}
}

// TestTimesReadInProportion: the rounds that look for times that are up do not read what sleeps past its time, nor what has time left.
func TestTimesReadInProportion(t *testing.T) {
	t.Parallel()
	const many = 20_000
	d := newDB(t)
	template := d.template()
	due, goner := d.ready(d.project, template), d.ready(d.project, template)
	d.doze(due)
	d.exec(`UPDATE workspaces SET expires_at = now() - interval '1 s' WHERE id = $1`, goner.ID)
	d.exec(fmt.Sprintf(`SET session_replication_role = replica; INSERT INTO workspaces SELECT (jsonb_populate_record(x, jsonb_build_object('id', 'ws_bulk' || lpad(n::text, 19, '0'), 'name', 'b' || n,
			'on_ttl', 'suspend', 'sandbox_id', CASE n %% 2 WHEN 1 THEN 'sbx_bulk' || n END, 'state', CASE n %% 2 WHEN 0 THEN 'suspended' ELSE 'ready' END, 'suspend_next_at', CASE n %% 2 WHEN 1 THEN now() + interval '1 hour' END))).*
		FROM workspaces x, generate_series(1, %d) n WHERE x.id = '%s'`, many, due.ID))
	d.exec(`ANALYZE workspaces`)
	for name, sql := range postgres.TimeStatements() {
		if plan := d.explained(sql, map[string]string{"@from": "'{ready,suspended}'", "@limit": "64"}); !strings.Contains(plan, "using workspaces_"+name) {
			t.Errorf("it does not follow the index workspaces_%s:\n%s", name, plan)
		}
	}
	read := d.counted(func() {
		if got := d.claimed(8, 64); len(got) != 1 || got[0] != due.ID {
			t.Errorf("overdue: %v", got)
		}
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			list, err := tx.ExpiredWorkspaces(ctx, 64)
			if len(list) != 1 || list[0].ID != goner.ID {
				t.Errorf("expired: %d workspaces", len(list))
			}
			return err
		})
	})
	t.Logf("%d rows read", read)
	if read > many/20 {
		t.Errorf("%d rows are read for two workspaces", read)
	}
}

// explained is the plan of a statement of the store, with the settings of those that follow indexes.
func (d *db) explained(sql string, values map[string]string) string {
	d.t.Helper()
	conn := d.conn()
	for arg, value := range values {
		sql = strings.ReplaceAll(sql, arg, value)
	}
	var plan []string
	for _, statement := range []string{`SET enable_seqscan = off`, `SET enable_sort = off`, `EXPLAIN ` + sql} {
		rows, err := conn.Query(d.t.Context(), statement)
		if err != nil {
			d.t.Fatal(err)
		}
		for rows.Next() {
			var line string
			if err := rows.Scan(&line); err != nil {
				d.t.Fatal(err)
			}
			plan = append(plan, line)
		}
		if rows.Err() != nil {
			d.t.Fatal(rows.Err())
		}
	}
	return strings.Join(plan, "\n")
}
