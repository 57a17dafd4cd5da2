package postgres_test

import (
	"context"
	"errors"
	"io"
	"net"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/core"
)

func TestDeadDatabase(t *testing.T) {
	t.Parallel()
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: "postgres://nobody@127.0.0.1:1/x"})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	for name, err := range map[string]error{
		"ping":   store.Ping(t.Context()),
		"tx":     store.InTx(t.Context(), controller.System(), func(controller.AllTx) error { return nil }),
		"notify": store.Notify(t.Context(), nil),
		"listen": store.Listen(t.Context(), func(core.OperationID) {}, func(core.KeyID) {}),
	} {
		if core.CodeOf(err) != core.CodeDatabaseUnavailable || core.CategoryOf(err) != core.Unavailable || !strings.Contains(core.MessageOf(err), "PostgreSQL") {
			t.Errorf("%s: %v", name, err)
		}
	}
	if _, err := postgres.Open(t.Context(), postgres.Config{DSN: "postgres://%zz"}); err == nil {
		t.Error("a wrong address passes")
	}
}

// TestSilentDatabase connects to something that accepts and never answers, as a stopped server does.
func TestSilentDatabase(t *testing.T) {
	t.Parallel()
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	group.Go(func() {
		for {
			conn, err := listener.Accept()
			if err != nil {
				return
			}
			group.Go(func() {
				_, _ = io.Copy(io.Discard, conn)
				_ = conn.Close()
			})
		}
	})
	defer group.Wait()
	defer listener.Close()
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: "postgres://nobody@" + listener.Addr().String() + "/x?sslmode=disable"})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	late, stop := context.WithTimeoutCause(t.Context(), time.Minute, errors.New("it waits for the database without end")) // by itself it gives up after seconds
	defer stop()
	wantCode(t, store.Ping(late), core.CodeDatabaseUnavailable)
	if err := late.Err(); err != nil {
		t.Error(context.Cause(late))
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := store.InTx(ctx, controller.System(), func(controller.AllTx) error { return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("a caller that has gone is not a dead database: %v", err)
	}
}

// TestKilledConnection ends the server's side of a transaction in the middle.
func TestKilledConnection(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	conn := d.conn()
	err := d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
		if _, err := tx.EnsureProject(ctx, core.NewID[core.ProjectID](), "half"); err != nil {
			return err
		}
		if _, err := conn.Exec(ctx, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()`); err != nil {
			t.Error(err)
		}
		_, err := tx.EnsureProject(ctx, core.NewID[core.ProjectID](), "other-half")
		return err
	})
	wantCode(t, err, core.CodeDatabaseUnavailable)
	var left int
	if err := conn.QueryRow(t.Context(), `SELECT count(*) FROM projects WHERE name LIKE '%half'`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d halves are there, %v", left, err)
	}
	d.newProject("half") // the pool has recovered
}

// TestDeadlockIsRepeated lets two transactions lock two rows in opposite order.
func TestDeadlockIsRepeated(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	a, b := d.ready(d.project, from), d.ready(d.project, from)
	both := make(chan struct{}, 2)
	var meet sync.WaitGroup
	meet.Add(2)
	var group sync.WaitGroup
	runs := make([]int, 2)
	for i, order := range [][2]core.WorkspaceID{{a.ID, b.ID}, {b.ID, a.ID}} {
		group.Go(func() {
			d.mine(func(ctx context.Context, tx controller.AllTx) error {
				if _, err := tx.PatchWorkspace(ctx, order[0], controller.WorkspacePatch{}); err != nil {
					return err
				}
				if runs[i]++; runs[i] == 1 {
					meet.Done()
					meet.Wait()
				}
				_, err := tx.PatchWorkspace(ctx, order[1], controller.WorkspacePatch{})
				return err
			})
			both <- struct{}{}
		})
	}
	group.Wait()
	if runs[0]+runs[1] < 3 {
		t.Errorf("no deadlock happened: %v", runs)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		list, err := tx.WorkspacesByID(ctx, []core.WorkspaceID{a.ID, b.ID})
		if list[0].Version != 3 || list[1].Version != 3 {
			t.Errorf("versions %d and %d", list[0].Version, list[1].Version)
		}
		return err
	})
}

// TestErrorsAreNotCommitted goes on after a statement has failed: what came before it is not there, and that is said.
func TestErrorsAreNotCommitted(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	id := core.NewID[core.ProjectID]()
	err := d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
		if _, err := tx.InsertProject(ctx, id, "first"); err != nil {
			return err
		}
		_, err := tx.InsertProject(ctx, id, "second") // the id is taken
		if err == nil {
			t.Error("two projects have one id")
		}
		return nil
	})
	wantCode(t, err, core.CodeInternal)
	wantCode(t, d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.Project(ctx, id)
		return err
	}), core.CodeProjectNotFound)
}

func TestScopesAreChecked(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	for _, scope := range []controller.Scope{{}, controller.InProject(""), controller.InProject("x'; drop table projects; --")} {
		if err := d.store.InTx(t.Context(), scope, func(controller.AllTx) error {
			t.Error("it ran")
			return nil
		}); err == nil {
			t.Errorf("scope %q was taken", scope)
		}
	}
}
