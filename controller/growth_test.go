package controller_test

import (
	"fmt"
	"maps"
	"os"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// counters say how many rows of each table were read, as PostgreSQL counts it. Partitions count for their table.
type counters map[string]int

// rows is how many rows were read, of these tables or of all.
func (c counters) rows(tables ...string) (sum int) {
	for table, n := range c {
		if len(tables) == 0 || slices.Contains(tables, table) {
			sum += n
		}
	}
	return sum
}

func (c counters) String() string {
	var b strings.Builder
	for _, table := range slices.Sorted(maps.Keys(c)) {
		if n := c[table]; n > 0 {
			fmt.Fprintf(&b, " %s %d", table, n)
		}
	}
	return b.String()
}

// settled waits until nobody else is connected: a server process adds what it has counted at its end. It returns the sums.
func (w *world) settled() counters {
	w.t.Helper()
	eventually(w.t, "all connections end", func() bool {
		return w.number(`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend' AND pid <> pg_backend_pid()`) == 0
	})
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(w.t.Context()) }()
	rows, err := conn.Query(w.t.Context(), `
		SELECT coalesce(h.inhparent, s.relid)::regclass::text, sum(s.seq_tup_read + coalesce(s.idx_tup_fetch, 0))::int
		FROM pg_stat_user_tables s LEFT JOIN pg_inherits h ON h.inhrelid = s.relid GROUP BY 1`)
	if err != nil {
		w.t.Fatal(err)
	}
	all := counters{}
	var table string
	var read int
	if _, err := pgx.ForEachRow(rows, []any{&table, &read}, func() error {
		all[table] = read
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
	return all
}

// quiet makes a world whose controller does nothing by itself after its first round.
func quiet(t *testing.T) *world {
	t.Helper()
	return newWorld(t, func(c *controller.Config, r *runnertest.Config) {
		c.LoopInterval, r.Capacity = time.Hour, runnerapi.Capacity{Sandboxes: 64, VCPUs: 32, MemoryMiB: 1 << 20}
	})
}

// counted says what the database reads for what do has a controller do. The controller has no loops. The world's own one has
// ended.
func (w *world) counted(do func(*world)) counters {
	w.t.Helper()
	w.stop()
	w.store.Close()
	before := w.settled()
	store := openStore(w.t, w.dsn)
	other := *w
	other.store = store
	other.Controller = controller.New(inCluster(controller.Config{AllowAllEgress: true, RunnerLease: time.Hour, AdmissionWait: time.Millisecond}), store, w.client, logger(w.t))
	do(&other)
	store.Close()
	after := w.settled()
	for table, n := range after {
		after[table] = n - before[table]
	}
	return after
}

// TestFenceReadsInProportion gives up as many runners in a small database as in one with ten times as many checkpoints,
// workspaces and runners.
func TestFenceReadsInProportion(t *testing.T) {
	t.Parallel()
	const given, each, deep = 4, 50, 30
	read := map[int]int{}
	for _, runners := range []int{10, 100} {
		w := quiet(t)
		ws := w.create("main")
		w.crowd(ws, w.checkpoint(ws.ID).ID, runners, each, deep)
		w.sql(fmt.Sprintf(`UPDATE runners SET lease_expires_at = now() - interval '1 day' WHERE id = ANY (SELECT 'bulk_' || n FROM generate_series(1, %d) n)`, given))
		got := w.counted(func(w *world) {
			if err := w.Fleet().Fence(t.Context()); err != nil {
				t.Fatal(err)
			}
		})
		if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'lost'`); n != given*each {
			t.Fatalf("%d workspaces are lost", n)
		}
		t.Logf("%d workspaces of %d: %d rows read:%s", given*each, runners*each, got.rows(), got)
		read[runners] = got.rows("workspaces", "sandboxes", "checkpoints", "events", "ports", "operations")
	}
	if read[100] > read[10]+read[10]/4 {
		t.Errorf("to give up %d workspaces %d rows are read among 500 workspaces, and %d among 5000", given*each, read[10], read[100])
	}
	if most := 15 * given * each; read[100] > most {
		t.Errorf("to give up %d workspaces %d rows are read; want at most %d", given*each, read[100], most)
	}
}

// TestNoTableIsReadWhole has a controller do each of these in a database with many rows.
func TestNoTableIsReadWhole(t *testing.T) {
	t.Parallel()
	w := quiet(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.crowd(ws, cp.ID, 300, 20, 10)
	big := map[string]int{}
	for _, table := range []string{"workspaces", "sandboxes", "checkpoints", "runners", "runner_loads", "image_locations", "checkpoint_copies"} {
		big[table] = w.number(`SELECT count(*) FROM ` + table)
	}
	w.beat()
	var made []controller.Workspace
	for _, c := range []struct {
		name string
		do   func(*world)
	}{
		{"create", func(w *world) { made = append(made, w.create("another")) }},
		{"fork", func(w *world) { made = append(made, w.fork(cp.ID, 3)...) }},
		{"checkpoint", func(w *world) { cp = w.checkpoint(ws.ID) }},
		{"heartbeat", func(w *world) { w.beat() }},
		{"terminate", func(w *world) {
			if _, err := w.Terminate(t.Context(), w.project, made[0].ID, wait); err != nil {
				t.Fatal(err)
			}
		}},
		{"fence", func(w *world) {
			w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 day' WHERE id = 'bulk_1'`)
			if err := w.Fleet().Fence(t.Context()); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		got := w.counted(c.do)
		t.Logf("%s: %d rows read:%s", c.name, got.rows(), got)
		for table, n := range big {
			if c.name == "fence" && strings.HasPrefix(table, "runner") {
				continue // a round looks at each runner
			}
			if got[table] > n/2 {
				t.Errorf("%s reads table %s whole, or much of it: %d of its %d rows", c.name, table, got[table], n)
			}
		}
	}
	if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'lost'`); n != 20 {
		t.Errorf("%d workspaces are lost", n)
	}
}

// TestPlacementReadsInProportion asks for the same in a small cluster and in a large one. What is read must be nearly the same.
func TestPlacementReadsInProportion(t *testing.T) {
	t.Parallel()
	read := map[string]map[int]int{}
	for _, runners := range []int{10, 1000} {
		w := quiet(t)
		ws := w.create("main")
		sealed, captured := w.checkpoint(ws.ID), w.checkpoint(ws.ID)
		w.crowd(ws, sealed.ID, runners, 4, 2)
		w.sql(`UPDATE checkpoints SET state = 'sealed', sealed_at = now(), manifest_key = 'k', manifest_digest = $2, manifest_bytes = 1, stored_bytes = 1 WHERE id = $1`,
			sealed.ID, core.DigestOf([]byte("manifest")))
		w.beat()
		refused := func(w *world, code core.Code, cpus int) {
			_, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Resources: core.Resources{VCPUs: cpus, MemoryMiB: 512, DiskGiB: 1}}, wait)
			wantCode(t, err, code)
		}
		for _, c := range []struct {
			name string
			do   func(*world)
		}{
			{"create", func(w *world) { w.create("another") }},
			{"fork of a captured checkpoint", func(w *world) { w.fork(captured.ID, 3) }},
			{"fork of a sealed checkpoint", func(w *world) { w.fork(sealed.ID, 3) }},
			{"fork that is spread", func(w *world) {
				_, err := w.ForkCheckpoint(t.Context(), w.project, sealed.ID, controller.ForkRequest{Count: 3, Spread: true}, wait)
				wantCode(t, err, core.CodeCheckpointNotFound) // it is placed on runners that are copies of the only one in name alone
			}},
			{"ready", func(w *world) {
				if err := w.Ready(t.Context()); err != nil {
					t.Error(err)
				}
			}},
			{"too large for any", func(w *world) { refused(w, core.CodeCapacity, 64) }},
			{"image of nobody", func(w *world) {
				_, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: "nothing", Resources: ws.Resources}, wait)
				wantCode(t, err, core.CodeImageNotFound)
			}},
			{"every runner full", func(w *world) {
				refused(w, core.CodeCapacity, 1)
			}},
		} {
			if read[c.name] == nil {
				read[c.name] = map[int]int{}
			}
			if c.name == "every runner full" {
				w.sql(`UPDATE runner_loads SET sandboxes = cap_sandboxes`)
				w.sql(`ANALYZE runner_loads`)
			}
			got := w.counted(c.do)
			t.Logf("%d runners, %s: %d rows read:%s", runners, c.name, got.rows(), got)
			read[c.name][runners] = got.rows()
		}
	}
	for name, n := range read {
		most := min(n[10]+400, 600)
		if name == "too large for any" { // it looks at every runner that is not full, once: such a request does not wait
			most = 6 * 1000
		}
		if n[1000] > most {
			t.Errorf("%s: %d rows are read with 10 runners, %d with 1000", name, n[10], n[1000])
		}
	}
}

// TestMassFence gives up a whole cluster at once: a small one, or with -long one of 1,001 runners.
func TestMassFence(t *testing.T) {
	runners, each, deep := 20, 10, 5
	if *long {
		runners, each, deep = 1001, 50, 30
	}
	w := quiet(t)
	ws := w.create("main")
	w.crowd(ws, w.checkpoint(ws.ID).ID, runners, each, deep)
	w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 day' WHERE id LIKE 'bulk%'`)
	began := time.Now()
	if err := w.Fleet().Fence(t.Context()); err != nil {
		t.Fatal(err)
	}
	took := time.Since(began)
	if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'lost' AND id LIKE 'bulk%'`); n != runners*each {
		t.Fatalf("%d workspaces are lost", n)
	}
	load := 1.0
	if b, err := os.ReadFile("/proc/loadavg"); err == nil {
		_, _ = fmt.Sscan(string(b), &load)
	}
	most := time.Duration(float64(30*time.Second) * max(1, load/float64(runtime.NumCPU()))) // as long as others have the processors, it takes longer
	t.Logf("fence of %d runners with %d workspaces, %d deep: %.1f s at load %.1f", runners, runners*each, deep, took.Seconds(), load)
	if took > most {
		t.Errorf("it took %s, longer than %s", took, most)
	}
}
