package e2b_test

import (
	"context"
	"encoding/json"
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
	w := &world{t: t, cell: cell, rest: cell.REST, control: cell.Control, runner: cell.Runner}
	w.url = w.newLayer().url
	return w
}

// newLayer is the world through a layer that has served nothing, as that of another controller.
func (w *world) newLayer() *world {
	t, cell, control := w.t, w.cell, w.control
	t.Helper()
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
	again := *w
	again.url = controllertest.Serve(t, layer)
	return &again
}

// ask is a request to the layer.
type ask struct {
	method, path, body string
	key                string // X-API-KEY; empty: the first key, "-": none
	header             map[string]string
	host               string
}

type reply controllertest.Reply

func (w *world) do(a ask) reply {
	w.t.Helper()
	header := map[string]string{}
	switch a.key {
	case "":
		header["X-API-KEY"] = firstKey
	case "-":
	default:
		header["X-API-KEY"] = a.key
	}
	maps.Copy(header, a.header)
	return reply(controllertest.Ask(w.t, a.method, w.url+a.path, a.host, header, a.body))
}

// want checks a status and decodes the answer.
func (r reply) want(t *testing.T, status int, into any) {
	t.Helper()
	if r.Status != status {
		t.Fatalf("status %d, want %d: %s", r.Status, status, r.Body)
	}
	if into == nil {
		return
	}
	if err := json.Unmarshal([]byte(r.Body), into); err != nil {
		t.Fatalf("%v: %s", err, r.Body)
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
