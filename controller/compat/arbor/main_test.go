package arbor_test

import (
	"context"
	"encoding/json"
	"io"
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

// do sends a request as `curl -d` does: the body has the type of a form.
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
		req.Header.Set("Content-Type", "application/x-www-form-urlencoded")
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

// want checks a status and decodes the answer. Each error has Arbor's form.
func (r reply) want(t *testing.T, status int, into any) reply {
	t.Helper()
	if r.status != status {
		t.Fatalf("status %d, want %d: %s", r.status, status, r.body)
	}
	if status >= http.StatusBadRequest && (r.code() == "" || r.header.Get("Content-Type") != "application/json") {
		t.Errorf("the error has no code: %s", r.body)
	}
	if into != nil {
		if err := json.Unmarshal([]byte(r.body), into); err != nil {
			t.Fatalf("%v: %s", err, r.body)
		}
	}
	return r
}

// code is the code of an error that has a message, too.
func (r reply) code() string {
	var e struct {
		Error struct{ Code, Message string }
	}
	if err := json.Unmarshal([]byte(r.body), &e); err != nil || e.Error.Message == "" {
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
