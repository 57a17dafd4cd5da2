package arbor_test

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/compat/arbor"
	"github.com/coppice-dev/coppice/controller/controllertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/internal/masterkey"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/internal/test/testpg"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestMain(m *testing.M) { testleak.Main(m, testpg.Leak()) }

const firstKey = controllertest.Key

// vault is a place of secrets that has one.
type vault struct{}

const inVault = "vault://prod/openai-key#value"

func (vault) Check(core.ProjectID, string) error { return nil }

func (vault) Read(_ context.Context, _ core.ProjectID, ref string) (grant.Secret, error) {
	if ref != inVault {
		return grant.Secret{}, core.Errorf(core.FailedPrecondition, core.CodeSecretNotFound, "there is no %s", ref)
	}
	return grant.NewSecret("a secret of this test"), nil
}

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
	file := filepath.Join(t.TempDir(), "master-key")
	if err := os.WriteFile(file, []byte(strings.Repeat("0", 64)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	keys, err := masterkey.OpenRing(file)
	if err != nil {
		t.Fatal(err)
	}
	cell := controllertest.Start(t, func(c *controller.Config) { c.Wrapper, c.Secrets = keys, vault{} })
	w := &world{t: t, cell: cell, rest: cell.REST}
	w.url, w.keyed = w.layer(firstKey), w.layer("")
	return w
}

// layer serves the layer and returns its URL.
func (w *world) layer(key string) string {
	w.t.Helper()
	h, err := arbor.New(arbor.Config{API: w.cell.API, Key: key, Log: controllertest.Log(w.t)})
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

// do sends a request as `curl -d` does: the body has the type of a form.
func (w *world) do(a ask) reply {
	w.t.Helper()
	if a.at == "" {
		a.at = w.url
	}
	header := map[string]string{}
	if a.body != "" {
		header["Content-Type"] = "application/x-www-form-urlencoded"
	}
	maps.Copy(header, a.header)
	return reply(controllertest.Ask(w.t, a.method, a.at+a.path, a.host, header, a.body))
}

// want checks a status and decodes the answer. Each error has Arbor's form.
func (r reply) want(t *testing.T, status int, into any) reply {
	t.Helper()
	if r.Status != status {
		t.Fatalf("status %d, want %d: %s", r.Status, status, r.Body)
	}
	if status >= http.StatusBadRequest && (r.code() == "" || r.Header.Get("Content-Type") != "application/json") {
		t.Errorf("the error has no code: %s", r.Body)
	}
	if into != nil {
		if err := json.Unmarshal([]byte(r.Body), into); err != nil {
			t.Fatalf("%v: %s", err, r.Body)
		}
	}
	return r
}

// code is the code of an error that has a message, too.
func (r reply) code() string {
	var e struct {
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal([]byte(r.Body), &e); err != nil || e.Error.Message == "" {
		return ""
	}
	return e.Error.Code
}

// begun is the answer to a request that begins something.
type begun struct {
	WorkspaceID  string `json:"workspace_id"`
	CheckpointID string `json:"checkpoint_id"`
	OperationID  string `json:"operation_id"`
	SessionID    string `json:"session_id"`
	State        string
	Status       string
	Attachable   bool
}

// ends waits for the end of what was begun.
func (w *world) ends(b begun) begun {
	w.t.Helper()
	op, err := w.rest.WaitOperation(w.t.Context(), b.OperationID)
	if err != nil || op.State != coppice.OperationSucceeded {
		w.t.Fatalf("operation %s: %v, %+v", b.OperationID, err, op)
	}
	return b
}

// create makes a workspace that is ready.
func (w *world) create(body string) begun {
	w.t.Helper()
	var b begun
	w.do(ask{method: "POST", path: "/v1/workspaces", body: body}).want(w.t, http.StatusAccepted, &b)
	return w.ends(b)
}
