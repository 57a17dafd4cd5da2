package controller_test

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/core"
)

// collect reads a stream until n events are there.
func collect(t *testing.T, s *events.Stream, n int) []events.Event {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	var all []events.Event
	for len(all) < n {
		list, err := s.Next(ctx, true)
		if err != nil {
			t.Fatalf("after %d events: %v", len(all), err)
		}
		all = append(all, list...)
	}
	return all
}

func types(list []events.Event) []string {
	out := make([]string, len(list))
	for i, e := range list {
		out[i] = e.Type
	}
	return out
}

func stream(t *testing.T, c *controller.Controller, project core.ProjectID, tree core.CheckpointID, f events.Filter, after int64) *events.Stream {
	t.Helper()
	s, err := c.Events.Stream(t.Context(), project, tree, f, after)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

// TestEvents follows a workspace through its life, at this controller and another.
func TestEvents(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other, _ := w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
	live, remote := stream(t, w.Controller, w.project, "", events.Filter{}, -1), stream(t, other, w.project, "", events.Filter{}, -1)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	child := w.fork(cp.ID, 1)[0]
	if _, err := w.Terminate(t.Context(), w.project, child.ID, wait); err != nil {
		t.Fatal(err)
	}
	want := []string{
		"workspace.creating", "workspace.restoring", "workspace.ready", "operation.succeeded",
		"checkpoint.capturing", "workspace.checkpointing", "checkpoint.captured", "workspace.ready", "operation.succeeded",
		"workspace.restoring", "workspace.ready", "operation.succeeded",
		"workspace.terminating", "workspace.terminated", "operation.succeeded",
	}
	got := collect(t, live, len(want))
	sorted := func(list []string) []string { return slices.Sorted(slices.Values(list)) }
	if diff := cmp.Diff(sorted(want), sorted(types(got))); diff != "" {
		t.Errorf("events (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(got, collect(t, remote, len(want))); diff != "" {
		t.Errorf("events of the other controller (-here +there):\n%s", diff)
	}
	if replay := stream(t, w.Controller, w.project, "", events.Filter{}, 0); true {
		if diff := cmp.Diff(got, collect(t, replay, len(want))); diff != "" {
			t.Errorf("replay (-live +replay):\n%s", diff)
		}
	}
	if last := got[len(got)-3:]; !strings.Contains(string(last[0].Data), `"from": "ready"`) {
		t.Errorf("data: %s", last[0].Data)
	}
	for _, c := range []struct {
		name   string
		tree   core.CheckpointID
		filter events.Filter
		want   []string
	}{
		{"workspace", "", events.Filter{WorkspaceID: child.ID}, []string{"workspace.restoring", "workspace.ready", "workspace.terminating", "workspace.terminated", "operation.succeeded"}},
		{"type", "", events.Filter{Types: []string{"workspace.ready"}}, []string{"workspace.ready", "workspace.ready", "workspace.ready"}},
		{"object", "", events.Filter{Types: []string{"checkpoint"}}, []string{"checkpoint.capturing", "checkpoint.captured"}},
		{"tree", cp.ID, events.Filter{Types: []string{"checkpoint.captured", "workspace.terminated"}}, []string{"checkpoint.captured", "workspace.terminated"}},
	} {
		s := stream(t, w.Controller, w.project, c.tree, c.filter, 0)
		if diff := cmp.Diff(sorted(c.want), sorted(types(collect(t, s, len(c.want))))); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
		if rest, err := s.Next(t.Context(), false); err != nil || len(rest) > 0 {
			t.Errorf("%s: then %v, %v", c.name, types(rest), err)
		}
	}
	if _, err := w.Events.Stream(t.Context(), w.project, core.NewID[core.CheckpointID](), events.Filter{}, 0); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("a foreign tree: %v", err)
	}
	_, err := w.Events.Stream(t.Context(), w.project, "", events.Filter{}, 1<<40)
	wantCode(t, err, core.CodeEventsExpired)
}

// TestEventsOfConcurrentWriters has many writers whose transactions end in another order than that in which they got their
// ids, some not at all, and readers that come back again and again, at two controllers. Every event is seen exactly once, by
// id, and of each object in the order of its changes.
func TestEventsOfConcurrentWriters(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	other, _ := w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
	const writers, rounds, objects = 8, 40, 5
	ids := make([]core.WorkspaceID, objects)
	for i := range ids {
		ids[i] = w.create(fmt.Sprintf("ws-%d", i)).ID
	}
	begin := stream(t, w.Controller, w.project, "", events.Filter{}, -1).Cursor()
	var readers, group sync.WaitGroup
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	seen := make([][]events.Event, 4)
	written := make(chan struct{}) // closed when newest is known
	var newest int64
	for n := range seen {
		readers.Go(func() {
			last, until := begin, int64(-1)
			for until < 0 || last < until {
				at := w.Controller
				if rand.N(2) == 0 {
					at = other
				}
				s, err := at.Events.Stream(ctx, w.project, "", events.Filter{}, last)
				if err != nil {
					t.Errorf("reader %d: %v", n, err)
					return
				}
				short, cancel := context.WithTimeout(ctx, time.Duration(rand.N(int64(50*time.Millisecond))))
				for range 1 + rand.N(4) {
					list, err := s.Next(short, true)
					if err != nil {
						break
					}
					seen[n] = append(seen[n], list...)
					last = s.Cursor()
				}
				cancel()
				s.Close()
				select {
				case <-written:
					until = newest
				default:
				}
				if ctx.Err() != nil {
					return
				}
			}
		})
	}
	for n := range writers {
		group.Go(func() { write(t, w.dsn, ids, n, rounds) })
	}
	group.Wait()
	newest = int64(w.number(`SELECT max(id) FROM events`))
	close(written)
	readers.Wait()
	total := w.number(fmt.Sprintf(`SELECT count(*) FROM events WHERE id > %d AND project_id = '%s'`, begin, w.project))
	for n, list := range seen {
		if len(list) != total {
			t.Errorf("reader %d got %d events of %d", n, len(list), total)
		}
		state := map[core.WorkspaceID]string{}
		for i, e := range list {
			if i > 0 && e.ID <= list[i-1].ID {
				t.Fatalf("reader %d: event %d came after %d", n, e.ID, list[i-1].ID)
			}
			from := fmt.Sprintf(`"from": %q`, state[e.WorkspaceID])
			if before := state[e.WorkspaceID]; before != "" && !strings.Contains(string(e.Data), from) {
				t.Errorf("reader %d: %s of %s with %s, and it was %s", n, e.Type, e.WorkspaceID, e.Data, before)
			}
			state[e.WorkspaceID] = strings.TrimPrefix(e.Type, "workspace.")
		}
	}
	if total < writers*rounds/4 {
		t.Errorf("only %d events", total)
	}
}

// write moves workspaces to and fro in transactions that change several, wait, and are rolled back at times.
func write(t *testing.T, dsn string, ids []core.WorkspaceID, seed, rounds int) {
	t.Helper()
	random := rand.New(rand.NewPCG(uint64(seed), 1))
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Error(err)
		return
	}
	defer func() { _ = conn.Close(context.WithoutCancel(t.Context())) }()
	for range rounds {
		tx, err := conn.Begin(t.Context())
		if err != nil {
			t.Error(err)
			return
		}
		// An id of its own first, so that transaction ids and the order of changes differ.
		_, err = tx.Exec(t.Context(), `SELECT pg_current_xact_id(), pg_sleep($1)`, random.Float64()/200)
		chosen := slices.Clone(ids)
		random.Shuffle(len(chosen), func(i, j int) { chosen[i], chosen[j] = chosen[j], chosen[i] })
		chosen = chosen[:1+random.IntN(2)]
		slices.Sort(chosen) // no deadlocks
		for _, id := range chosen {
			if err == nil {
				_, err = tx.Exec(t.Context(), `UPDATE workspaces SET state = CASE state WHEN 'ready' THEN 'checkpointing' ELSE 'ready' END WHERE id = $1`, id)
			}
			if err == nil {
				_, err = tx.Exec(t.Context(), `SELECT pg_sleep($1)`, random.Float64()/200)
			}
		}
		switch {
		case err != nil:
			t.Error(err)
			return
		case random.IntN(5) == 0:
			err = tx.Rollback(t.Context())
		default:
			err = tx.Commit(t.Context())
		}
		if err != nil {
			t.Error(err)
			return
		}
	}
}

// TestEventsAreKeptForDays drops old partitions: a reader that stopped before them is told.
func TestEventsAreKeptForDays(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.create("main")
	old := int64(w.number(`SELECT max(id) FROM events`))
	slow := stream(t, w.Controller, w.project, "", events.Filter{}, 1)
	// What has happened so far was three days ago.
	w.exec(`CREATE TABLE events_20200101 PARTITION OF events FOR VALUES FROM ('2020-01-01 00:00:00+00') TO ('2020-01-02 00:00:00+00');
		SET session_replication_role = replica;
		UPDATE events SET created_at = '2020-01-01 12:00:00+00'; RESET session_replication_role`)
	tidy := func() {
		t.Helper()
		if err := w.store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error { return tx.TidyEvents(t.Context(), 24*time.Hour) }); err != nil {
			t.Fatal(err)
		}
	}
	tidy()
	tidy() // twice changes nothing
	if n := w.number(`SELECT count(*) FROM events`); n != 0 {
		t.Errorf("%d events are left", n)
	}
	if n := w.number(`SELECT count(*) FROM pg_class WHERE relname = 'events_20200101'`); n != 0 {
		t.Error("the old partition is there")
	}
	_, err := w.Events.Stream(t.Context(), w.project, "", events.Filter{}, old-1)
	wantCode(t, err, core.CodeEventsExpired)
	_, err = slow.Next(t.Context(), true)
	wantCode(t, err, core.CodeEventsExpired)
	w.create("next")
	fresh := collect(t, stream(t, w.Controller, w.project, "", events.Filter{}, 0), 3)
	if same := collect(t, stream(t, w.Controller, w.project, "", events.Filter{}, old), 3); !cmp.Equal(fresh, same) || fresh[0].ID <= old {
		t.Errorf("after the newest of the old: %v", types(same))
	}
}

func (w *world) exec(sql string) {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	defer func() { _ = conn.Close(context.WithoutCancel(w.t.Context())) }()
	if _, err := conn.Exec(w.t.Context(), sql); err != nil {
		w.t.Fatalf("%s: %v", sql, err)
	}
}
