package migrations_test

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

// TestAddressesOfEarlierSandboxes has sandboxes of an earlier version that live, and a controller of that version which still works
// after the migration. The sandboxes of before keep their addresses for themselves. What that controller makes is of the tree of its parent.
func TestAddressesOfEarlierSandboxes(t *testing.T) {
	t.Parallel()
	conn := connect(t, testpg.New(t, migrations.Up))
	exec := func(sql string) {
		t.Helper()
		if _, err := conn.Exec(t.Context(), sql); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
	}
	down, err := filepath.Glob("00*.down.sql")
	if err != nil {
		t.Fatal(err)
	}
	run := func(file string) {
		t.Helper()
		b, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		exec(string(b))
	}
	for _, file := range slices.Backward(down) {
		if file < "0057" {
			break
		}
		run(file)
	}
	exec(`SET session_replication_role = replica`) // no row of what these belong to is needed
	const sandbox = `INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, mac, ip) VALUES `
	row := func(n, workspace, runner, ip string) string {
		return `('sbx_` + n + `', 'prj_x', 'ws_` + workspace + `', ` + n + `, '` + runner + `', 1, 512, 'g` + n + `', 'h` + n + `', lpad('` + n + `', 32, '0'), '02:00:00:00:00:0` + n + `', '` + ip + `')`
	}
	exec(sandbox + row("1", "1", "r1", "10.83.1.1") + `,` + row("2", "2", "r2", "10.83.1.2"))
	exec(`INSERT INTO runner_loads (runner_id, cap_sandboxes, sandboxes) VALUES ('r1', 0, 1), ('r2', 64, 1)`)
	run("0057_address_by_runner_and_tree.up.sql")

	number := func(sql string) (n int) {
		t.Helper()
		if err := conn.QueryRow(t.Context(), sql).Scan(&n); err != nil {
			t.Fatalf("%s: %v", sql, err)
		}
		return n
	}
	if n := number(`SELECT count(*) FROM sandboxes WHERE tree_id = 'prj_x'`); n != 2 {
		t.Errorf("%d of 2 sandboxes are of the tree of before", n)
	}
	if n := number(`SELECT sum(cap_sandboxes) FROM runner_loads`); n != 64000+64 {
		t.Errorf("the capacities are together %d", n)
	}

	// One workspace grows from a checkpoint of sandbox 3, which is of a tree; the next from a template; then one from a checkpoint of before.
	exec(`INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, mac, ip, tree_id)
		VALUES ('sbx_3', 'prj_x', 'ws_3', 1, 'r1', 1, 512, 'g3', 'h3', lpad('3', 32, '0'), '02:00:00:00:00:03', '10.83.1.3', 'ws_3')`)
	for _, c := range []struct{ workspace, checkpoint, sandbox string }{{"4", "c", "'sbx_3'"}, {"5", "t", "NULL"}, {"6", "d", "'sbx_1'"}} {
		exec(`INSERT INTO checkpoints (id, project_id, kind, state, root_id, depth, workspace_id, sandbox_id, image_name, image_digest, vcpus, memory_mib, disk_gib, parent_id, parent_project_id, workspace_epoch)
			VALUES ('` + c.checkpoint + `', 'prj_x', 'user', 'capturing', 'r', 1, 'ws_x', ` + c.sandbox + `, 'i', 'sha256:' || repeat('0', 64), 1, 512, 1, 'r', 'prj_x', 1)`)
		exec(`INSERT INTO workspaces (id, project_id, name, state, image_name, image_digest, vcpus, memory_mib, disk_gib, egress_policy, checkpoint_id, checkpoint_project_id)
			VALUES ('ws_` + c.workspace + `', 'prj_x', 'w` + c.workspace + `', 'restoring', 'i', 'sha256:' || repeat('0', 64), 1, 512, 1, 'deny-all', '` + c.checkpoint + `', 'prj_x')`)
	}
	exec(`SET session_replication_role = origin; ALTER TABLE sandboxes DROP CONSTRAINT sandboxes_runner_fk; SET coppice.project_id = 'prj_x'`)
	exec(sandbox + row("4", "4", "r2", "10.83.1.4") + `,` + row("5", "5", "r2", "10.83.1.5") + `,` + row("6", "6", "r2", "10.83.1.6"))
	for id, tree := range map[string]string{"sbx_4": "ws_3", "sbx_5": "prj_x", "sbx_6": "prj_x"} {
		if n := number(`SELECT count(*) FROM sandboxes WHERE id = '` + id + `' AND tree_id = '` + tree + `'`); n != 1 {
			t.Errorf("%s is not of the tree %q", id, tree)
		}
	}
	for sql, want := range map[string]string{
		sandbox + row("7", "6", "r3", "10.83.1.1"): "sandboxes_live_tree_ip_key", // of a sandbox of before, on another runner
		sandbox + row("7", "4", "r3", "10.83.1.3"): "sandboxes_live_tree_ip_key", // of its tree, on another runner
		sandbox + row("7", "6", "r1", "10.83.1.3"): "sandboxes_live_runner_ip_key",
	} {
		_, err := conn.Exec(t.Context(), sql)
		if refused, ok := errors.AsType[*pgconn.PgError](err); !ok || refused.ConstraintName != want {
			t.Errorf("%s: %v, want %s", sql, err, want)
		}
	}
	exec(sandbox + row("8", "5", "r3", "10.83.1.3")) // of another runner and another tree
}
