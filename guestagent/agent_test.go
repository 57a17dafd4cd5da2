//go:build linux

package guestagent

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// plainWorkload runs sessions as children of the test, in the test's own namespaces. Parts that need a guest (the
// freezer, the namespaces) are tested in a guest, by package runner/guest.
type plainWorkload struct {
	mu        sync.Mutex // guards the fields below
	started   []int
	isFrozen  bool
	freezeErr error
	hooksLeft int
}

func (w *plainWorkload) inside(fn func() error) error { return fn() }
func (w *plainWorkload) join() error                  { return nil }

func (w *plainWorkload) start(cmd *exec.Cmd) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.isFrozen {
		return errors.New("a process was started in a frozen workload")
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	w.started = append(w.started, cmd.Process.Pid)
	return nil
}

func (w *plainWorkload) startHook(cmd *exec.Cmd) error { return cmd.Start() }
func (w *plainWorkload) endHooks() error               { w.hooksLeft++; return nil }

func (w *plainWorkload) freeze(context.Context, time.Duration) (int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isFrozen = w.freezeErr == nil
	return len(w.started), w.freezeErr
}

func (w *plainWorkload) thaw(context.Context) error {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.isFrozen = false
	return nil
}

func (w *plainWorkload) frozen() (bool, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.isFrozen, nil
}

func (w *plainWorkload) pids() ([]int, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.started, nil
}

func (w *plainWorkload) innerPID(pid int) int { return pid }
func (w *plainWorkload) proc() string         { return "/proc" }

// testAgent is an agent behind plain HTTP.
type testAgent struct {
	*Agent
	t    *testing.T
	work *plainWorkload
	url  string
}

func newTestAgent(t *testing.T) *testAgent {
	t.Helper()
	w := &plainWorkload{}
	a := newAgent(Config{Logger: slog.New(slog.NewTextHandler(t.Output(), nil))}, w, filepath.Join(t.TempDir(), "state"))
	a.sessions.oom = func(int) {}
	a.reseal.look = func() (*survey, error) { return &survey{}, nil }
	srv := httptest.NewServer(a.http.Handler)
	t.Cleanup(func() {
		for _, s := range a.sessions.all() {
			_ = a.sessions.remove(context.WithoutCancel(t.Context()), s)
		}
		a.watches.Close()
		srv.CloseClientConnections()
		srv.Close()
		a.idle.stop()
	})
	return &testAgent{Agent: a, t: t, work: w, url: srv.URL}
}

// do sends a request and returns the body; a status of 400 or more is an error.
func (a *testAgent) do(method, path string, body io.Reader) ([]byte, *http.Response, error) {
	a.t.Helper()
	req, err := http.NewRequestWithContext(a.t.Context(), method, a.url+path, body)
	if err != nil {
		a.t.Fatal(err)
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode < 400 {
		return b, res, err
	}
	var p guestapi.Problem
	if err := json.Unmarshal(b, &p); err != nil {
		a.t.Fatalf("%s %s: status %d: %q", method, path, res.StatusCode, b)
	}
	if want := statusOf(p.Category); res.StatusCode != want {
		a.t.Errorf("%s %s: status %d, want %d", method, path, res.StatusCode, want)
	}
	return b, res, p.Err()
}

func ask[T any](a *testAgent, method, path string, in any) (T, error) {
	a.t.Helper()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			a.t.Fatal(err)
		}
		body = bytes.NewReader(b)
	}
	var out T
	b, _, err := a.do(method, path, body) //nolint:bodyclose // do has read and closed it
	if err == nil && len(b) > 0 {
		err = json.Unmarshal(b, &out)
	}
	return out, err
}

func must[T any](t *testing.T) func(v T, err error) T {
	t.Helper()
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

func (a *testAgent) start(spec guestapi.SessionSpec) guestapi.Session {
	a.t.Helper()
	if spec.Cwd == "" {
		spec.Cwd = "/"
	}
	return must[guestapi.Session](a.t)(ask[guestapi.Session](a, http.MethodPost, guestapi.PathSessions, spec))
}

func (a *testAgent) route(pattern string, id core.SessionID) string {
	return strings.Replace(pattern, "{id}", string(id), 1)
}

func (a *testAgent) output(id core.SessionID, query string) (string, *http.Response) {
	a.t.Helper()
	b, res, err := a.do(http.MethodGet, a.route(guestapi.PathSessionOutput, id)+"?"+query, nil)
	if err != nil {
		a.t.Fatal(err)
	}
	return string(b), res
}

func (a *testAgent) wait(id core.SessionID) guestapi.Session {
	a.t.Helper()
	s := must[guestapi.Session](a.t)(ask[guestapi.Session](a, http.MethodGet, a.route(guestapi.PathSessionWait, id)+"?timeout_ms=20000", nil))
	if s.State != guestapi.SessionExited {
		a.t.Fatalf("the session has not ended: %+v", s)
	}
	return s
}
