package controlplane

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/pace"
	"github.com/coppice-dev/coppice/internal/pgcluster"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/internal/undo"
	"github.com/coppice-dev/coppice/migrations"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/fakenet"
	"github.com/coppice-dev/coppice/runner/heartbeat"
	runnerhttp "github.com/coppice-dev/coppice/runner/httpapi"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// endTime bounds the end of a server.
const endTime = 2 * time.Minute

// plane is a database server in which each measurement has its own database.
type plane struct {
	dir     string
	cluster *pgcluster.Cluster
	version string
	count   int
}

// openPlane starts the server in its own directory below out.
func openPlane(ctx context.Context, out, pgBin string, libraries ...string) (*plane, error) {
	out, err := filepath.Abs(out)
	if err != nil {
		return nil, err
	}
	if err := os.MkdirAll(out, 0o711); err != nil { //nolint:gosec // G301: the database's user must pass
		return nil, err
	}
	dir, err := os.MkdirTemp(out, "control-")
	if err != nil {
		return nil, err
	}
	p := &plane{dir: dir}
	if err := os.Chmod(dir, 0o711); err != nil { //nolint:gosec // G302: likewise
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	bin, err := pgcluster.Find(ctx, pgBin)
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	p.version = bin.Version
	p.cluster, err = pgcluster.Start(ctx, pgcluster.Config{
		Dir: filepath.Join(dir, "pg"), Binaries: bin, Durable: true, MaxConnections: 200,
		Settings: map[string]string{"shared_preload_libraries": strings.Join(libraries, ",")}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		return nil, errors.Join(err, os.RemoveAll(dir))
	}
	return p, nil
}

func (p *plane) close(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), endTime)
	defer cancel()
	return errors.Join(p.cluster.Remove(ctx), os.RemoveAll(p.dir))
}

// world is a controller with its own database and one runner, as a client sees it.
type world struct {
	station
	plane  *plane
	dsn    string
	client *coppice.Client
}

const (
	benchSecret      = "bench-secret"
	benchSecretToken = "coppice_" + benchSecret
)

// database makes an empty, migrated database and returns its address.
func (p *plane) database(ctx context.Context) (string, error) {
	p.count++
	name := "bench" + strconv.Itoa(p.count)
	if err := execSQL(ctx, p.cluster.DSN(pgcluster.Superuser), "CREATE DATABASE "+name); err != nil {
		return "", err
	}
	dsn := p.cluster.DSN(name)
	return dsn, migrations.Up(ctx, dsn)
}

// station is a controller with its two listeners.
type station struct {
	control *controller.Controller
	server  string // of the REST API
	inner   string // where runners report
	project core.ProjectID
}

// startController starts a controller on a database. It belongs to the cluster of all controllers with the same
// authority.
func startController(ctx context.Context, steps *undo.Stack, dsn string, cfg controller.Config) (station, error) {
	var s station
	store, err := postgres.Open(ctx, postgres.Config{DSN: dsn})
	if err != nil {
		return s, err
	}
	steps.Push("store", func(context.Context) error { store.Close(); return nil })
	runners := runnerclient.New(benchSecret)
	steps.Push("runner client", func(context.Context) error { runners.Close(); return nil })
	log := slog.New(slog.DiscardHandler)
	cfg.ClusterID, cfg.Bootstrap = "bench", controller.Bootstrap{Key: benchSecretToken}
	s.control = controller.New(cfg, store, runners, log)
	project, err := s.control.Bootstrap(ctx)
	if err != nil {
		return s, err
	}
	s.project = project.ID
	background(ctx, steps, "controller", s.control.Run)
	if s.server, err = serveHTTP(ctx, steps, httpapi.New(s.control, log)); err != nil {
		return s, err
	}
	internal, err := internalapi.New(s.control, benchSecret, log)
	if err != nil {
		return s, err
	}
	s.inner, err = serveHTTP(ctx, steps, internal)
	return s, err
}

// begin starts controllers over a database of their own, without runners.
func (p *plane) begin(ctx context.Context, steps *undo.Stack, n int, limits controller.Limits) (dsn string, list []station, err error) {
	if dsn, err = p.database(ctx); err != nil {
		return "", nil, err
	}
	authority, err := mtls.NewAuthority("bench")
	if err != nil {
		return "", nil, err
	}
	for range n {
		s, err := startController(ctx, steps, dsn, controller.Config{Authority: authority, Limits: limits})
		if err != nil {
			return "", nil, err
		}
		list = append(list, s)
	}
	return dsn, list, nil
}

// with measures with one controller and what the function makes for a runner.
func (p *plane) with(ctx context.Context, begin func(context.Context, *undo.Stack, *world) error, measure func(*world) error) (err error) {
	var steps undo.Stack
	defer func() { err = errors.Join(err, steps.Undo(ctx)) }()
	dsn, list, err := p.begin(ctx, &steps, 1, controller.Limits{})
	if err != nil {
		return err
	}
	w := &world{station: list[0], plane: p, dsn: dsn}
	if w.client, err = coppice.New(coppice.Config{Server: w.server, Token: benchSecretToken}); err != nil {
		return err
	}
	steps.Push("client", func(context.Context) error { w.client.Close(); return nil })
	if err := begin(ctx, &steps, w); err != nil {
		return err
	}
	if err := w.awaitRunner(ctx); err != nil {
		return err
	}
	return measure(w)
}

// seed makes a workspace and a checkpoint of it to fork from.
func seed(ctx context.Context, client *coppice.Client) (coppice.WorkspaceID, coppice.CheckpointID, error) {
	ws, err := client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
	if err != nil {
		return "", "", err
	}
	cp, err := client.CreateCheckpoint(ctx, ws.ID, coppice.CreateCheckpointRequest{})
	return ws.ID, cp.ID, err
}

// grown is a fork that was made.
type grown struct {
	client    *coppice.Client
	workspace coppice.WorkspaceID
	took      float64 // milliseconds, from the request to its answer
}

// fork grows one workspace from a checkpoint.
func fork(ctx context.Context, client *coppice.Client, id coppice.CheckpointID) (grown, error) {
	start := time.Now()
	got, err := client.ForkCheckpoint(ctx, id, coppice.ForkCheckpointRequest{Count: new(1)})
	took := report.Since(start)
	switch {
	case err != nil:
		return grown{}, fmt.Errorf("fork %s: %w", id, err)
	case len(got.Children) != 1 || got.Children[0].Problem != nil || got.Children[0].Workspace == nil:
		return grown{}, fmt.Errorf("fork %s answered %+v", id, got.Children)
	}
	return grown{client: client, workspace: got.Children[0].Workspace.ID, took: took}, nil
}

// end terminates it.
func (g grown) end(ctx context.Context) error {
	_, err := g.client.TerminateWorkspace(ctx, g.workspace)
	return err
}

// background runs a part in the background until the steps are undone.
func background(ctx context.Context, steps *undo.Stack, name string, run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(ctx))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	steps.Push(name, func(context.Context) error {
		cancel()
		return <-done
	})
}

// serveHTTP serves on a loopback port and returns its address.
func serveHTTP(ctx context.Context, steps *undo.Stack, h http.Handler) (string, error) {
	l, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	srv := &http.Server{Handler: h, ReadHeaderTimeout: time.Minute, ErrorLog: slog.NewLogLogger(slog.DiscardHandler, slog.LevelDebug)}
	done := make(chan error, 1)
	go func() { done <- srv.Serve(l) }()
	steps.Push("listener", func(context.Context) error {
		err := srv.Close()
		if served := <-done; !errors.Is(served, http.ErrServerClosed) {
			err = errors.Join(err, served)
		}
		return err
	})
	return "http://" + l.Addr().String(), nil
}

// fakeRunner does nothing and answers at once.
func fakeRunner(ctx context.Context, steps *undo.Stack, w *world) error {
	fake := runnertest.New(runnertest.Config{
		Secret: benchSecret, Capacity: runnerapi.Capacity{Sandboxes: 1 << 20, VCPUs: 1 << 21, MemoryMiB: 1 << 30},
	})
	if err := fake.Listen(); err != nil {
		return err
	}
	steps.Push("fake runner", func(context.Context) error { fake.Close(); return nil })
	background(ctx, steps, "heartbeats", func(ctx context.Context) error { fake.Run(ctx, w.inner, benchSecret); return nil })
	return nil
}

// realRunner is the whole runner, whose machines are fakes in this process.
func realRunner(sandboxes int) func(context.Context, *undo.Stack, *world) error {
	return func(ctx context.Context, steps *undo.Stack, w *world) error {
		dir := w.plane.dir
		runDir, err := os.MkdirTemp("", "bench") // dir may be too long for the path of a unix socket
		if err != nil {
			return err
		}
		steps.Push("run directory", func(context.Context) error { return os.RemoveAll(runDir) })
		imagesDir := filepath.Join(dir, "images")
		if err := os.MkdirAll(imagesDir, 0o700); err != nil {
			return err
		}
		store, _, err := testvm.NewFakeImage(ctx, imagesDir)
		if err != nil {
			return err
		}
		log := slog.New(slog.DiscardHandler)
		r, err := runner.New(ctx, runner.Config{
			ID: core.NewID[core.RunnerID](), ClusterID: "bench", DataDir: filepath.Join(dir, "runner"), RunDir: runDir,
			Driver: fakevmm.New(fakevmm.Config{}), Images: store, Network: fakenet.Network{}, Log: log, MaxSandboxes: sandboxes,
		})
		if err != nil {
			return err
		}
		h, err := runnerhttp.New(r, nil, benchSecret, log)
		if err != nil {
			return err
		}
		background(ctx, steps, "runner", r.Run)
		endpoint, err := serveHTTP(ctx, steps, h)
		if err != nil {
			return err
		}
		link, err := heartbeat.New(r, heartbeat.Config{Controllers: []string{w.inner}, Secret: benchSecret, Endpoint: endpoint, Log: log})
		if err != nil {
			return err
		}
		background(ctx, steps, "heartbeats", link.Run)
		return nil
	}
}

func (w *world) awaitRunner(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, endTime)
	defer cancel()
	for {
		err := w.control.Ready(ctx)
		if core.CodeOf(err) != core.CodeNoRunner {
			return err
		}
		if err := pace.Pause(ctx, 20*time.Millisecond); err != nil {
			return fmt.Errorf("the runner did not register: %w", err)
		}
	}
}

func execSQL(ctx context.Context, dsn, sql string, args ...any) error {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return err
	}
	_, err = conn.Exec(ctx, sql, args...)
	return errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
}
