package arrakis_test

import (
	"encoding/json"
	"maps"
	"net/http"
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

// ask is a request to the layer.
type ask struct {
	method, path, body string
	at                 string // the URL of the layer; empty: the one that needs no key
	header             map[string]string
	host               string
}

type reply controllertest.Reply

func (w *world) do(a ask) reply {
	w.t.Helper()
	if a.at == "" {
		a.at = w.url
	}
	header := map[string]string{}
	if a.body != "" {
		header["Content-Type"] = "application/json"
	}
	maps.Copy(header, a.header)
	return reply(controllertest.Ask(w.t, a.method, a.at+a.path, a.host, header, a.body))
}

// want checks a status and decodes the answer. Each answer is JSON, and each error has Arrakis' form.
func (r reply) want(t *testing.T, status int, into any) reply {
	t.Helper()
	if r.Status != status {
		t.Fatalf("status %d, want %d: %s", r.Status, status, r.Body)
	}
	if kind := r.Header.Get("Content-Type"); kind != "application/json" {
		t.Errorf("the answer is %q", kind)
	}
	if status >= http.StatusBadRequest && r.message() == "" {
		t.Errorf("the error has no message: %s", r.Body)
	}
	if into != nil {
		if err := json.Unmarshal([]byte(r.Body), into); err != nil {
			t.Fatalf("%v: %s", err, r.Body)
		}
	}
	return r
}

func (r reply) message() string {
	var e struct{ Error struct{ Message string } }
	_ = json.Unmarshal([]byte(r.Body), &e)
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
