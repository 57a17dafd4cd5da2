package explore

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/mtls"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/migrations"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/heartbeat"
	runnerhttp "github.com/coppice-dev/coppice/runner/httpapi"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

// patience is how long the explorer waits for what must happen. Nothing that it asserts depends on it.
const patience = 2 * time.Minute

// leaseTime is that of operations and runners: none ends by itself, only when a schedule says so.
const leaseTime = 10 * time.Hour

const (
	secret   = "explorer-secret"
	adminKey = "explorer-admin-key"
)

// world is two controllers, a runner, and what they share. The loops of the first controller do nothing by themselves: it does only what
// it was asked for. Those of the second one do.
type world struct {
	t       testing.TB
	dsn     string
	db      *pgxpool.Pool // the explorer's own way to the rows, past all policies
	first   *controller.Controller
	second  *controller.Controller
	sides   [2]*side
	calls   mail // of the controllers to the runner
	reports mail // of the runner to the controllers
	runner  *runner.Runner
	driver  *fakevmm.Driver
	admin   controller.Key
	project core.ProjectID // of the schedule that is played
	log     *transcript
	files   *dir.Store
	ends    []func() // in reverse order

	granting bool
	egress   *egress.Client // of the egress process; nil: there is none
	spaces   atomic.Int64   // namespaces that there are

	seal    func()      // has the runner begin to seal
	unseal  func()      // has it end; nil: it has not begun
	sealing atomic.Bool // it has
	// asksSeals says that seals are what the explorer asks for.
	asksSeals atomic.Bool
	hearing   sync.RWMutex // held for reading while a report of the runner is answered
	owner     string       // of the leases of the first controller
	silent    atomic.Bool  // nobody hears the runner
	disarm    func()       // takes back the fault of a machine, if it has not happened; nil: there was none
	played    []string     // the numbers of the schedules that were played in it
}

var authority = sync.OnceValues(func() (*mtls.Authority, error) { return mtls.NewAuthority("test") })

// newWorld starts everything and waits until the runner is registered. end ends it. granting has an egress process, which takes grants.
func newWorld(t testing.TB, granting bool) (*world, error) {
	t.Helper()
	w := &world{t: t, granting: granting, log: &transcript{began: time.Now()}, sides: [2]*side{{}, {}}}
	w.dsn = testpg.New(t, migrations.Up)
	w.log.note("there is a database")
	if err := w.planOnce(); err != nil {
		return w, err
	}
	pool, err := pgxpool.ParseConfig(w.dsn)
	if err != nil {
		return w, err
	}
	pool.MaxConns = 2
	if w.db, err = pgxpool.NewWithConfig(t.Context(), pool); err != nil {
		return w, err
	}
	w.after(w.db.Close)
	if w.files, err = dir.Open(t.TempDir()); err != nil {
		return w, err
	}
	w.after(func() { _ = w.files.Close() })
	var listeners []string
	for i, loop := range []time.Duration{leaseTime, 100 * time.Millisecond} {
		c, address, err := w.control(w.sides[i], loop)
		if err != nil {
			return w, err
		}
		w.goRun("a controller", c.Run)
		if listeners = append(listeners, address); i == 0 {
			w.first = c
		} else {
			w.second = c
		}
	}
	w.log.note("controllers run")
	if _, err := w.first.Bootstrap(t.Context()); err != nil {
		return w, err
	}
	if w.admin, err = w.first.Tenancy.Authenticate(t.Context(), adminKey); err != nil {
		return w, err
	}
	return w, w.host(listeners)
}

// planOnce makes PostgreSQL plan each statement once per connection. Each world has new connections, and would otherwise plan it five times on each.
func (w *world) planOnce() error {
	u, err := url.Parse(w.dsn)
	if err != nil {
		return err
	}
	q := u.Query()
	q.Set("plan_cache_mode", "force_generic_plan")
	u.RawQuery = q.Encode()
	w.dsn = u.String()
	return nil
}

func (w *world) after(f func()) { w.ends = append(w.ends, f) }

// end ends everything.
func (w *world) end() {
	for _, s := range w.sides {
		s.goOn()
	}
	w.calls.release()
	w.reports.release()
	for _, end := range slices.Backward(w.ends) {
		end()
	}
	w.ends = nil
}

// goRun runs a part of the world until its end.
func (w *world) goRun(name string, run func(context.Context) error) { w.after(w.begin(name, run)) }

// begin runs a part of the world until end is called, which may be more than once.
func (w *world) begin(name string, run func(context.Context) error) (end func()) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.t.Context()))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	return sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.log.fail("%s ended with %v", name, err)
		}
	})
}

// control makes a controller with a database connection, a way to the runner and a listener of its own.
func (w *world) control(s *side, loop time.Duration) (*controller.Controller, string, error) {
	ca, err := authority()
	if err != nil {
		return nil, "", err
	}
	rows, err := postgres.Open(w.t.Context(), postgres.Config{DSN: w.dsn})
	if err != nil {
		return nil, "", err
	}
	w.after(rows.Close)
	client := runnerclient.New(secret)
	w.after(client.Close)
	cfg := controller.Config{
		ClusterID: "test", Authority: ca, Clock: s.clock, LoopInterval: loop, OperationLease: leaseTime, RunnerLease: leaseTime, RunnerFence: time.Minute,
		RunnerRetry: 2 * time.Second, ShutdownGrace: 10 * time.Second, AdmissionWait: -1, CaptureWait: 20 * time.Millisecond, Store: w.files, StoreGrace: leaseTime, Wrapper: vault{},
		Bootstrap: controller.Bootstrap{Project: "first", Key: adminKey},
	}
	c := controller.New(cfg, store{rows, s}, runners{client, s}, w.log.logger())
	inner, err := internalapi.New(c, secret, w.log.logger())
	if err != nil {
		return nil, "", err
	}
	server := httptest.NewServer(w.reports.carrier(s.listener(inner, &w.silent, &w.asksSeals, &w.hearing), func(*http.Request) bool { return true }))
	w.after(func() {
		server.CloseClientConnections()
		server.Close()
	})
	return c, server.URL, nil
}

// host starts the runner.
func (w *world) host(controllers []string) error {
	images, _ := testvm.FakeImage(w.t)
	runDir, err := os.MkdirTemp("", "run") // t.TempDir is too long for the path of a unix socket
	if err != nil {
		return err
	}
	w.after(func() { _ = os.RemoveAll(runDir) })
	w.driver = fakevmm.New(fakevmm.Config{})
	var process *egress.Process
	if w.granting {
		if process, err = w.carrier(); err != nil {
			return err
		}
	}
	w.runner, err = runner.New(w.t.Context(), runner.Config{
		ID: core.NewID[core.RunnerID](), ClusterID: "test", DataDir: filepath.Join(w.t.TempDir(), "data"), RunDir: runDir, Driver: w.driver, Images: images,
		Network: network{&w.spaces}, Egress: process, Log: w.log.logger(), Parallel: 4, Store: runner.StoreConfig{Blobs: w.files},
	})
	if err != nil {
		return err
	}
	w.goRun("the runner", w.runner.Run)
	handler, err := runnerhttp.New(w.runner, nil, secret, w.log.logger())
	if err != nil {
		return err
	}
	server := httptest.NewServer(w.calls.carrier(handler, func(r *http.Request) bool { return r.Method != http.MethodGet }))
	w.after(func() {
		server.CloseClientConnections()
		server.Close()
	})
	link, err := heartbeat.New(w.runner, heartbeat.Config{Controllers: controllers, Secret: secret, Endpoint: server.URL, Log: w.log.logger()})
	if err != nil {
		return err
	}
	w.goRun("the link of the runner", link.Run)
	w.seal = func() {
		w.unseal = w.begin("the seals of the runner", func(ctx context.Context) error { return w.runner.Seal(ctx, link, link.Epoch) })
		w.after(w.unseal)
	}
	select {
	case <-link.Registered():
		return nil
	case <-time.After(patience):
		return errors.New("the runner does not register")
	}
}

// number asks the database for a number.
func (w *world) number(query string, args ...any) int {
	var n int
	if err := w.db.QueryRow(w.t.Context(), query, args...).Scan(&n); err != nil {
		w.log.fail("%s: %v", query, err)
	}
	return n
}

func (w *world) sql(statement string, args ...any) {
	if _, err := w.db.Exec(w.t.Context(), statement, args...); err != nil {
		w.log.fail("%s: %v", statement, err)
	}
}

// eventually waits for what must happen.
func (w *world) eventually(what string, ok func() bool) bool {
	if w.within(patience, ok) {
		return true
	}
	w.log.fail("it never happened that %s", what)
	return false
}

// within waits for what may happen.
func (w *world) within(limit time.Duration, ok func() bool) bool {
	end := time.NewTimer(limit)
	defer end.Stop()
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-end.C:
			return false
		}
	}
	return true
}

// transcript is what happened in a world, to be shown when a schedule fails.
type transcript struct {
	mu     sync.Mutex // guards what follows
	began  time.Time
	lines  []string
	faults []string
}

const maxLines = 4000

// take returns what happened, and begins anew.
func (l *transcript) take() (lines, faults []string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	lines, faults = l.lines, l.faults
	l.began, l.lines, l.faults = time.Now(), nil, nil
	return lines, faults
}

// broken reports whether there is a fault.
func (l *transcript) broken() bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.faults) > 0
}

// Write implements io.Writer, for the logs of all parts.
func (l *transcript) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.lines) < maxLines {
		l.lines = append(l.lines, string(b[:len(b)-1]))
	}
	return len(b), nil
}

func (l *transcript) logger() *slog.Logger {
	return slog.New(core.LogHandler(slog.NewTextHandler(l, &slog.HandlerOptions{Level: slog.LevelDebug})))
}

func (l *transcript) note(format string, args ...any) {
	l.mu.Lock()
	began := l.began
	l.mu.Unlock()
	_, _ = fmt.Fprintf(l, "EXPLORER %s "+format+"\n", append([]any{time.Since(began).Round(time.Millisecond)}, args...)...)
}

func (l *transcript) fail(format string, args ...any) {
	l.note("FAULT "+format, args...)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.faults = append(l.faults, fmt.Sprintf(format, args...))
}
