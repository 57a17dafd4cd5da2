package daemon_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestTraceOfAFork has controller and runner in this process and finds one trace of a fork, from the request to the release.
func TestTraceOfAFork(t *testing.T) {
	t.Parallel()
	c := newCluster(t) // for the database and a first runner token
	exporter := tracetest.NewInMemoryExporter()
	provider := sdk.NewTracerProvider(sdk.WithSyncer(exporter))
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 2)
	controllers, runners := make(chan daemon.ControllerReady, 1), make(chan daemon.RunnerReady, 1)
	begin := func(run func() error) {
		go func() { ended <- run() }()
	}
	log := slog.New(slog.DiscardHandler)
	cfg := c.cfg
	cfg.Listen, cfg.RunnerListen, cfg.Metrics, cfg.Log, cfg.Tune.Traces = "127.0.0.1:0", "127.0.0.1:0", "", log, provider
	begin(func() error {
		return daemon.RunController(ctx, cfg, func(r daemon.ControllerReady) error { controllers <- r; return nil })
	})
	t.Cleanup(func() {
		stop()
		for range 2 {
			if err := <-ended; err != nil {
				t.Error(err)
			}
		}
	})
	rc := c.runnerConfig()
	rc.Runner.JoinToken, rc.Runner.Log, rc.Runner.Traces = c.token(""), log, provider
	here := wait(t, controllers)
	rc.Runner.Controllers = []string{here.Runners}
	store, err := imageStore(t.Context(), filepath.Join(rc.Runner.DataDir, "images"))
	if err != nil {
		t.Fatal(err)
	}
	rc.Runner.Machines = &daemon.Machines{Driver: fakevmm.New(fakevmm.Config{}), Network: noNetwork{}, Images: store, RunDir: rc.RunDir}
	begin(func() error {
		return daemon.RunRunner(ctx, rc.Runner, func(r daemon.RunnerReady) error { runners <- r; return nil })
	})
	wait(t, runners)
	client := c.connect(here.Server)
	ws, err := client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{Resources: coppice.ResourcesRequest{MemoryMiB: new(128)}})
	if err != nil {
		t.Fatal(err)
	}
	cp, err := client.CreateCheckpoint(t.Context(), ws.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	exporter.Reset()
	if _, err := client.ForkCheckpoint(t.Context(), cp.ID, coppice.ForkCheckpointRequest{Count: new(1)}); err != nil {
		t.Fatal(err)
	}
	want := []string{"POST /v1/checkpoints/:checkpoint_id/fork", "fork_checkpoint", "admit", "runner call", "runner POST", "child", "restore", "connect", "reseal", "release"}
	until(t, "one trace has all spans", func() (bool, error) {
		byTrace := map[string][]string{}
		for _, s := range exporter.GetSpans() {
			id := s.SpanContext.TraceID().String()
			byTrace[id] = append(byTrace[id], s.Name)
		}
		for _, names := range byTrace {
			if !slices.ContainsFunc(want, func(name string) bool { return !slices.Contains(names, name) }) {
				return true, nil
			}
		}
		return false, nil
	})
}

func wait[T any](t *testing.T, ready <-chan T) T {
	t.Helper()
	select {
	case r := <-ready:
		return r
	case <-time.After(watchdog):
		t.Fatal("it did not become ready")
		panic("not reached")
	}
}
