package httpapi_test

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestDeadDatabase serves without one: everything says so by name, and health does not depend on it.
func TestDeadDatabase(t *testing.T) {
	t.Parallel()
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: "postgres://nobody@127.0.0.1:1/x"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	client := runnerclient.New(runnerSecret)
	t.Cleanup(client.Close)
	control := controller.New(controller.Config{}, store, client, slog.New(slog.DiscardHandler))
	server := httptest.NewServer(httpapi.New(control, slog.New(slog.DiscardHandler)))
	t.Cleanup(server.Close)
	w := &world{t: t, url: server.URL, router: loadRouter(t)}
	if got := w.do(call{method: "GET", path: "/healthz", key: "-"}); got.status != 200 {
		t.Errorf("healthz: %d", got.status)
	}
	for _, c := range []call{
		{method: "GET", path: "/readyz", key: "-"},
		{method: "GET", path: "/v1/workspaces"},
		{method: "POST", path: "/v1/workspaces", body: "{}"},
		{method: "POST", path: "/v1/checkpoints/" + absent["checkpoint_id"] + "/fork", body: "{}"},
	} {
		got := w.do(c)
		if p := got.problem(t); got.status != 503 || p.Code != string(core.CodeDatabaseUnavailable) || !strings.Contains(p.Detail, "PostgreSQL") || got.header.Get("Retry-After") == "" {
			t.Errorf("%s %s: %d %+v %v", c.method, c.path, got.status, p, got.header)
		}
	}
}

type panicking struct{ controller.Runners }

func (panicking) Console(context.Context, string, core.SandboxID) (io.ReadCloser, error) {
	panic("a programmer's mistake with a secret in it")
}

// TestPanic is answered as a problem under a request id, without the cause; the server goes on.
func TestPanic(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: w.dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	var log strings.Builder
	server := httptest.NewServer(httpapi.New(controller.New(controller.Config{}, store, panicking{}, slog.New(slog.DiscardHandler)), slog.New(slog.NewTextHandler(&log, nil))))
	t.Cleanup(server.Close)
	other := &world{t: t, url: server.URL, router: w.router}
	got := other.do(call{method: "GET", path: "/v1/workspaces/" + ws.ID + "/console"})
	p := got.problem(t)
	if got.status != 500 || p.Code != string(core.CodeInternal) || strings.Contains(string(got.body), "secret") {
		t.Errorf("%d %s", got.status, got.body)
	}
	other.want(200, "GET", "/v1/workspaces/"+ws.ID, nil, nil)
	server.Close() // the log is written to until then
	if !strings.Contains(log.String(), p.RequestID) || !strings.Contains(log.String(), "a programmer's mistake") {
		t.Errorf("the log does not have the cause under the request id: %s", log.String())
	}
}

// TestLogHasNoSecrets looks for what must not be in the access log.
func TestLogHasNoSecrets(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: w.dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	var log strings.Builder
	server := httptest.NewServer(httpapi.New(controller.New(controller.Config{}, store, panicking{}, slog.New(slog.DiscardHandler)), slog.New(slog.NewTextHandler(&log, nil))))
	t.Cleanup(server.Close)
	other := &world{t: t, url: server.URL, router: w.router}
	other.do(call{method: "GET", path: "/v1/attach/" + absent["session_id"] + "?token=token-in-query", key: "-"})
	other.do(call{method: "POST", path: "/v1/workspaces", body: `{"env":{"A":"value-in-body"},"bad":1}`})
	other.do(call{method: "GET", path: "/v1/workspaces", key: "key-in-header"})
	server.Close()
	for _, secret := range []string{"token-in-query", "value-in-body", "key-in-header", apiKey} {
		if strings.Contains(log.String(), secret) {
			t.Errorf("%s is in the log", secret)
		}
	}
	if strings.Count(log.String(), "msg=request ") != 3 {
		t.Errorf("not one line each: %s", log.String())
	}
}

// TestInternal is the listener for runners: their secret only, and errors in their form.
func TestInternal(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	if _, err := internalapi.New(nil, "", slog.New(slog.DiscardHandler)); err == nil {
		t.Error("it can be served without a secret")
	}
	if err := w.runner.Register(t.Context(), w.inner, "wrong"); core.CodeOf(err) != core.CodeUnauthenticated {
		t.Errorf("wrong secret: %v", err)
	}
	out, err := w.runner.Beat(t.Context(), w.inner, runnerSecret)
	if err != nil || out.TTLSeconds != runnerLease.Seconds() {
		t.Errorf("%+v, %v", out, err)
	}
	other := runnertest.New(runnertest.Config{})
	if err := post(t, w.inner+strings.Replace(runnerapi.PathHeartbeat, "{id}", string(other.ID()), 1), "{}"); err != 404 {
		t.Errorf("a heartbeat of an unknown runner: %d", err)
	}
	if err := post(t, w.inner+strings.Replace(runnerapi.PathHeartbeat, "{id}", "x", 1), "{}"); err != 400 {
		t.Errorf("a heartbeat of a malformed id: %d", err)
	}
	if err := post(t, w.inner+runnerapi.PathRegister, "{"); err != 400 {
		t.Errorf("a broken registration: %d", err)
	}
	if err := post(t, w.inner+"/v1/workspaces", "{}"); err != 404 {
		t.Errorf("the public API on the listener for runners: %d", err)
	}
	public := w.do(call{method: "POST", path: runnerapi.PathRegister, body: "{}"})
	if public.status != 404 {
		t.Errorf("the listener for runners on the public API: %d", public.status)
	}
}

func post(t *testing.T, url, body string) int {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+runnerSecret)
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	return res.StatusCode
}
