package controller_test

import (
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

// wait is the patience of tests: nothing that they assert depends on it.
const wait = 5 * time.Minute

// world is a controller with a real database and a fake runner.
type world struct {
	*controller.Controller
	t       testing.TB
	dsn     string
	store   *postgres.Store
	client  *runnerclient.Client
	runner  *runnertest.Runner
	project core.ProjectID
	stop    func() // ends the controller's Run and waits for it
	epoch   int64  // of the runner's lease

	fetching []core.CheckpointID // by the runner, as its heartbeats say
}

// withStore lets the controller tidy up a store in a directory, and the runner restore from there.
func withStore(t testing.TB) (*dir.Store, option) {
	t.Helper()
	files, err := dir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := files.Close(); err != nil {
			t.Error(err)
		}
	})
	return files, func(c *controller.Config, r *runnertest.Config) { c.Store, r.Store = files, files }
}

// loopInterval is the interval of the loops that look for what a crash has left. These searches were three quarters of all statements of
// the tests at 50 ms. A test that waits for such a search sets a shorter interval.
const loopInterval = 500 * time.Millisecond

type option func(*controller.Config, *runnertest.Config)

func newWorld(t testing.TB, options ...option) *world {
	t.Helper()
	rc := runnertest.Config{}
	cfg := controller.Config{
		AllowAllEgress: true,
		ClusterID:      "test", LoopInterval: loopInterval, RunnerRetry: 2 * time.Second, ShutdownGrace: 2 * time.Second, AdmissionWait: 50 * time.Millisecond,
		Bootstrap: controller.Bootstrap{Key: "coppice-test-key"},
	}
	for _, o := range options {
		o(&cfg, &rc)
	}
	w := &world{t: t, dsn: testpg.New(t, migrations.Up), runner: runnertest.Start(t, rc)}
	w.store, w.client = openStore(t, w.dsn), runnerclient.New("runner-secret")
	t.Cleanup(w.client.Close)
	w.Controller, w.stop = w.start(cfg)
	project, err := w.Bootstrap(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	w.project = project.ID
	w.register()
	return w
}

// authority is that of the cluster of all these tests.
var authority = sync.OnceValues(func() (*mtls.Authority, error) { return mtls.NewAuthority("test") })

// inCluster makes a controller one of the cluster.
func inCluster(cfg controller.Config) controller.Config {
	ca, err := authority()
	if err != nil {
		panic(err)
	}
	cfg.ClusterID, cfg.Authority = "test", ca
	return cfg
}

func openStore(t testing.TB, dsn string) *postgres.Store {
	t.Helper()
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	return store
}

// start runs another controller over the same database.
func (w *world) start(cfg controller.Config) (*controller.Controller, func()) {
	w.t.Helper()
	return w.startOn(w.store, cfg)
}

func (w *world) startOn(store controller.Store, cfg controller.Config) (*controller.Controller, func()) {
	w.t.Helper()
	if cfg.RunnerLease == 0 {
		cfg.RunnerLease = time.Hour // nobody beats for the fake runner, however long a test takes
	}
	cfg = inCluster(cfg)
	c := controller.New(cfg, store, w.client, logger(w.t))
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	done := make(chan error, 1)
	go func() { done <- c.Run(ctx) }()
	ended := false
	stop := func() {
		if ended {
			return
		}
		ended = true
		cancel()
		if err := <-done; err != nil {
			w.t.Errorf("run: %v", err)
		}
	}
	w.t.Cleanup(stop)
	return c, stop
}

func (w *world) register() {
	w.t.Helper()
	got, err := w.runner.Announce(w.t.Context(), w.Fleet())
	if err != nil {
		w.t.Fatal(err)
	}
	w.epoch = got.LeaseEpoch
}

// beat sends a heartbeat with what the runner holds.
func (w *world) beat() runnerapi.Heartbeated {
	w.t.Helper()
	beat := w.runner.NextBeat(w.epoch)
	beat.Fetching = w.fetching
	out, err := w.Fleet().Heartbeat(w.t.Context(), w.runner.ID(), beat)
	if err != nil {
		w.t.Fatal(err)
	}
	w.runner.Obey(beat, out)
	return out
}

func (w *world) create(name string) controller.Workspace {
	w.t.Helper()
	a, err := w.CreateWorkspace(w.t.Context(), w.project, controller.CreateRequest{
		Name: name, Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1},
	}, wait)
	if err != nil {
		w.t.Fatalf("create %s: %v", name, err)
	}
	if !a.Done || a.Result.Workspace == nil {
		w.t.Fatalf("create %s: not done: %+v", name, a)
	}
	return *a.Result.Workspace
}

func (w *world) checkpoint(id core.WorkspaceID) controller.Checkpoint {
	w.t.Helper()
	a, err := w.CreateCheckpoint(w.t.Context(), w.project, id, controller.CheckpointRequest{}, wait)
	if err != nil {
		w.t.Fatalf("checkpoint of %s: %v", id, err)
	}
	return *a.Result.Checkpoint
}

func (w *world) fork(id core.CheckpointID, n int) []controller.Workspace {
	w.t.Helper()
	a, err := w.ForkCheckpoint(w.t.Context(), w.project, id, controller.ForkRequest{Count: n}, wait)
	if err != nil {
		w.t.Fatalf("fork of %s: %v", id, err)
	}
	list := make([]controller.Workspace, len(a.Result.Children))
	for i, child := range a.Result.Children {
		if child.Problem != nil {
			w.t.Fatalf("fork of %s: child %d: %v", id, i, child.Problem)
		}
		list[i] = *child.Workspace
	}
	return list
}

func (w *world) state(id core.WorkspaceID) core.WorkspaceState {
	w.t.Helper()
	ws, err := w.Workspace(w.t.Context(), w.project, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return ws.State
}

// eventually waits until check holds; the controller's loops run every 50 ms.
func eventually(t testing.TB, what string, check func() bool) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !check() {
		select {
		case <-ctx.Done():
			t.Fatalf("never happened: %s", what)
		case <-tick.C:
		}
	}
}

func wantCode(t *testing.T, err error, code core.Code) {
	t.Helper()
	if core.CodeOf(err) != code {
		t.Fatalf("got error %v (%s), want %s", err, core.CodeOf(err), code)
	}
}

func logger(t testing.TB) *slog.Logger {
	t.Helper()
	return slog.New(slog.NewTextHandler(quietAfter{t}, &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// quietAfter drops what is logged when the test has ended already.
type quietAfter struct{ t testing.TB }

func (q quietAfter) Write(b []byte) (int, error) {
	if errors.Is(q.t.Context().Err(), context.Canceled) {
		return len(b), nil
	}
	q.t.Log(strings.TrimSpace(string(b)))
	return len(b), nil
}
