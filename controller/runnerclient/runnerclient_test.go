package runnerclient_test

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/runnerclient"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

func newClient(t *testing.T, secret string) *runnerclient.Client {
	t.Helper()
	return newClientWith(t, secret, 5*time.Minute) // nobody waits that long
}

// newClientWith gives up forks after a time.
func newClientWith(t *testing.T, secret string, fork time.Duration) *runnerclient.Client {
	t.Helper()
	const patience = 5 * time.Minute
	c := runnerclient.NewWithTimeouts(secret, runnerclient.Timeouts{Call: patience, Fork: fork, Capture: patience, Template: patience, Diff: patience, Export: patience})
	t.Cleanup(c.Close)
	return c
}

func wantCode(t *testing.T, err error, code core.Code) {
	t.Helper()
	if core.CodeOf(err) != code {
		t.Errorf("got %v (%s), want %s", err, core.CodeOf(err), code)
	}
}

// TestCalls makes each call once, over TCP and over a unix socket.
func TestCalls(t *testing.T) {
	t.Parallel()
	r := runnertest.Start(t, runnertest.Config{})
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "unix", filepath.Join(t.TempDir(), "r"))
	if err != nil {
		t.Fatal(err)
	}
	server := &httptest.Server{Listener: listener, Config: &http.Server{Handler: r.Handler(), ReadHeaderTimeout: time.Minute}}
	server.Start()
	t.Cleanup(server.Close)
	c := newClient(t, "runner-secret")
	for _, endpoint := range []string{r.Endpoint(), "unix:" + listener.Addr().String(), "unix://" + listener.Addr().String()} {
		images, err := c.Images(t.Context(), endpoint)
		if err != nil || len(images) != 1 || images[0].Digest != runnertest.DefaultImage.Digest {
			t.Fatalf("%s: %+v, %v", endpoint, images, err)
		}
		template := core.NewID[core.CheckpointID]()
		shape := core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}
		cp, err := c.Template(t.Context(), endpoint, runnerapi.Template{CheckpointID: template, Image: images[0].Digest, Resources: shape})
		if err != nil || cp.ID != template || cp.Resources != shape {
			t.Fatalf("%+v, %v", cp, err)
		}
		sandbox := core.NewID[core.SandboxID]()
		got, err := c.Fork(t.Context(), endpoint, runnerapi.Fork{CheckpointID: template, Children: []runnerapi.Child{{SandboxID: sandbox, Epoch: 1, Identity: core.Identity{Generation: "g"}}}})
		if err != nil || got.Children[0].Sandbox.ID != sandbox || got.Children[0].Reseal.Generation != "g" {
			t.Fatalf("%+v, %v", got, err)
		}
		if cp, err = c.Capture(t.Context(), endpoint, sandbox, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()}); err != nil || cp.Parent != template {
			t.Errorf("%+v, %v", cp, err)
		}
		port, err := c.OpenPort(t.Context(), endpoint, sandbox, runnerapi.Port{ID: core.NewID[core.PortID](), GuestPort: 80, Listen: netip.MustParseAddrPort("127.0.0.1:0")})
		if err != nil || port.Listen.Port() == 0 {
			t.Errorf("%+v, %v", port, err)
		}
		if err := c.ClosePort(t.Context(), endpoint, sandbox, port.ID); err != nil {
			t.Error(err)
		}
		console, err := c.Console(t.Context(), endpoint, sandbox)
		if err != nil {
			t.Fatal(err)
		}
		if b, err := io.ReadAll(console); err != nil || !strings.Contains(string(b), string(sandbox)) {
			t.Errorf("%s, %v", b, err)
		}
		if err := console.Close(); err != nil {
			t.Error(err)
		}
		w, err := (&http.Client{Transport: c.Guest(endpoint, sandbox)}).Get("http://guest/v1/processes")
		if err != nil || w.StatusCode != http.StatusOK {
			t.Fatalf("guest: %+v, %v", w, err)
		}
		if err := w.Body.Close(); err != nil {
			t.Error(err)
		}
		if err := errors.Join(c.DeleteSandbox(t.Context(), endpoint, sandbox), c.DeleteSandbox(t.Context(), endpoint, sandbox), c.DeleteCheckpoint(t.Context(), endpoint, cp.ID)); err != nil {
			t.Error(err)
		}
		_, err = c.Console(t.Context(), endpoint, sandbox)
		wantCode(t, err, core.CodeSandboxNotFound)
	}
}

func TestFaults(t *testing.T) {
	t.Parallel()
	c := newClient(t, "runner-secret")
	fork := func(c *runnerclient.Client, endpoint string) error {
		_, err := c.Fork(t.Context(), endpoint, runnerapi.Fork{})
		return err
	}
	serve := func(h http.HandlerFunc) string {
		s := httptest.NewServer(h)
		t.Cleanup(s.Close)
		return s.URL
	}
	hang := make(chan struct{})
	for name, endpoint := range map[string]string{
		"refused":       "http://127.0.0.1:1",
		"no socket":     "unix:/nonexistent/socket",
		"not an url":    "gopher://x",
		"empty":         "",
		"cut off":       serve(func(http.ResponseWriter, *http.Request) { panic(http.ErrAbortHandler) }),
		"half a body":   serve(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"children": [`) }),
		"not json":      serve(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "<html>") }),
		"500, no words": serve(func(w http.ResponseWriter, _ *http.Request) { w.WriteHeader(http.StatusInternalServerError) }),
		"silence": serve(func(_ http.ResponseWriter, r *http.Request) {
			select {
			case <-hang:
			case <-r.Context().Done():
			}
		}),
	} {
		c := c
		if name == "silence" {
			t.Cleanup(func() { close(hang) }) // before its server closes: clean-ups run backwards
			c = newClientWith(t, "runner-secret", 300*time.Millisecond)
		}
		err := fork(c, endpoint)
		if core.CodeOf(err) != core.CodeRunnerUnreachable || core.CategoryOf(err) != core.Unavailable {
			t.Errorf("%s: %v", name, err)
		}
	}
	r := runnertest.Start(t, runnertest.Config{})
	wantCode(t, fork(c, r.Endpoint()), core.CodeCheckpointNotFound) // what a runner refuses comes back as it was
	_, err := newClient(t, "wrong").Images(t.Context(), r.Endpoint())
	wantCode(t, err, core.CodeInternal) // our secret is not the caller's key
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	_, err = c.Images(ctx, r.Endpoint())
	wantCode(t, err, core.CodeCanceled)
}

// TestGuestKeepsSecretsApart looks at what reaches the guest's side.
func TestGuestKeepsSecretsApart(t *testing.T) {
	t.Parallel()
	seen := make(chan *http.Request, 1)
	s := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { seen <- r }))
	t.Cleanup(s.Close)
	c := newClient(t, "runner-secret")
	sandbox := core.NewID[core.SandboxID]()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, "http://guest/v1/files?path=%2Fa%20b", strings.NewReader("x"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer user-key")
	req.Header.Set("Cookie", "a=b")
	req.Header.Set("Content-Type", "application/octet-stream")
	res, err := c.Guest(s.URL, sandbox).RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	got := <-seen
	if got.URL.Path != "/v1/sandboxes/"+string(sandbox)+"/guest/v1/files" || got.URL.Query().Get("path") != "/a b" || got.Header.Get("Authorization") != "Bearer runner-secret" ||
		got.Header.Get("Cookie") != "" || got.Header.Get("Content-Type") != "application/octet-stream" {
		t.Errorf("%s %v", got.URL, got.Header)
	}
	if req.Header.Get("Authorization") != "Bearer user-key" {
		t.Error("the caller's request was changed")
	}
}
