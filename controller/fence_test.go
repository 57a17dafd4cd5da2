package controller_test

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// silence makes a runner silent beyond the hard lease and waits until it is given up.
func (w *world) silence(id core.RunnerID) {
	w.t.Helper()
	w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 day' WHERE id = $1`, id)
	eventually(w.t, "the runner is given up", func() bool {
		return w.number(`SELECT count(*) FROM runners WHERE id = $1 AND fenced_at IS NOT NULL`, id) == 1
	})
}

const onGivenUp = `SELECT count(*) FROM workspaces w JOIN sandboxes s ON s.id = w.sandbox_id JOIN runners r ON r.id = s.runner_id
	WHERE w.state NOT IN ('lost', 'terminated', 'failed') AND r.fenced_at IS NOT NULL`

// TestNothingIsReadyOnGivenUpRunner gives up the runner in the middle of each kind of operation, which then fails or succeeds
// there. Afterwards no workspace may be ready on that runner, and the lost ones say what they can be recovered from.
func TestNothingIsReadyOnGivenUpRunner(t *testing.T) {
	t.Parallel()
	failed := core.Errorf(core.Unavailable, core.CodeVMMFailed, "qemu ended with status 1")
	for name, kind := range kinds() {
		for way, at := range map[string]struct {
			point   string
			problem error
		}{"fails": {kind.point, failed}, "succeeds": {kind.point + runnertest.Done, nil}} {
			t.Run(name+", "+way, func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				ws := w.create("main")
				cp := w.checkpoint(ws.ID)
				g := w.hold(at.point, at.problem)
				a, err := kind.start(w, ws, cp)
				if err != nil || a.Done {
					t.Fatalf("%+v, %v", a, err)
				}
				<-g.reached
				w.sql(`INSERT INTO ports (id, project_id, workspace_id, guest_port, listen) VALUES ('port_' || $2, $1, $2, 80, '127.0.0.1:1')`, w.project, ws.ID)
				w.sql(`UPDATE checkpoints SET state = 'sealed', sealed_at = now(), manifest_key = 'k', manifest_digest = $2, manifest_bytes = 1, stored_bytes = 1 WHERE id = $1`,
					cp.ID, core.DigestOf([]byte("manifest")))
				w.silence(w.runner.ID())
				close(g.open)
				if _, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait); err != nil {
					t.Fatal(err)
				}
				eventually(t, "nothing lives on the runner", func() bool { return w.number(onGivenUp) == 0 })
				switch got, err := w.Workspace(t.Context(), w.project, ws.ID); {
				case err != nil:
					t.Fatal(err)
				case name == "suspend" || name == "resume" || name == "terminate":
					if got.State != core.WorkspaceSuspended && got.State != core.WorkspaceTerminated && got.State != core.WorkspaceLost {
						t.Errorf("the workspace is %s", got.State)
					}
				case got.State != core.WorkspaceLost || got.Failure == nil || got.Failure.Code != core.CodeRunnerLost || got.Failure.RecoverFrom != cp.ID:
					t.Errorf("the workspace is %s, failure %+v; want it lost with its runner, and recoverable from %s", got.State, got.Failure, cp.ID)
				default:
					if n := w.number(`SELECT count(*) FROM events WHERE type = 'workspace.lost' AND workspace_id = $1`, ws.ID); n != 1 {
						t.Errorf("%d events say that it is lost", n)
					}
				}
				if n := w.number(`SELECT count(*) FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id WHERE s.ended_at IS NULL AND w.ended_at IS NOT NULL`); n != 0 {
					t.Errorf("%d sandboxes of ended workspaces live", n)
				}
				if n := w.number(portsOfEnded); n != 0 {
					t.Errorf("%d ports of ended workspaces are left", n)
				}
			})
		}
	}
}

// TestReturnToRunnerThatIsBack takes a workspace back from a failed restore after its runner was given up and has registered
// again, without its sandboxes: its next heartbeats say that the workspace is lost.
func TestReturnToRunnerThatIsBack(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	g := w.hold(runnertest.PointFork, core.Errorf(core.Unavailable, core.CodeVMMFailed, "qemu ended with status 1"))
	a, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	<-g.reached
	w.silence(w.runner.ID())
	w.runner.Vanish(ws.Sandbox.ID)
	w.register()
	close(g.open)
	if _, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.beat()
	w.beat()
	if got := w.state(ws.ID); got != core.WorkspaceLost {
		t.Errorf("the workspace is %s", got)
	}
	w.consistent()
}

// crowd inserts runners with workspaces, copies of a real one, each on top of a chain of checkpoints of its runner. No trigger
// runs for them. The runners are heard.
func (w *world) crowd(like controller.Workspace, cp core.CheckpointID, runners, each, deep int) {
	w.t.Helper()
	for _, statement := range []string{
		`INSERT INTO runners SELECT (jsonb_populate_record(x, jsonb_build_object('id', 'bulk_' || n, 'lease_expires_at', now() + interval '1 day'))).*
			FROM runners x, generate_series(1, %[1]d) n WHERE x.id = '%[4]s'`,
		`INSERT INTO runner_loads (runner_id, sandboxes, vcpus, memory_mib, class_key, open, cap_sandboxes, cap_vcpus, cap_memory_mib, images_sum)
			SELECT 'bulk_' || n, %[2]d, %[2]d, 512 * %[2]d, class_key, open, cap_sandboxes, cap_vcpus, cap_memory_mib, images_sum
			FROM runner_loads x, generate_series(1, %[1]d) n WHERE x.runner_id = '%[4]s'`,
		`INSERT INTO image_locations SELECT (jsonb_populate_record(x, jsonb_build_object('runner_id', 'bulk_' || n))).*
			FROM image_locations x, generate_series(1, %[1]d) n WHERE x.runner_id = '%[4]s'`,
		`INSERT INTO checkpoint_copies (checkpoint_id, runner_id, project_id, shared) SELECT x.id, 'bulk_' || n, x.project_id, x.shared
			FROM checkpoints x, generate_series(1, %[1]d) n WHERE x.id IN (SELECT root_id FROM checkpoints WHERE id = '%[5]s')`,
		`INSERT INTO checkpoints SELECT (jsonb_populate_record(x, jsonb_build_object('id', 'bulk_' || n || '_' || d, 'depth', d, 'runner_id', 'bulk_' || n,
				'parent_id', CASE WHEN d > 1 THEN 'bulk_' || n || '_' || d - 1 ELSE x.parent_id END,
				'parent_project_id', CASE WHEN d > 1 THEN x.project_id ELSE x.parent_project_id END))).*
			FROM checkpoints x, generate_series(1, %[1]d) n, generate_series(1, %[3]d) d WHERE x.id = '%[5]s'`,
		`INSERT INTO workspaces SELECT (jsonb_populate_record(x, jsonb_build_object('id', 'bulk_' || n || '_' || m, 'name', 'bulk-' || n || '-' || m, 'sandbox_id', 'bulk_' || n || '_' || m,
				'checkpoint_id', 'bulk_' || n || '_' || %[3]d))).*
			FROM workspaces x, generate_series(1, %[1]d) n, generate_series(1, %[2]d) m WHERE x.id = '%[6]s'`,
		`INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, tree_id, ip, mac)
			SELECT 'bulk_' || n || '_' || m, project_id, 'bulk_' || n || '_' || m, epoch, 'bulk_' || n, vcpus, memory_mib, n || '/' || m, 'bulk-' || n || '-' || m, md5(n || '/' || m), 'bulk_' || n || '_' || m,
				'10.83.' || 1 + m / 256 || '.' || m %% 256,
				'02:ff:' || lpad(to_hex(n / 256), 2, '0') || ':' || lpad(to_hex(n %% 256), 2, '0') || ':00:' || lpad(to_hex(m), 2, '0')
			FROM sandboxes x, generate_series(1, %[1]d) n, generate_series(1, %[2]d) m WHERE x.id = '%[7]s'`,
	} {
		w.sql(fmt.Sprintf(`SET session_replication_role = replica; `+statement, runners, each, deep, w.runner.ID(), cp, like.ID, like.Sandbox.ID))
	}
	w.sql(`ANALYZE`)
}

// TestFenceAmongControllers gives up many runners at once, with many workspaces deep in their trees, while somebody holds one of them locked.
func TestFenceAmongControllers(t *testing.T) {
	t.Parallel()
	const runners, each, deep = 200, 50, 30
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.crowd(ws, cp.ID, runners, each, deep)
	conn, err := pgx.Connect(t.Context(), w.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	tx, err := conn.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM workspaces WHERE id = 'bulk_7_7' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	_, _ = w.start(controller.Config{LoopInterval: 50 * time.Millisecond}) // both do it
	began := time.Now()
	w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 day' WHERE id LIKE 'bulk%'`)
	tick := time.NewTicker(250 * time.Millisecond) // counting is work for the same database
	defer tick.Stop()
	lost := func() int {
		<-tick.C
		return w.number(`SELECT count(*) FROM workspaces WHERE state = 'lost' AND failure_code = 'RUNNER_LOST' AND id LIKE 'bulk%'`)
	}
	eventually(t, "all workspaces but the locked one are lost", func() bool { return lost() == runners*each-1 })
	// How much is read for it, whatever the machine: TestFenceReadsInProportion. Here nobody may wait for the locked row.
	t.Logf("%d runners with %d workspaces, %d deep: %.1f s", runners, runners*each, deep, time.Since(began).Seconds())
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the last one is lost", func() bool { return lost() == runners*each })
	if n := w.number(`SELECT count(*) FROM events WHERE type = 'workspace.lost'`); n != runners*each {
		t.Errorf("%d events say that workspaces are lost", n)
	}
	if n := w.number(`SELECT coalesce(sum(sandboxes), 0) FROM runner_loads WHERE runner_id LIKE 'bulk%'`); n != 0 {
		t.Errorf("%d sandboxes are counted on the runners", n)
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("the workspace on the runner that is heard is %s", got)
	}
}

const portsOfEnded = `SELECT count(*) FROM ports p JOIN workspaces w ON w.id = p.workspace_id WHERE w.ended_at IS NOT NULL`
