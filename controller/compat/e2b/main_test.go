package e2b_test

import (
	"context"
	"encoding/json"
	"io"
	"maps"
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/e2b"
	"github.com/coppice-dev/coppice/controller/controllertest"
	"github.com/coppice-dev/coppice/controller/httpapi"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

const firstKey = controllertest.Key

// world is the layer over a real REST API with a real database and a runner without machines.
type world struct {
	t       *testing.T
	cell    *controllertest.Cell
	url     string          // of the layer
	rest    *coppice.Client // with the first key
	control *controller.Controller
	runner  *runnertest.Runner
}

func newWorld(t *testing.T) *world {
	t.Helper()
	cell := controllertest.Start(t, func(c *controller.Config) { c.AllowAllEgress = true })
	control := cell.Control
	layer, err := e2b.New(e2b.Config{
		API: cell.API, Secret: []byte(strings.Repeat("s", 32)), Domain: "sandbox.example", LocalPorts: true, Log: controllertest.Log(t),
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
	return &world{t: t, cell: cell, url: controllertest.Serve(t, layer), rest: cell.REST, control: control, runner: cell.Runner}
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
