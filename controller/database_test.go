package controller_test

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/migrations"
)

// TestDatabaseDies kills the server in the middle of a fork: the request is told so, and the fork is recorded when it is back.
func TestDatabaseDies(t *testing.T) {
	t.Parallel()
	binaries, err := pgcluster.Find(t.Context(), "")
	require.That(t, "postgres", err == nil, "apt-get install --no-install-recommends postgresql")
	dir, err := os.MkdirTemp("", "coppice-dies") //nolint:usetesting // the server's user must reach it, and t.TempDir is private
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	cfg := pgcluster.Config{Dir: dir + "/pg", Binaries: binaries, Log: slog.New(slog.DiscardHandler), Durable: true}
	cluster, err := pgcluster.Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := cluster.Remove(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	w := &world{t: t, dsn: cluster.DSN("postgres"), runner: runnertest.Start(t, runnertest.Config{})}
	if err := migrations.Up(t.Context(), w.dsn); err != nil {
		t.Fatal(err)
	}
	w.store, w.client = openStore(t, w.dsn), runnerclient.New("runner-secret")
	t.Cleanup(w.client.Close)
	w.Controller, w.stop = w.start(controller.Config{LoopInterval: 50 * time.Millisecond, ShutdownGrace: time.Second})
	project, err := w.Bootstrap(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.project = project.ID
	w.register()
	cp := w.checkpoint(w.create("main").ID)

	g := w.gate(runnertest.PointFork + runnertest.Done)
	answered := make(chan error, 1)
	go func() {
		_, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2, Name: "child"}, wait)
		answered <- err
	}()
	<-g.reached
	if err := syscall.Kill(cluster.PID(), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	<-cluster.Done()
	eventually(t, "the backends have noticed, and answer no more", func() bool { return !works(t, dir) })
	close(g.open)
	wantCode(t, <-answered, core.CodeDatabaseUnavailable)
	_, err = w.Workspaces(t.Context(), w.project, controller.WorkspaceFilter{Page: controller.Page{Limit: 1}})
	wantCode(t, err, core.CodeDatabaseUnavailable)
	_, err = w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
	wantCode(t, err, core.CodeDatabaseUnavailable)

	if cluster, err = pgcluster.Start(t.Context(), cfg); err != nil {
		t.Fatal(err)
	}
	eventually(t, "both children are ready", func() bool {
		list, err := w.Workspaces(t.Context(), w.project, controller.WorkspaceFilter{Page: controller.Page{Limit: 10}, Parent: cp.ID, States: []core.WorkspaceState{core.WorkspaceReady}})
		return err == nil && len(list) == 2
	})
	w.consistent()
	w.stop()
}

// works reports whether a process is in the directory.
func works(t *testing.T, dir string) bool {
	t.Helper()
	list, err := filepath.Glob("/proc/[0-9]*/cwd")
	if err != nil {
		t.Fatal(err)
	}
	return slices.ContainsFunc(list, func(link string) bool {
		at, err := os.Readlink(link)
		return err == nil && strings.HasPrefix(at, dir+"/") // it may end meanwhile
	})
}

// lossyStore commits one transaction of a project and says that it does not know: the connection broke during the commit.
type lossyStore struct {
	controller.Store
	scope controller.Scope
	mu    sync.Mutex
	nth   int // which one, counted down
}

func (s *lossyStore) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	err := s.Store.InTx(ctx, scope, fn)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err == nil && scope == s.scope {
		if s.nth--; s.nth == 0 {
			return core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "the answer to a commit was lost")
		}
	}
	return err
}

// TestCommitAnswerIsLost loses the answer to each transaction of every kind of operation in turn: whatever the client was
// told, in the end every operation has done its work once, or none of it.
func TestCommitAnswerIsLost(t *testing.T) {
	t.Parallel()
	for name, kind := range kinds() {
		if strings.HasPrefix(name, "step") { // it begins other operations under the same request; TestKilledStep loses answers of commits
			continue
		}
		for nth := 1; nth <= 4; nth++ {
			t.Run(fmt.Sprintf("%s/%d", name, nth), func(t *testing.T) {
				t.Parallel()
				w := newWorld(t)
				ws := w.create("main")
				cp := w.checkpoint(ws.ID)
				w.stop()
				lossy := &lossyStore{Store: w.store, scope: controller.InProject(w.project), nth: nth}
				w.Controller, _ = w.startOn(lossy, controller.Config{LoopInterval: 20 * time.Millisecond, OperationLease: 300 * time.Millisecond, RunnerRetry: time.Second})
				before := w.number(`SELECT count(*) FROM operations`)
				a, err := kind.start(w, ws, cp)
				if err != nil && core.CodeOf(err) != core.CodeDatabaseUnavailable || a.Operation.State == core.OperationFailed {
					t.Fatalf("%+v, %v", a, err)
				}
				eventually(t, "everything has ended", func() bool {
					return w.number(`SELECT count(*) FROM operations WHERE state IN ('pending', 'running')`) == 0
				})
				if n := w.number(`SELECT count(*) FROM operations WHERE state = 'failed' AND problem_code <> 'DATABASE_UNAVAILABLE'`); n != 0 {
					t.Errorf("%d operations failed for another reason", n)
				}
				if n := w.number(`SELECT count(*) FROM operations WHERE kind <> 'create_template'`) - before; n > map[string]int{"resume": 2}[name] && n > 1 && err == nil {
					t.Errorf("%d operations for one request", n)
				}
				w.consistent()
			})
		}
	}
}
