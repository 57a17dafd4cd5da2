// Package controllertest starts a controller with a real database and a simulated runner, for tests of packages that are clients of
// its REST API, or stand in front of it. All of it ends with the test.
package controllertest

import (
	"context"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// The secrets of a cell.
const (
	Key          = "coppice-test-key-0123456789" // the key of the server's start, for its first project
	RunnerSecret = "runner-secret"
)

// Cell is a controller with its database and its runner.
type Cell struct {
	Control *controller.Controller
	Runner  *runnertest.Runner
	API     http.Handler    // the REST API
	URL     string          // of API
	Inner   string          // the URL of the API for runners
	REST    *coppice.Client // with Key
}

// Start starts a cell whose rate limits nobody reaches. configure changes the controller's configuration.
func Start(t *testing.T, configure func(*controller.Config)) *Cell {
	t.Helper()
	s := &Cell{Runner: runnertest.Start(t, runnertest.Config{Secret: RunnerSecret})}
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: testpg.New(t, migrations.Up)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	runners := runnerclient.New(RunnerSecret)
	t.Cleanup(runners.Close)
	key, err := masterkey.New(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	trust, err := controller.OpenTrust(t.Context(), store, key, nil)
	if err != nil {
		t.Fatal(err)
	}
	lots := controller.Rate{PerSecond: 1e6, Burst: 1e6}
	rates := map[controller.RateClass]controller.Rate{controller.RateRead: lots, controller.RateWrite: lots, controller.RateExec: lots, controller.RateAdmin: lots}
	cfg := controller.Config{
		ClusterID: "test", Trust: &trust, RunnerLease: time.Hour, LoopInterval: 500 * time.Millisecond, AdmissionWait: 50 * time.Millisecond, ShutdownGrace: time.Second,
		Bootstrap: controller.Bootstrap{Key: Key}, Limits: controller.Limits{Open: lots, FailureDelay: 1, Key: rates, Project: rates},
	}
	if configure != nil {
		configure(&cfg)
	}
	log := Log(t)
	s.Control = controller.New(cfg, store, runners, log)
	Run(t, s.Control.Run)
	if _, err := s.Control.Bootstrap(t.Context()); err != nil {
		t.Fatal(err)
	}
	internal, err := internalapi.New(s.Control, RunnerSecret, log)
	if err != nil {
		t.Fatal(err)
	}
	s.API = httpapi.New(s.Control, log)
	s.URL, s.Inner = Serve(t, s.API), Serve(t, internal)
	if err := s.Runner.Register(t.Context(), s.Inner, RunnerSecret); err != nil {
		t.Fatal(err)
	}
	s.REST = s.Client(t, Key)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return s
}

// Client is a client of the REST API with a key.
func (s *Cell) Client(t *testing.T, key string) *coppice.Client {
	t.Helper()
	c, err := coppice.New(coppice.Config{Server: s.URL, Token: key})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	return c
}

// Serve serves a handler and returns its URL.
func Serve(t *testing.T, h http.Handler) string {
	t.Helper()
	server := httptest.NewServer(h)
	t.Cleanup(server.Close)
	return server.URL
}

// Run runs something until the test ends. An error of it fails the test.
func Run(t *testing.T, run func(context.Context) error) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
}

// Log is a log that is shown if the test fails.
func Log(t *testing.T) *slog.Logger {
	t.Helper()
	return slog.New(slog.NewTextHandler(lines{t}, nil))
}

type lines struct{ t *testing.T }

func (l lines) Write(b []byte) (int, error) {
	if l.t.Context().Err() == nil {
		l.t.Log(strings.TrimSpace(string(b)))
	}
	return len(b), nil
}
