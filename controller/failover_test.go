package controller_test

import (
	"context"
	"errors"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
)

// server is a PostgreSQL whose state can be kept and come back to.
type server struct {
	t       *testing.T
	cfg     pgcluster.Config
	cluster *pgcluster.Cluster
}

func startServer(t *testing.T) *server {
	t.Helper()
	bins, err := pgcluster.Find(t.Context(), os.Getenv("PGBIN"))
	require.That(t, "postgres", core.CodeOf(err) != core.CodeIncompatibleHost, core.MessageOf(err))
	if err != nil {
		t.Fatal(err)
	}
	s := &server{t: t, cfg: pgcluster.Config{Dir: filepath.Join(t.TempDir(), "pg"), Binaries: bins, Durable: true, Log: slog.New(slog.DiscardHandler)}}
	s.start()
	t.Cleanup(func() { s.stop() })
	return s
}

func (s *server) start() {
	s.t.Helper()
	var err error
	if s.cluster, err = pgcluster.Start(s.t.Context(), s.cfg); err != nil {
		s.t.Fatal(err)
	}
}

func (s *server) stop() {
	s.t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(s.t.Context()), time.Minute)
	defer cancel()
	if err := s.cluster.Stop(ctx); err != nil {
		s.t.Error(err)
	}
}

func (s *server) path(name string) string { return filepath.Join(s.cfg.Dir, name) }

// keep copies the state of now, as a standby has it that hears nothing afterwards.
func (s *server) keep() {
	s.t.Helper()
	s.stop()
	if out, err := exec.CommandContext(s.t.Context(), "cp", "-a", s.path("data"), s.path("kept")).CombinedOutput(); err != nil {
		s.t.Fatalf("%v: %s", err, out)
	}
	s.start()
}

// goBack ends the server and starts the kept state in its place. A promoted one begins a timeline, as every standby does.
func (s *server) goBack(promoted bool) {
	s.t.Helper()
	s.stop()
	err := errors.Join(os.RemoveAll(s.path("data")), os.Rename(s.path("kept"), s.path("data")))
	if promoted {
		auto := filepath.Join(s.path("data"), "postgresql.auto.conf")
		err = errors.Join(err, os.WriteFile(auto, []byte("restore_command = 'false'\n"), 0o600)) // it keeps its owner
		out, ownErr := exec.CommandContext(s.t.Context(), "cp", "-a", auto, filepath.Join(s.path("data"), "recovery.signal")).CombinedOutput()
		if ownErr != nil {
			s.t.Logf("%s", out)
		}
		err = errors.Join(err, ownErr)
	}
	if err != nil {
		s.t.Fatal(err)
	}
	s.start()
	eventually(s.t, "the server takes writes", func() bool {
		conn, err := pgx.Connect(s.t.Context(), s.cluster.DSN("coppice"))
		if err != nil {
			return false
		}
		defer func() { _ = conn.Close(s.t.Context()) }()
		recovers := true
		return conn.QueryRow(s.t.Context(), `SELECT pg_is_in_recovery()`).Scan(&recovers) == nil && !recovers
	})
}

// newWorldOn is newWorld on a server of the test's own. dsn is the address of a database there.
func newWorldOn(t *testing.T, dsn func(database string) string) *world {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn("postgres"))
	if err != nil {
		t.Fatal(err)
	}
	_, err = conn.Exec(t.Context(), `CREATE DATABASE coppice`)
	if err := errors.Join(err, conn.Close(t.Context()), migrations.Up(t.Context(), dsn("coppice"))); err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, dsn: dsn("coppice"), runner: runnertest.Start(t, runnertest.Config{}), client: runnerclient.New("runner-secret")}
	w.store = openStore(t, w.dsn)
	t.Cleanup(w.client.Close)
	w.Controller, w.stop = w.start(controller.Config{LoopInterval: 50 * time.Millisecond, RunnerRetry: 2 * time.Second, Bootstrap: controller.Bootstrap{Key: "coppice-test-key"}})
	project, err := w.Bootstrap(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.project = project.ID
	w.register()
	return w
}

// made is what the creation of a workspace says where there is a template.
var made = []string{"operation.succeeded", "workspace.ready", "workspace.restoring"}

// patient creates a workspace. The first try may meet a connection of the server before.
func (w *world) patient(name string) core.WorkspaceID {
	w.t.Helper()
	eventually(w.t, "the database answers", func() bool { return w.Ready(w.t.Context()) == nil })
	return w.create(name).ID
}

// collectOf returns the events of workspaces that were created, when all have come. A stream may begin with events of a moment before it was
// opened: those of other workspaces are left out.
func collectOf(t *testing.T, s *events.Stream, ids ...core.WorkspaceID) []events.Event {
	t.Helper()
	var all []events.Event
	for len(all) < len(ids)*len(made) {
		all = append(all, slices.DeleteFunc(collect(t, s, 1), func(e events.Event) bool { return !slices.Contains(ids, e.WorkspaceID) })...)
	}
	return all
}

// TestRulesOverFailover loses changes of egress rules, which the runner has, with the primary. The runner goes back to the rules that the new
// server has, and takes what is changed after that, although it has newer versions of both.
func TestRulesOverFailover(t *testing.T) {
	t.Parallel()
	p := testpg.NewPair(t, false)
	w := newWorldOn(t, p.DSN)
	lost, later := w.createAllowing("lost", "a.example", "b.example"), w.createAllowing("later", "a.example", "b.example")
	p.Cut()
	w.mustAllow(lost.ID, "a.example", "b.example", "lost.example")
	for range 3 {
		w.mustAllow(later.ID, "a.example", "b.example", "lost.example")
		w.mustAllow(later.ID, "a.example", "b.example")
	}
	if got := w.runner.Rules(lost.Sandbox.ID).Allow; !slices.Contains(got, "lost.example") {
		t.Fatalf("the runner has %q: this test shows nothing", got)
	}
	p.Failover()
	eventually(t, "the database answers", func() bool { return w.Ready(t.Context()) == nil })
	w.mustAllow(later.ID, "a.example")
	eventually(t, "the runner has the rules of the new server", func() bool {
		return slices.Equal(w.runner.Rules(lost.Sandbox.ID).Allow, []string{"a.example", "b.example"}) && slices.Equal(w.runner.Rules(later.Sandbox.ID).Allow, []string{"a.example"})
	})
	for _, ws := range []core.WorkspaceID{lost.ID, later.ID} {
		eventually(t, "the controller knows", func() bool {
			now, err := w.Workspace(t.Context(), w.project, ws)
			return err == nil && !now.RulesPending()
		})
	}
	w.raisesNothing(w.createAllowing("after", "a.example").ID)
}

// raisesNothing starts another controller, after which the rules of a workspace of the present history are what they were.
func (w *world) raisesNothing(id core.WorkspaceID) {
	w.t.Helper()
	w.stop()
	before := w.number(`SELECT egress_version FROM workspaces WHERE id = $1`, id)
	w.sql(`UPDATE workspaces SET egress_applied = 0 WHERE id = $1`, id) // the controller raises before it gives
	w.Controller, w.stop = w.start(controller.Config{LoopInterval: 50 * time.Millisecond, RunnerRetry: 2 * time.Second})
	eventually(w.t, "the rules are given", func() bool {
		return w.number(`SELECT count(*) FROM workspaces WHERE id = $1 AND egress_applied = egress_version`, id) == 1
	})
	if after := w.number(`SELECT egress_version FROM workspaces WHERE id = $1`, id); after != before {
		w.t.Errorf("a controller that started raised the rules of a new workspace from version %d to %d", before, after)
	}
	if n := w.number(`SELECT count(*) FROM audit_records WHERE object_id = $1 AND detail ? 'egress_version'`, id); n != 0 {
		w.t.Errorf("%d audit records say that the rules of a new workspace changed", n)
	}
}

// TestEventsOverFailover replaces the database server by a promoted one that lacks the last events, which streams have passed on.
// Streams that are open, and those that begin behind the last id of the lost events, get every event of the new server.
func TestEventsOverFailover(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	w := newWorldOn(t, s.cluster.DSN)
	w.create("first")
	s.keep()
	eventually(t, "the database answers", func() bool { return w.Ready(t.Context()) == nil })
	live := stream(t, w.Controller, w.project, "", events.Filter{}, -1)
	var last int64
	lost := collectOf(t, live, w.patient("lost-1"), w.patient("lost-2"))
	for _, e := range lost {
		last = max(last, e.ID)
	}
	s.goBack(true)
	fresh := []core.WorkspaceID{w.patient("second"), w.patient("third")}
	for name, from := range map[string]*events.Stream{"open": live, "begun again": stream(t, w.Controller, w.project, "", events.Filter{}, last)} {
		got := collectOf(t, from, fresh...)
		want := slices.Sorted(slices.Values(slices.Concat(made, made)))
		if sorted := slices.Sorted(slices.Values(types(got))); !slices.Equal(sorted, want) {
			t.Errorf("the stream that was %s got %v", name, types(got))
		}
		for _, e := range got {
			if e.ID <= last {
				t.Errorf("the stream that was %s got an event with id %d, which was used before", name, e.ID)
			}
		}
	}
	if n := w.number(`SELECT count(*) FROM workspaces WHERE name LIKE 'lost%'`); n != 0 {
		t.Errorf("the new server has %d of the workspaces that it must lack: this test shows nothing", n)
	}
}

// TestEventsOfDatabaseSetBack replaces the database by an older copy of itself, which hands out the same ids again and is of the
// same timeline. Streams that are open end, and say why.
func TestEventsOfDatabaseSetBack(t *testing.T) {
	t.Parallel()
	s := startServer(t)
	w := newWorldOn(t, s.cluster.DSN)
	w.create("first")
	s.keep()
	eventually(t, "the database answers", func() bool { return w.Ready(t.Context()) == nil })
	live := stream(t, w.Controller, w.project, "", events.Filter{}, -1)
	var lost []core.WorkspaceID
	for _, name := range []string{"a", "b", "c", "d", "e", "f", "g", "h", "i", "j"} {
		lost = append(lost, w.patient(name))
	}
	collectOf(t, live, lost...)
	s.goBack(false)
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	for {
		if list, err := live.Next(ctx, true); err != nil {
			wantCode(t, err, core.CodeEventsExpired)
			break
		} else if len(list) > 0 {
			t.Fatalf("the stream got %v", types(list))
		}
	}
	w.patient("after")
	again := stream(t, w.Controller, w.project, "", events.Filter{}, -1)
	if got := slices.Sorted(slices.Values(types(collectOf(t, again, w.patient("again"))))); !slices.Equal(got, made) {
		t.Errorf("a new stream got %v", got)
	}
}
