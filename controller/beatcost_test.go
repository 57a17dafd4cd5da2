package controller_test

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/api/runnerapi/beats"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// populate makes the one workspace and checkpoint of a runner many, and returns what the runner holds.
func populate(t *testing.T, w *world, sandboxes, checkpoints int) (held []runnerapi.Sandbox, ids []core.CheckpointID) {
	t.Helper()
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.sql(fmt.Sprintf(`SET session_replication_role = replica;
		INSERT INTO workspaces SELECT (jsonb_populate_record(w, jsonb_build_object('id', 'ws_' || n, 'name', 'n' || n, 'sandbox_id', 'sbx_' || n))).*
			FROM workspaces w, generate_series(1, %d) AS n;
		INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, mac, ip)
			SELECT 'sbx_' || n, project_id, 'ws_' || n, 1, runner_id, 1, 512, 'gen_' || n, 'h' || n, md5(n::text), '02:00:00:00:' || lpad(to_hex(n / 256), 2, '0') || ':' || lpad(to_hex(n %% 256), 2, '0'), '10.9.' || n / 256 || '.' || n %% 256
			FROM sandboxes, generate_series(1, %d) AS n WHERE id = '%s';
		INSERT INTO checkpoints SELECT (jsonb_populate_record(c, jsonb_build_object('id', 'ckpt_' || n, 'name', NULL))).*
			FROM checkpoints c, generate_series(1, %d) AS n WHERE id = '%s'`, sandboxes-1, sandboxes-1, ws.Sandbox.ID, checkpoints-1, cp.ID))
	held = w.runner.Sandboxes()
	for n := 1; n < sandboxes; n++ {
		s := held[0]
		s.ID, s.WorkspaceID = core.SandboxID(fmt.Sprint("sbx_", n)), core.WorkspaceID(fmt.Sprint("ws_", n))
		held = append(held, s)
	}
	ids = w.runner.Checkpoints()
	for n := 1; n < checkpoints; n++ {
		ids = append(ids, core.CheckpointID(fmt.Sprint("ckpt_", n)))
	}
	return held, ids
}

// cpuOf is the processor time of the database's processes that serve this database.
func cpuOf(t *testing.T, conn *pgx.Conn) (sum time.Duration) {
	t.Helper()
	rows, err := conn.Query(t.Context(), `SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`)
	if err != nil {
		t.Fatal(err)
	}
	pids, err := pgx.CollectRows(rows, pgx.RowTo[int])
	if err != nil {
		t.Fatal(err)
	}
	for _, pid := range pids {
		b, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
		if err != nil {
			continue // it has ended
		}
		f := strings.Fields(string(b[strings.LastIndexByte(string(b), ')')+1:]))
		for _, ticks := range f[11:13] {
			n, err := strconv.ParseInt(ticks, 10, 64)
			if err != nil {
				t.Fatal(err)
			}
			sum += time.Duration(n) * 10 * time.Millisecond
		}
	}
	return sum
}

// TestBeatCost compares what the database does for a heartbeat that names everything with what it does for one without a difference.
func TestBeatCost(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.LoopInterval = time.Hour })
	held, ids := populate(t, w, 200, 2000)
	var sender beats.Sender
	sender.Registered(w.epoch)
	send := func(whole bool) time.Duration {
		t.Helper()
		if whole {
			sender.Unanswered()
		}
		b := sender.Begin()
		b.Info, b.Sandboxes, b.Checkpoints = w.runner.Info(), held, ids
		m := sender.Make(b)
		if whole == (m.Differences != nil) {
			t.Fatalf("heartbeat %d is of the other kind", b.Number)
		}
		began := time.Now()
		var out runnerapi.Heartbeated
		var err error
		if whole {
			out, err = w.Heartbeat(t.Context(), w.runner.ID(), b)
		} else {
			out, err = w.Beat(t.Context(), w.runner.ID(), *m.Differences)
		}
		took := time.Since(began)
		if err != nil || out.Full || len(out.DropSandboxes)+len(out.DropCheckpoints)+len(out.StrayCheckpoints)+len(out.Unsettled) > 0 {
			t.Fatalf("%+v, %v", out, err)
		}
		sender.Answered(m, out)
		return took
	}
	send(true)
	w.sql(`VACUUM ANALYZE`)
	conn, err := pgx.Connect(t.Context(), w.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	const rounds, each = 5, 40
	took, cpu := map[bool][]time.Duration{}, map[bool]time.Duration{}
	for range rounds {
		for _, whole := range []bool{true, false} {
			before := cpuOf(t, conn)
			for range each {
				took[whole] = append(took[whole], send(whole))
			}
			cpu[whole] += cpuOf(t, conn) - before
		}
	}
	median := func(whole bool) time.Duration {
		slices.Sort(took[whole])
		return took[whole][len(took[whole])/2]
	}
	load, _ := os.ReadFile("/proc/loadavg")
	t.Logf("200 sandboxes, 2000 checkpoints: whole %s and %s of the database's processor, differences %s and %s; load %s",
		median(true), cpu[true]/(rounds*each), median(false), cpu[false]/(rounds*each), strings.TrimSpace(string(load)))
	if cpu[false]*2 > cpu[true] {
		t.Errorf("a heartbeat without a difference costs the database %s, one that names everything %s", cpu[false]/(rounds*each), cpu[true]/(rounds*each))
	}
}
