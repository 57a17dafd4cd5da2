package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestTransitions tries every pair of states on a real row and compares the schema with core's tables.
func TestTransitions(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	cp := d.node(w, w.Head)
	op := d.operation(controller.OpForkCheckpoint, "o", 0)
	d.machine("workspaces", string(w.ID), `ended_at = CASE WHEN $2 IN ('terminated', 'failed', 'lost') THEN now() END, failure_code = 'X', failure_message = 'x',
		sandbox_id = CASE WHEN $2 <> 'suspended' THEN '`+string(w.Sandbox.ID)+`' END`,
		texts(core.WorkspaceStates()), func(a, b string) bool { return core.WorkspaceState(a).CanBecome(core.WorkspaceState(b)) },
		[]string{string(core.WorkspaceCreating), string(core.WorkspaceRestoring)})
	d.machine("checkpoints", string(cp.ID), `ended_at = CASE WHEN $2 IN ('failed', 'deleted') THEN now() END, failure_code = 'X', failure_message = 'x',
		sealed_at = '2026-11-22', manifest_key = 'k', manifest_digest = '`+string(d.image)+`', manifest_bytes = 1, stored_bytes = 1`,
		texts(core.CheckpointStates()), func(a, b string) bool { return core.CheckpointState(a).CanBecome(core.CheckpointState(b)) },
		[]string{string(core.CheckpointCapturing)})
	d.machine("operations", string(op.ID), `ended_at = CASE WHEN $2 IN ('succeeded', 'failed') THEN now() END, result = '{}',
		problem_category = CASE WHEN $2 = 'failed' THEN 'x' END, problem_code = CASE WHEN $2 = 'failed' THEN 'x' END, problem_message = CASE WHEN $2 = 'failed' THEN 'x' END`,
		texts(core.OperationStates()), func(a, b string) bool { return core.OperationState(a).CanBecome(core.OperationState(b)) },
		[]string{string(core.OperationPending), string(core.OperationRunning)})
}

func texts[S ~string](list []S) []string {
	out := make([]string, len(list))
	for i, s := range list {
		out[i] = string(s)
	}
	return out
}

// machine forces the row into each state, past the triggers, and then tries each other one with them.
func (d *db) machine(table, id, set string, states []string, can func(from, to string) bool, first []string) {
	t := d.t.(*testing.T)
	t.Helper()
	conn := d.conn()
	sql := fmt.Sprintf(`UPDATE %s SET state = $2, %s WHERE id = $1`, table, set)
	for _, from := range states {
		for _, to := range states {
			if _, err := conn.Exec(t.Context(), `SET session_replication_role = replica`); err != nil {
				t.Fatal(err)
			}
			if _, err := conn.Exec(t.Context(), sql, id, from); err != nil {
				t.Fatalf("%s cannot even be made %s: %v", table, from, err)
			}
			if _, err := conn.Exec(t.Context(), `SET session_replication_role = origin`); err != nil {
				t.Fatal(err)
			}
			_, err := conn.Exec(t.Context(), sql, id, to)
			want := from == to || can(from, to)
			var pg *pgconn.PgError
			if want != (err == nil) || err != nil && (!errors.As(err, &pg) || pg.ConstraintName != table+"_transition_check") {
				t.Errorf("%s from %s to %s: want allowed %v, got %v", table, from, to, want, err)
			}
		}
	}
	for _, state := range states {
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Fatal(err)
		}
		columns := map[string]string{
			"workspaces":  `(id, project_id, name, state, image_name, image_digest, vcpus, memory_mib, disk_gib, egress_policy) VALUES ('ws_new', $1, 'new', $2, '', '` + string(d.image) + `', 1, 512, 1, 'deny-all')`,
			"checkpoints": `(id, project_id, kind, state, root_id, depth, image_name, image_digest, vcpus, memory_mib, disk_gib, runner_id, class_key) VALUES ('ckpt_new', $1, 'template', $2, 'ckpt_new', 0, '', '` + string(d.image) + `', 1, 512, 1, '` + string(d.runner) + `', 'c')`,
			"operations":  `(id, project_id, kind, state, input, lease_owner, lease_epoch, lease_expires_at, started_at) VALUES ('op_new', $1, 'x', $2, '{}', 'o', 1, now(), now())`,
		}[table]
		_, err = tx.Exec(t.Context(), `INSERT INTO `+table+` `+columns, d.project, state)
		if want := slices.Contains(first, state); want != (err == nil) {
			t.Errorf("%s begins as %s: want allowed %v, got %v", table, state, want, err)
		}
		if err := tx.Rollback(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
}

// TestInvariants breaks each CHECK once; all these rows are legal otherwise.
func TestInvariants(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	cp := d.node(w, w.Head)
	conn := d.conn()
	for _, c := range []struct{ sql, constraint string }{
		{`UPDATE workspaces SET sandbox_id = NULL`, "workspaces_running_check"},
		{`UPDATE workspaces SET ready_at = NULL`, "workspaces_running_check"},
		{`UPDATE workspaces SET checkpoint_id = NULL, checkpoint_project_id = NULL`, "workspaces_running_check"},
		{`UPDATE workspaces SET state = 'lost', ended_at = now()`, "workspaces_failure_check"},
		{`UPDATE workspaces SET state = 'lost', failure_code = 'X', failure_message = 'x'`, "workspaces_ended_check"},
		{`UPDATE workspaces SET ended_at = now()`, "workspaces_ended_check"},
		{`UPDATE workspaces SET epoch = 0`, "workspaces_epoch_check"},
		{`UPDATE workspaces SET name = 'Bad_Name'`, "workspaces_name_check"},
		{`UPDATE workspaces SET memory_mib = 511`, "workspaces_resources_check"},
		{`UPDATE workspaces SET egress_policy = 'some'`, "workspaces_egress_policy_check"},
		{`UPDATE workspaces SET state = 'suspended'`, "workspaces_suspended_check"},
		{`UPDATE workspaces SET checkpoint_project_id = 'prj_other'`, "workspaces_checkpoint_project_check"},
		{`UPDATE workspaces SET checkpoint_id = 'ckpt_none'`, "workspaces_checkpoint_fk"},
		{`UPDATE sandboxes SET mac = 'ff:00:00:00:00:01'`, "sandboxes_mac_check"},
		{`UPDATE sandboxes SET machine_id = 'x'`, "sandboxes_machine_id_check"},
		{`UPDATE sandboxes SET hostname = 'a b'`, "sandboxes_hostname_check"},
		{`UPDATE checkpoints SET parent_id = id, parent_project_id = project_id WHERE id = '` + string(cp.ID) + `'`, "checkpoints_immutable_check"},
		{`UPDATE checkpoints SET depth = 7 WHERE id = '` + string(cp.ID) + `'`, "checkpoints_immutable_check"},
		{`UPDATE checkpoints SET captured_at = NULL WHERE id = '` + string(cp.ID) + `'`, "checkpoints_immutable_check"},
		{`UPDATE checkpoints SET base_id = NULL`, "checkpoints_captured_check"},
		{`UPDATE checkpoints SET runner_class = NULL`, "checkpoints_captured_check"},
		{`UPDATE checkpoints SET pruned = true`, "checkpoints_pruned_check"},
		{`UPDATE checkpoints SET state = 'deleted'`, "checkpoints_ended_check"},
		{`INSERT INTO operations (id, project_id, kind, state, input) VALUES ('op_1', '` + string(d.project) + `', 'x', 'running', '{}')`, "operations_running_check"},
	} {
		_, err := conn.Exec(t.Context(), c.sql)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.ConstraintName != c.constraint {
			t.Errorf("%s: want %s, got %v", c.sql, c.constraint, err)
		}
	}
	// No self parent and no false root, tried at the only moment when they could be set.
	for _, c := range []struct{ parent, root, depth, constraint string }{
		{"'ckpt_n'", "'ckpt_n'", "1", "checkpoints_parent_check"},
		{"'" + string(cp.ID) + "'", "'ckpt_n'", "2", "checkpoints_root_check"},
		{"'" + string(cp.ID) + "'", "'" + string(cp.Root) + "'", "0", "checkpoints_root_check"},
		{"'ckpt_none'", "'" + string(cp.Root) + "'", "2", "checkpoints_parent_fk"},
	} {
		_, err := conn.Exec(t.Context(), `
			INSERT INTO checkpoints (id, project_id, kind, state, parent_project_id, parent_id, root_id, depth, workspace_id, workspace_epoch, image_name, image_digest, vcpus, memory_mib, disk_gib)
			VALUES ('ckpt_n', $1, 'user', 'capturing', $1, `+c.parent+`, `+c.root+`, `+c.depth+`, $2, 1, '', $3, 1, 512, 1)`, d.project, w.ID, d.image)
		var pg *pgconn.PgError
		if !errors.As(err, &pg) || pg.ConstraintName != c.constraint {
			t.Errorf("parent %s, root %s, depth %s: want %s, got %v", c.parent, c.root, c.depth, c.constraint, err)
		}
	}
	if _, err := conn.Exec(t.Context(), `DELETE FROM reseal_reports`); err != nil {
		t.Error(err) // there is none yet
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		tx.InsertReseals([]controller.ResealRecord{{ProjectID: d.project, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID, Report: core.ResealReport{Generation: "g"}}})
		return nil
	})
	for _, sql := range []string{`DELETE FROM reseal_reports`, `UPDATE reseal_reports SET complete = true`} {
		if _, err := conn.Exec(t.Context(), sql); err == nil {
			t.Errorf("%s: the owner may do so", sql)
		}
	}
}
