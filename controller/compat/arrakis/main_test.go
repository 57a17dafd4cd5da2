package arrakis_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/arrakis"
	"github.com/coppice-dev/coppice/controller/controllertest"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

const firstKey = controllertest.Key

// world is the layer over a real REST API with a real database and a runner without machines.
type world struct {
	t     *testing.T
	cell  *controllertest.Cell
	url   string          // of the layer, which uses the first key for requests without one
	keyed string          // of the same layer, which uses none
	rest  *coppice.Client // with the first key
}

func newWorld(t *testing.T) *world {
	t.Helper()
	cell := controllertest.Start(t, func(c *controller.Config) { c.AllowAllEgress = true })
	w := &world{t: t, cell: cell, rest: cell.REST}
	w.url = w.layer(arrakis.Config{Key: firstKey, Ports: []arrakis.Port{{Guest: 5901, Description: "gui"}}})
	w.keyed = w.layer(arrakis.Config{})
	return w
}

// lose ends the machine of a workspace.
func (w *world) lose(id coppice.WorkspaceID) {
	w.t.Helper()
	for _, s := range w.cell.Runner.Sandboxes() {
		if string(s.WorkspaceID) == id {
			w.cell.Runner.Crash(s.ID, "signal 9")
		}
	}
	if _, err := w.cell.Runner.Beat(w.t.Context(), w.cell.Inner, controllertest.RunnerSecret); err != nil {
		w.t.Fatal(err)
	}
}

// layer serves the layer and returns its URL.
func (w *world) layer(cfg arrakis.Config) string {
	w.t.Helper()
	cfg.API, cfg.Log = w.cell.API, controllertest.Log(w.t)
	h, err := arrakis.New(cfg)
	if err != nil {
		w.t.Fatal(err)
	}
	return controllertest.Serve(w.t, h)
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
