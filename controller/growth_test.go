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

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
)

// counters are what PostgreSQL has counted of each table. Those of partitions are counted for their table.
type counters map[string]struct{ Scans, Read int }

// rows is how many rows were read, of these tables or of all.
func (c counters) rows(tables ...string) (sum int) {
	for table, n := range c {
		if len(tables) == 0 || slices.Contains(tables, table) {
			sum += n.Read
		}
	}
	return sum
}

func (c counters) String() string {
	var b strings.Builder
	for _, table := range slices.Sorted(maps.Keys(c)) {
		if n := c[table]; n.Read > 0 {
			fmt.Fprintf(&b, " %s %d", table, n.Read)
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
		SELECT coalesce(h.inhparent, s.relid)::regclass::text, sum(s.seq_scan)::int, sum(s.seq_tup_read + coalesce(s.idx_tup_fetch, 0))::int
		FROM pg_stat_user_tables s LEFT JOIN pg_inherits h ON h.inhrelid = s.relid GROUP BY 1`)
	if err != nil {
		w.t.Fatal(err)
	}
	all := counters{}
	var table string
	var scans, read int
	if _, err := pgx.ForEachRow(rows, []any{&table, &scans, &read}, func() error {
		n := all[table]
		n.Scans, n.Read = scans, read
		all[table] = n
		return nil
	}); err != nil {
		w.t.Fatal(err)
	}
	return all
}

// quiet makes a world whose controller does nothing by itself after its first round.
func quiet(t *testing.T) *world {
	t.Helper()
	return newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.LoopInterval = time.Hour })
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
		n.Scans -= before[table].Scans
		n.Read -= before[table].Read
		after[table] = n
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
			if err := w.Fence(t.Context()); err != nil {
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
	for _, table := range []string{"workspaces", "sandboxes", "checkpoints"} {
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
			if err := w.Fence(t.Context()); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		got := w.counted(c.do)
		t.Logf("%s: %d rows read:%s", c.name, got.rows(), got)
		for table, n := range big {
			if got[table].Scans > 0 || got[table].Read > n/2 {
				t.Errorf("%s reads table %s whole: %d scans, %d of its %d rows", c.name, table, got[table].Scans, got[table].Read, n)
			}
		}
	}
	if n := w.number(`SELECT count(*) FROM workspaces WHERE state = 'lost'`); n != 20 {
		t.Errorf("%d workspaces are lost", n)
	}
}

// TestMassFence gives up a whole cluster at once.
func TestMassFence(t *testing.T) {
	if !*long {
		t.Skip("it takes minutes; run it with -long")
	}
	const runners, each, deep = 1001, 50, 30
	w := quiet(t)
	ws := w.create("main")
	w.crowd(ws, w.checkpoint(ws.ID).ID, runners, each, deep)
	w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 day' WHERE id LIKE 'bulk%'`)
	began := time.Now()
	if err := w.Fence(t.Context()); err != nil {
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
