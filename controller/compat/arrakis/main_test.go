package arrakis_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/arrakis"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
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
	url     string          // of the layer, which uses the first key for requests without one
	keyed   string          // of the same layer, which uses none
	rest    *coppice.Client // with the first key
	api     string
	handler http.Handler // the REST API
	inner   string       // of the API for runners
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
	w := &world{t: t, handler: httpapi.New(control, log), runner: runner}
	w.api = serve(t, w.handler)
	w.url = w.layer(arrakis.Config{Key: firstKey, Ports: []arrakis.Port{{Guest: 5901, Description: "gui"}}})
	w.keyed = w.layer(arrakis.Config{})
	internal, err := internalapi.New(control, runnerSecret, log)
	if err != nil {
		t.Fatal(err)
	}
	w.inner = serve(t, internal)
	if err := runner.Register(t.Context(), w.inner, runnerSecret); err != nil {
		t.Fatal(err)
	}
	w.rest = w.client(firstKey)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	return w
}

// lose ends the machine of a workspace.
func (w *world) lose(id coppice.WorkspaceID) {
	w.t.Helper()
	for _, s := range w.runner.Sandboxes() {
		if string(s.WorkspaceID) == id {
			w.runner.Crash(s.ID, "signal 9")
		}
	}
	if _, err := w.runner.Beat(w.t.Context(), w.inner, runnerSecret); err != nil {
		w.t.Fatal(err)
	}
}

// layer serves the layer and returns its URL.
func (w *world) layer(cfg arrakis.Config) string {
	w.t.Helper()
	cfg.API, cfg.Log = w.handler, slog.New(slog.NewTextHandler(testLog{w.t}, nil))
	h, err := arrakis.New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return serve(w.t, h)
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

// tenant makes a project with a key of its own.
func (w *world) tenant(name string) (key string) {
	w.t.Helper()
	p, err := w.rest.CreateProject(w.t.Context(), coppice.CreateProjectRequest{Name: name})
	if err != nil {
		w.t.Fatal(err)
	}
	k, err := w.rest.CreateKey(w.t.Context(), p.ID, coppice.CreateKeyRequest{Name: name})
	if err != nil {
		w.t.Fatal(err)
	}
	return k.Secret
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
	at                 string // the URL of the layer; empty: the one that needs no key
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
	if a.at == "" {
		a.at = w.url
	}
	req, err := http.NewRequestWithContext(w.t.Context(), a.method, a.at+a.path, strings.NewReader(a.body))
	if err != nil {
		w.t.Fatal(err)
	}
	if a.body != "" {
		req.Header.Set("Content-Type", "application/json")
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

// want checks a status and decodes the answer. Each answer is JSON, and each error has Arrakis' form.
func (r reply) want(t *testing.T, status int, into any) reply {
	t.Helper()
	if r.status != status {
		t.Fatalf("status %d, want %d: %s", r.status, status, r.body)
	}
	if kind := r.header.Get("Content-Type"); kind != "application/json" {
		t.Errorf("the answer is %q", kind)
	}
	if status >= http.StatusBadRequest && r.message() == "" {
		t.Errorf("the error has no message: %s", r.body)
	}
	if into != nil {
		if err := json.Unmarshal([]byte(r.body), into); err != nil {
			t.Fatalf("%v: %s", err, r.body)
		}
	}
	return r
}

func (r reply) message() string {
	var e struct{ Error struct{ Message string } }
	_ = json.Unmarshal([]byte(r.body), &e)
	return e.Error.Message
}

type machine struct {
	VMName, Status, IP, WorkspaceID string
	PortForwards                    []struct{ HostPort, GuestPort, Description, HostAddress string }
}

// start makes a VM; a snapshot may be empty.
func (w *world) start(name, snapshot string) (vm machine) {
	w.t.Helper()
	body, _ := json.Marshal(map[string]string{"vmName": name, "snapshotId": snapshot})
	w.do(ask{method: "POST", path: "/v1/vms", body: string(body)}).want(w.t, http.StatusOK, &vm)
	return vm
}

func (w *world) info(name string) (vm machine) {
	w.t.Helper()
	w.do(ask{method: "GET", path: "/v1/vms/" + name}).want(w.t, http.StatusOK, &vm)
	return vm
}

func (w *world) snapshot(name, id string) {
	w.t.Helper()
	w.do(ask{method: "POST", path: "/vms/" + name + "/snapshots", body: `{"snapshotId":"` + id + `"}`}).want(w.t, http.StatusOK, nil)
}

func (w *world) patch(name, status string) reply {
	w.t.Helper()
	return w.do(ask{method: "PATCH", path: "/vms/" + name, body: `{"status":"` + status + `"}`})
}

func (w *world) write(name, content string) {
	w.t.Helper()
	body, _ := json.Marshal(map[string]any{"files": []map[string]string{{"path": "f", "content": content}}})
	w.do(ask{method: "POST", path: "/vms/" + name + "/files", body: string(body)}).want(w.t, http.StatusOK, nil)
}

func (w *world) read(name string) string {
	w.t.Helper()
	var got struct {
		Files []struct{ Content, Error string }
	}
	w.do(ask{method: "GET", path: "/vms/" + name + "/files?paths=f"}).want(w.t, http.StatusOK, &got)
	if len(got.Files) != 1 || got.Files[0].Error != "" {
		w.t.Fatalf("%+v", got)
	}
	return got.Files[0].Content
}
