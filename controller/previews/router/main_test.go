package router_test

import (
	"context"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/controllertest"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/controller/previews/router"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

const (
	firstKey = controllertest.Key
	domain   = "preview.example"
)

// world is a router over a real controller with a real database, and a runner without machines whose ports lead to servers of the test.
type world struct {
	*testing.T
	cell    *controllertest.Cell
	rest    *coppice.Client
	control *controller.Controller
	runner  *runnertest.Runner
	server  *httptest.Server
	client  *http.Client // dials the router for every name
}

func newWorld(t *testing.T) *world {
	t.Helper()
	cell := controllertest.Start(t, nil)
	w := &world{T: t, cell: cell, rest: cell.REST, control: cell.Control, runner: cell.Runner}
	r := router.New(router.Config{Previews: w.control.Previews(), Keys: w.control.Tenancy, Domain: domain, Log: controllertest.Log(t)})
	controllertest.Run(t, r.Run)
	w.server = httptest.NewUnstartedServer(r)
	w.server.EnableHTTP2 = true
	w.server.StartTLS()
	t.Cleanup(w.server.Close)
	w.control.Previews().Serve(previews.Site{Scheme: "https", Domain: domain, Secret: []byte(strings.Repeat("s", 32))})
	w.client = w.browser(nil, true)
	return w
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
