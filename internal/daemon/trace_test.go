package daemon_test

import (
	"context"
	"log/slog"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	sdk "go.opentelemetry.io/otel/sdk/trace"
	"go.opentelemetry.io/otel/sdk/trace/tracetest"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/daemon"
	"github.com/coppice-dev/coppice/runner/fakenet"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestTraceOfAFork has controller and runner in this process and finds one trace of a fork, from the request to what the agent did.
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
	rc.Runner.Machines = &daemon.Machines{Driver: fakevmm.New(fakevmm.Config{}), Network: fakenet.Network{}, Images: store, RunDir: rc.RunDir}
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
	const request = "POST /v1/checkpoints/:checkpoint_id/fork"
	// Each below the one before; the last three beside one another.
	path := []string{request, "fork_checkpoint", "runner call", "runner POST", "child", "agent POST " + guestapi.PathReseal}
	want := []string{request + " > fork_checkpoint > admit"}
	for i := range path {
		want = append(want, strings.Join(path[:i+1], " > "))
	}
	for _, stage := range []string{"restore", "connect", "reseal", "release", "agent POST " + guestapi.PathRelease} {
		want = append(want, strings.Join(append(path[:5:5], stage), " > "))
	}
	for _, step := range []string{guestapi.StepEntropy, guestapi.StepGeneration} {
		want = append(want, strings.Join(append(path[:6:6], step), " > "))
	}
	var have []string
	missing := func() []string {
		have = paths(exporter.GetSpans())
		return slices.DeleteFunc(slices.Clone(want), func(p string) bool { return slices.Contains(have, p) })
	}
	defer func() {
		if t.Failed() {
			t.Logf("of the spans %q are missing; there are %q", missing(), have)
		}
	}()
	until(t, "one trace has all spans", func() (bool, error) { return len(missing()) == 0, nil })
}

// paths are the names of the spans, each after those that it is below.
func paths(spans tracetest.SpanStubs) []string {
	byID := make(map[string]tracetest.SpanStub, len(spans))
	for _, s := range spans {
		byID[s.SpanContext.TraceID().String()+s.SpanContext.SpanID().String()] = s
	}
	var out []string
	for _, s := range spans {
		path := s.Name
		for p, ok := byID[s.Parent.TraceID().String()+s.Parent.SpanID().String()]; ok; p, ok = byID[p.Parent.TraceID().String()+p.Parent.SpanID().String()] {
			path = p.Name + " > " + path
		}
		out = append(out, path)
	}
	return out
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
