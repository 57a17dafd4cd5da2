package httpapi_test

import (
	"bytes"
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/getkin/kin-openapi/openapi3filter"
	"github.com/getkin/kin-openapi/routers"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/api/apitest"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/controller/secrets"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	"github.com/coppice-dev/coppice/migrations"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

func TestMain(m *testing.M) {
	if dsn := os.Getenv(killDSN); dsn != "" {
		serveUntilKilled(dsn) // this is the controller of TestKilledController
	}
	testleak.Main(m, testpg.Leak())
}

// watchdog ends what would hang; nothing that is tested depends on it.
const watchdog = 3 * time.Minute

const (
	apiKey       = "coppice-test-key-0123456789"
	runnerSecret = "runner-secret"
	runnerLease  = time.Hour // nobody beats for the fake runner, however long a test takes
)

// world is a served API with a real database and a fake runner that is registered over HTTP.
type world struct {
	t        *testing.T
	dsn      string
	url      string
	inner    string // the listener for runners
	runner   *runnertest.Runner
	router   routers.Router
	blobs    *dir.Store // where checkpoints are sealed
	storeDir string     // of them

	control *controller.Controller
}

// outside is where secrets are that are not kept in the database.
var outside = secrets.Mux{"env": secrets.Env{Lookup: func(name string) (string, bool) {
	value, there := map[string]string{"COPPICE_SECRET_A": "a secret from outside", "COPPICE_SECRET_B": "another secret from outside"}[name]
	return value, there
}}}

// lots is a rate that no test reaches.
var (
	lots    = controller.Rate{PerSecond: 1e6, Burst: 1e6}
	noRates = map[controller.RateClass]controller.Rate{controller.RateRead: lots, controller.RateWrite: lots, controller.RateExec: lots, controller.RateAdmin: lots}
)

func newWorld(t *testing.T) *world {
	t.Helper()
	return newWorldWith(t, testLog{t}, nil)
}

// newWorldWith makes a world whose log goes to a writer, at every level, and whose metrics go to a registry.
func newWorldWith(t *testing.T, logs io.Writer, metrics prometheus.Registerer) *world {
	t.Helper()
	w := &world{t: t, dsn: testpg.New(t, migrations.Up), storeDir: t.TempDir(), runner: runnertest.Start(t, runnertest.Config{Secret: runnerSecret})}
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: w.dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	client := runnerclient.New(runnerSecret)
	t.Cleanup(client.Close)
	log := slog.New(slog.NewTextHandler(logs, &slog.HandlerOptions{Level: slog.LevelDebug}))
	key, err := masterkey.New(make([]byte, 32))
	if err != nil {
		t.Fatal(err)
	}
	trust, err := controller.OpenTrust(t.Context(), store, key, nil)
	if err != nil {
		t.Fatal(err)
	}
	if w.blobs, err = dir.Open(w.storeDir); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := w.blobs.Close(); err != nil {
			t.Error(err)
		}
	})
	master := filepath.Join(t.TempDir(), "master.key")
	if _, err := masterkey.Create(master); err != nil {
		t.Fatal(err)
	}
	wrapper, err := masterkey.OpenRing(master)
	if err != nil {
		t.Fatal(err)
	}
	control := controller.New(controller.Config{
		Metrics: metrics, Wrapper: wrapper, Secrets: outside, Store: w.blobs, ClusterID: "test", Trust: &trust, RunnerLease: runnerLease, LoopInterval: 500 * time.Millisecond, RunnerRetry: time.Second, AdmissionWait: 50 * time.Millisecond, ShutdownGrace: time.Second, Bootstrap: controller.Bootstrap{Key: apiKey},
		// Of one address with hundreds of wrong keys, and of keys that try every route in every way.
		Limits: controller.Limits{Open: lots, FailureDelay: 1, Key: noRates, Project: noRates},
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
	public := httptest.NewServer(httpapi.New(control, log))
	t.Cleanup(public.Close)
	handler, err := internalapi.New(control, runnerSecret, log)
	if err != nil {
		t.Fatal(err)
	}
	internal := httptest.NewServer(handler)
	t.Cleanup(internal.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	w.url, w.inner, w.control = public.URL, internal.URL, control
	if err := w.runner.Register(t.Context(), w.inner, runnerSecret); err != nil {
		t.Fatal(err)
	}
	w.router = loadRouter(t)
	return w
}

type testLog struct{ t *testing.T }

func (l testLog) Write(b []byte) (int, error) {
	if l.t.Context().Err() == nil {
		l.t.Log(strings.TrimSpace(string(b)))
	}
	return len(b), nil
}

func loadRouter(t *testing.T) routers.Router {
	t.Helper()
	router, err := apitest.Router()
	if err != nil {
		t.Fatal(err)
	}
	return router
}

type call struct {
	method, path, body string
	header             map[string]string
	key                string // "" is the right one, "-" none
}

type reply struct {
	status int
	header http.Header
	body   []byte
}

// do sends a request and checks the answer against the contract.
func (w *world) do(c call) reply {
	w.t.Helper()
	req, err := http.NewRequestWithContext(w.t.Context(), c.method, w.url+c.path, strings.NewReader(c.body))
	if err != nil {
		w.t.Fatal(err)
	}
	if c.body != "" {
		req.Header.Set("Content-Type", "application/json")
	}
	switch c.key {
	case "":
		req.Header.Set("Authorization", "Bearer "+apiKey)
	case "-":
	default:
		req.Header.Set("Authorization", "Bearer "+c.key)
	}
	for k, v := range c.header {
		req.Header.Set(k, v)
		if v == "" {
			req.Header.Del(k)
		}
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		w.t.Fatalf("%s %s: %v", c.method, c.path, err)
	}
	defer res.Body.Close()
	body, err := io.ReadAll(res.Body)
	if err != nil {
		w.t.Fatalf("%s %s: %v", c.method, c.path, err)
	}
	if res.Header.Get("X-Request-Id") == "" {
		w.t.Errorf("%s %s: no request id", c.method, c.path)
	}
	w.validate(req, res, body)
	return reply{res.StatusCode, res.Header, body}
}

// validate compares an answer with what the contract says of it. Unknown routes have no contract.
func (w *world) validate(req *http.Request, res *http.Response, body []byte) {
	w.t.Helper()
	route, params, err := w.router.FindRoute(req)
	if err != nil {
		return
	}
	input := &openapi3filter.ResponseValidationInput{
		RequestValidationInput: &openapi3filter.RequestValidationInput{Request: req, PathParams: params, Route: route},
		Status:                 res.StatusCode, Header: res.Header, Options: &openapi3filter.Options{IncludeResponseStatus: true},
	}
	input.SetBodyBytes(body)
	if content := res.Header.Get("Content-Type"); !strings.HasPrefix(content, "application/json") && !strings.HasPrefix(content, "application/problem+json") {
		input.Options.ExcludeResponseBody = true
	}
	if err := openapi3filter.ValidateResponse(context.WithoutCancel(req.Context()), input); err != nil {
		w.t.Errorf("%s %s: the answer breaks the contract: %v\n%s", req.Method, req.URL.Path, err, body)
	}
}

// want sends a request whose status must be as said, and decodes its body.
func (w *world) want(status int, method, path string, in, out any) reply {
	w.t.Helper()
	c := call{method: method, path: path}
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			w.t.Fatal(err)
		}
		c.body = string(b)
	}
	got := w.do(c)
	if got.status != status {
		w.t.Fatalf("%s %s: status %d, want %d: %s", method, path, got.status, status, got.body)
	}
	if out != nil {
		reflect.ValueOf(out).Elem().SetZero() // what is absent must not be left from the answer before
		if err := json.NewDecoder(bytes.NewReader(got.body)).Decode(out); err != nil {
			w.t.Fatalf("%s %s: %v: %s", method, path, err, got.body)
		}
	}
	return got
}

func (r reply) problem(t *testing.T) api.Problem {
	t.Helper()
	var p api.Problem
	if err := json.Unmarshal(r.body, &p); err != nil || r.header.Get("Content-Type") != "application/problem+json" {
		t.Fatalf("not a problem: %d %s %s", r.status, r.header.Get("Content-Type"), r.body)
	}
	if p.Status != r.status || p.RequestID != r.header.Get("X-Request-Id") || p.Detail == "" || !strings.HasSuffix(p.Type, p.Code) {
		t.Errorf("problem: %+v", p)
	}
	return p
}

func (w *world) create(name string) api.Workspace {
	w.t.Helper()
	var ws api.Workspace
	w.want(201, "POST", "/v1/workspaces", map[string]any{"name": name}, &ws)
	return ws
}

func (w *world) checkpoint(ws string) api.Checkpoint {
	w.t.Helper()
	var cp api.Checkpoint
	w.want(201, "POST", "/v1/workspaces/"+ws+"/checkpoints", map[string]any{}, &cp)
	return cp
}
