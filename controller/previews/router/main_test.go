package router_test

import (
	"context"
	"crypto/tls"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/internalapi"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/controller/previews/router"
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
	domain       = "preview.example"
)

// world is a router over a real controller with a real database, and a runner without machines whose ports lead to servers of the test.
type world struct {
	*testing.T
	rest    *coppice.Client
	control *controller.Controller
	runner  *runnertest.Runner
	server  *httptest.Server
	api     string
	client  *http.Client // dials the router for every name
}

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{T: t, runner: runnertest.Start(t, runnertest.Config{Secret: runnerSecret})}
	store, err := postgres.Open(t.Context(), postgres.Config{DSN: testpg.New(t, migrations.Up)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(store.Close)
	runners := runnerclient.New(runnerSecret)
	t.Cleanup(runners.Close)
	log := slog.New(slog.DiscardHandler)
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
	w.control = controller.New(controller.Config{
		ClusterID: "test", Trust: &trust, RunnerLease: time.Hour, LoopInterval: 50 * time.Millisecond, ShutdownGrace: time.Second,
		Bootstrap: controller.Bootstrap{Key: firstKey}, Limits: controller.Limits{Open: lots, FailureDelay: 1, Key: rates, Project: rates},
	}, store, runners, log)
	w.background(w.control.Run)
	if _, err := w.control.Bootstrap(t.Context()); err != nil {
		t.Fatal(err)
	}
	internal, err := internalapi.New(w.control, runnerSecret, log)
	if err != nil {
		t.Fatal(err)
	}
	inner := httptest.NewServer(internal)
	t.Cleanup(inner.Close)
	if err := w.runner.Register(t.Context(), inner.URL, runnerSecret); err != nil {
		t.Fatal(err)
	}
	api := httptest.NewServer(httpapi.New(w.control, log))
	t.Cleanup(api.Close)
	w.api = api.URL
	w.rest = w.sdk(firstKey)

	r := router.New(router.Config{Previews: w.control.Previews(), Keys: w.control.Tenancy, Domain: domain, Log: log})
	w.background(r.Run)
	w.server = httptest.NewUnstartedServer(r)
	w.server.EnableHTTP2 = true
	w.server.StartTLS()
	t.Cleanup(w.server.Close)
	t.Cleanup(http.DefaultClient.CloseIdleConnections)
	w.control.Previews().Serve(previews.Site{Scheme: "https", Domain: domain, Secret: []byte(strings.Repeat("s", 32))})
	w.client = w.browser(nil, true)
	return w
}

// background runs something until the test ends.
func (w *world) background(run func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.WithoutCancel(w.Context()))
	done := make(chan error, 1)
	go func() { done <- run(ctx) }()
	w.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			w.Errorf("run: %v", err)
		}
	})
}

// browser is a client for which every name leads to the router.
func (w *world) browser(jar http.CookieJar, h2 bool) *http.Client {
	return w.browserAt(jar, h2, net.IPv4(127, 0, 0, 1))
}

// browserAt is a browser at an address.
func (w *world) browserAt(jar http.CookieJar, h2 bool, from net.IP) *http.Client {
	pool := w.server.Client().Transport.(*http.Transport).TLSClientConfig.RootCAs
	transport := &http.Transport{
		TLSClientConfig: &tls.Config{RootCAs: pool, ServerName: "example.com"}, ForceAttemptHTTP2: h2,
		DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
			return (&net.Dialer{LocalAddr: &net.TCPAddr{IP: from}}).DialContext(ctx, "tcp", w.server.Listener.Addr().String())
		},
	}
	w.Cleanup(transport.CloseIdleConnections)
	return &http.Client{Transport: transport, Jar: jar, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
}

func (w *world) sdk(key string) *coppice.Client {
	w.Helper()
	c, err := coppice.New(coppice.Config{Server: w.api, Token: key})
	if err != nil {
		w.Fatal(err)
	}
	w.Cleanup(c.Close)
	return c
}

func (w *world) create(c *coppice.Client) coppice.Workspace {
	w.Helper()
	ws, err := c.CreateWorkspace(w.Context(), coppice.CreateWorkspaceRequest{Image: "base"})
	if err != nil {
		w.Fatal(err)
	}
	return ws
}

// listen has a port of the present sandbox of a workspace lead to a server.
func (w *world) listen(ws coppice.WorkspaceID, port int, s *httptest.Server) {
	w.Helper()
	row, err := w.control.Workspace(w.Context(), w.project(), core.WorkspaceID(ws))
	if err != nil {
		w.Fatal(err)
	}
	address := ""
	if s != nil {
		address = s.Listener.Addr().String()
	}
	w.runner.ListenIn(row.Sandbox.ID, port, address)
}

func (w *world) project() core.ProjectID {
	w.Helper()
	self, err := w.rest.Self(w.Context())
	if err != nil {
		w.Fatal(err)
	}
	return core.ProjectID(self.ProjectID)
}

func (w *world) guest(h http.HandlerFunc) *httptest.Server {
	s := httptest.NewServer(h)
	w.Cleanup(s.Close)
	return s
}

func (w *world) preview(ws coppice.WorkspaceID, port int, v coppice.Visibility) coppice.Port {
	w.Helper()
	p, err := w.rest.CreatePort(w.Context(), ws, coppice.CreatePortRequest{GuestPort: port, Visibility: v})
	if err != nil {
		w.Fatal(err)
	}
	return p
}

type answer struct {
	status int
	header http.Header
	body   string
	proto  int
}

func (w *world) get(c *http.Client, url string, header ...string) answer {
	w.Helper()
	req, err := http.NewRequestWithContext(w.Context(), http.MethodGet, url, nil)
	if err != nil {
		w.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		if header[i] == "Host" {
			req.Host = header[i+1]
			continue
		}
		req.Header.Set(header[i], header[i+1])
	}
	res, err := c.Do(req)
	if err != nil {
		w.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		w.Fatal(err)
	}
	return answer{res.StatusCode, res.Header, string(b), res.ProtoMajor}
}

func (w *world) want(what string, a answer, status int, body string) {
	w.Helper()
	if a.status != status || !strings.Contains(a.body, body) {
		w.Errorf("%s: %d %q, want %d %q", what, a.status, a.body, status, body)
	}
}
