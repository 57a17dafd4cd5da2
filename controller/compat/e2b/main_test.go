package e2b_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/e2b"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

const (
	firstKey     = "coppice-test-key-0123456789"
	runnerSecret = "runner-secret"
)

// world is the layer over a real REST API with a real database and a runner without machines.
type world struct {
	t       *testing.T
	url     string          // of the layer
	rest    *coppice.Client // with the first key
	api     string
	control *controller.Controller
	runner  *runnertest.Runner
}

func newWorld(t *testing.T) *world {
	t.Helper()
	runner := runnertest.Start(t, runnertest.Config{Secret: runnerSecret})
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: testpg.New(t, migrations.Up)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	client := runnerclient.New(runnerSecret)
	t.Cleanup(client.Close)
	log := slog.New(slog.NewTextHandler(testLog{t}, nil))
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
	control := controller.New(controller.Config{
		ClusterID: "test", Trust: &trust, RunnerLease: time.Hour, LoopInterval: 50 * time.Millisecond, AdmissionWait: 50 * time.Millisecond, ShutdownGrace: time.Second,
		Bootstrap: controller.Bootstrap{Key: firstKey}, AllowAllEgress: true, Limits: controller.Limits{Open: lots, FailureDelay: 1, Key: rates, Project: rates},
	}, store, client, log)
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- control.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run: %v", err)
		}
	})
	if _, err := control.Bootstrap(t.Context()); err != nil {
		t.Fatal(err)
	}
	api := httpapi.New(control, log)
	layer, err := e2b.New(e2b.Config{
		API: api, Secret: []byte(strings.Repeat("s", 32)), Domain: "sandbox.example", LocalPorts: true, Log: log,
		ActFor: func(ctx context.Context, key string) context.Context { return httpapi.ActFor(ctx, core.KeyID(key)) },
		HoldKey: func(ctx context.Context, key string) (context.Context, context.CancelFunc, error) {
			return httpapi.HoldKey(ctx, control, core.KeyID(key))
		},
		ConfirmPort: func(ctx context.Context, key, ws, port string) (string, error) {
			return httpapi.ConfirmPort(ctx, control, core.KeyID(key), core.WorkspaceID(ws), core.PortID(port))
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	w := &world{t: t, url: serve(t, layer), api: serve(t, api), control: control, runner: runner}
	internal, err := internalapi.New(control, runnerSecret, log)
	if err != nil {
		t.Fatal(err)
	}
	if err := runner.Register(t.Context(), serve(t, internal), runnerSecret); err != nil {
		t.Fatal(err)
	}
	w.rest = w.client(firstKey)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return w
}

func serve(t *testing.T, h http.Handler) string {
	t.Helper()
	s := httptest.NewServer(h)
	t.Cleanup(s.Close)
	return s.URL
}

func (w *world) client(key string) *coppice.Client {
	w.t.Helper()
	c, err := coppice.New(coppice.Config{Server: w.api, Token: key})
	if err != nil {
		w.t.Fatal(err)
	}
	w.t.Cleanup(c.Close)
	return c
}

type testLog struct{ t *testing.T }

func (l testLog) Write(b []byte) (int, error) {
	if l.t.Context().Err() == nil {
		l.t.Log(strings.TrimSpace(string(b)))
	}
	return len(b), nil
}

// ask is a request to the layer.
type ask struct {
	method, path, body string
	key                string // X-API-KEY; empty: the first key, "-": none
	header             map[string]string
	host               string
}

type reply struct {
	status int
	header http.Header
	body   string
}

func (w *world) do(a ask) reply {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), a.method, w.url+a.path, strings.NewReader(a.body))
	if err != nil {
		w.t.Fatal(err)
	}
	switch a.key {
	case "":
		req.Header.Set("X-API-KEY", firstKey)
	case "-":
	default:
		req.Header.Set("X-API-KEY", a.key)
	}
	if a.host != "" {
		req.Host = a.host
	}
	for k, v := range a.header {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		w.t.Fatal(err)
	}
	return reply{resp.StatusCode, resp.Header, string(b)}
}

// want checks a status and decodes the answer.
func (r reply) want(t *testing.T, status int, into any) {
	t.Helper()
	if r.status != status {
		t.Fatalf("status %d, want %d: %s", r.status, status, r.body)
	}
	if into == nil {
		return
	}
	if err := json.Unmarshal([]byte(r.body), into); err != nil {
		t.Fatalf("%v: %s", err, r.body)
	}
}

type sandbox struct {
	SandboxID, EnvdAccessToken, TrafficAccessToken, TemplateID, EnvdVersion, ClientID, Domain string
}

func (w *world) create(key, body string) sandbox {
	w.t.Helper()
	var s sandbox
	w.do(ask{method: "POST", path: "/v2/sandboxes", key: key, body: body}).want(w.t, http.StatusCreated, &s)
	return s
}

// envd is a request to the daemon of a sandbox with its token.
func (w *world) envd(s sandbox, a ask) reply {
	w.t.Helper()
	header := map[string]string{"E2b-Sandbox-Id": s.SandboxID, "E2b-Sandbox-Port": "49983", "X-Access-Token": s.EnvdAccessToken}
	maps.Copy(header, a.header)
	a.header, a.key = header, "-"
	return w.do(a)
}
