package httpapi_test

import (
	"context"
	"encoding/json"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pass"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/httpapi"
	"github.com/coppice-dev/coppice/runner/netns"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
	"github.com/coppice-dev/coppice/runner/writelog"
)

// noNetwork is that of a runner whose machines have none, and noNamespace is one of its namespaces.
type (
	noNetwork   struct{}
	noNamespace struct{}
)

func (noNetwork) Acquire(context.Context) (sandboxnet.Namespace, error) { return noNamespace{}, nil }

func (noNetwork) Adopt(context.Context, string, core.Identity, core.EgressPolicy) (sandboxnet.Namespace, error) {
	return noNamespace{}, nil
}
func (noNetwork) Reconcile(context.Context, map[string]bool) error { return nil }
func (noNetwork) Gateway() (netip.Addr, string)                    { return netip.Addr{}, "" }
func (noNetwork) Resolvers(core.EgressPolicy) []netip.Addr         { return nil }
func (noNamespace) Name() string                                   { return "none" }
func (noNamespace) NetNS() (*os.File, error)                       { return nil, nil } //nolint:nilnil // that of the process
func (noNamespace) TapFile(bool) (*os.File, error)                 { return nil, nil } //nolint:nilnil // there is no tap
func (noNamespace) Assign(context.Context, core.Identity) error    { return nil }
func (noNamespace) Open(context.Context, core.EgressPolicy) error  { return nil }
func (noNamespace) EgressSockets(context.Context) (netns.EgressSockets, error) {
	return netns.EgressSockets{}, net.ErrClosed
}
func (noNamespace) Check(context.Context) error   { return nil }
func (noNamespace) Release(context.Context) error { return nil }
func (noNamespace) Dial(context.Context, string, string) (net.Conn, error) {
	return nil, net.ErrClosed
}

// sandbox runs one on a fake machine, and returns its runner and what a pass for it says.
func sandbox(t *testing.T) (*runner.Runner, pass.Claims) {
	t.Helper()
	store, image := testvm.FakeImage(t)
	runDir, err := os.MkdirTemp("", "run") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(runDir) })
	id := core.NewID[core.RunnerID]()
	r, err := runner.New(t.Context(), runner.Config{
		ID: id, ClusterID: "test", DataDir: filepath.Join(t.TempDir(), "data"), RunDir: runDir, Driver: fakevmm.New(fakevmm.Config{}), Images: store,
		Network: noNetwork{}, Log: slog.New(slog.DiscardHandler),
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	template, err := r.Template(t.Context(), runnerapi.Template{
		CheckpointID: core.NewID[core.CheckpointID](), Image: image.Digest, Resources: core.Resources{VCPUs: 1, MemoryMiB: 16},
	})
	if err != nil {
		t.Fatal(err)
	}
	child := runnerapi.Child{
		SandboxID: core.NewID[core.SandboxID](), WorkspaceID: core.NewID[core.WorkspaceID](), Epoch: 1, Egress: core.EgressDenyAll,
		Identity: core.Identity{
			Generation: string(core.NewID[core.OperationID]()), Hostname: "h", MachineID: strings.Repeat("1", 32),
			MAC: "02:00:00:00:00:01", IP: netip.AddrFrom4([4]byte{10, 1, 0, 1}),
		},
	}
	out, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: template.ID, Children: []runnerapi.Child{child}})
	if err != nil || out.Children[0].Problem != nil {
		t.Fatal(out, err)
	}
	return r, pass.Claims{
		ID: "pass_1", Runner: id, Project: core.NewID[core.ProjectID](), Workspace: child.WorkspaceID, Sandbox: child.SandboxID, Epoch: 1,
		Scope: pass.Files, Key: core.NewID[core.KeyID](),
	}
}

// TestRequestsAreBounded: a request that is longer than it may be is not read to its end, and the runner does not see it.
func TestRequestsAreBounded(t *testing.T) {
	t.Parallel()
	const most = 1 << 20
	r, _ := sandbox(t)
	h, usual := httpapi.NewWithRequests(r, slog.New(slog.DiscardHandler), most)
	if usual != 64<<20 {
		t.Errorf("a request has %d bytes at most", usual)
	}
	const before, after = `{"image":"`, `"}`
	body := func(n int64) io.Reader {
		return io.MultiReader(strings.NewReader(before), io.LimitReader(httpapi.Endless('x'), n-int64(len(before)+len(after))), strings.NewReader(after))
	}
	for name, tc := range map[string]struct {
		body io.Reader
		want core.Code
	}{
		"the longest":   {body(most), core.CodeInvalidName}, // the runner read it, and an image has a shorter name
		"one byte more": {body(most + 1), core.CodeBodyTooLarge},
		"endless":       {body(1 << 40), core.CodeBodyTooLarge},
		"broken":        {strings.NewReader(before), core.CodeMalformedBody},
	} {
		read := &httpapi.Counted{R: tc.body}
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, runnerapi.PathTemplates, read))
		var p runnerapi.Problem
		if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || p.Code != tc.want {
			t.Errorf("%s: %d %s, %v; want %s", name, w.Code, w.Body, err, tc.want)
		}
		if read.N > most+64<<10 {
			t.Errorf("%s: %d bytes were read", name, read.N)
		}
	}
	w := httptest.NewRecorder()
	h.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodGet, runnerapi.PathSandboxes, http.NoBody))
	if w.Code != http.StatusOK || strings.Count(w.Body.String(), `"id":"sbx_`) != 1 {
		t.Errorf("the sandboxes afterwards: %d %s", w.Code, w.Body)
	}
}

// TestUploadsAreBounded: an upload by pass that is longer than it may be leaves no file, whether it says its length or not, and the guest is not
// blamed for it. If it says its length, nothing of it is read and nothing is noted for the audit log.
func TestUploadsAreBounded(t *testing.T) {
	t.Parallel()
	r, claims := sandbox(t)
	signer, err := pass.NewSigner()
	if err != nil {
		t.Fatal(err)
	}
	verifier := pass.NewVerifier(claims.Runner)
	verifier.Learn([][]byte{signer.Public()})
	token, _, err := signer.Sign(claims, time.Hour)
	if err != nil {
		t.Fatal(err)
	}
	writes, err := writelog.Open(filepath.Join(t.TempDir(), "writes.log"), claims.Runner, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := writes.Close(); err != nil {
			t.Error(err)
		}
	}()
	d := httpapi.NewData(r, verifier, writes, slog.New(slog.DiscardHandler))
	const most = 1 << 20
	if usual := d.SetUpload(most); usual != 10<<30 {
		t.Errorf("an upload has %d bytes at most", usual)
	}
	ask := func(method, name string, length int64, body io.Reader) *httptest.ResponseRecorder {
		q := httptest.NewRequestWithContext(t.Context(), method, "https://runner"+runnerapi.PathDataFiles+"?path=/"+name, body)
		q.ContentLength = length
		q.Header.Set("Authorization", "Bearer "+token)
		w := httptest.NewRecorder()
		d.ServeHTTP(w, q)
		return w
	}
	for name, tc := range map[string]struct {
		length, given int64 // length: -1 is unknown
		status        int
	}{
		"longest":           {most, most, 200},
		"longest-in-chunks": {-1, most, 200},
		"longer":            {most + 1, most + 1, 413},
		"longer-in-chunks":  {-1, most + 1, 413},
		"endless":           {-1, 1 << 40, 413},
	} {
		_, before := d.Writes()
		body := &httpapi.Counted{R: io.LimitReader(httpapi.Endless(0), tc.given)}
		w := ask(http.MethodPut, name, tc.length, body)
		if w.Code != tc.status || tc.status == 413 && !strings.Contains(w.Body.String(), string(core.CodeBodyTooLarge)) {
			t.Errorf("%s: %d %s", name, w.Code, w.Body)
		}
		_, after := d.Writes()
		if early := tc.length > most; early && (body.N != 0 || len(after) != len(before)) || body.N > most+1<<20 {
			t.Errorf("%s: %d bytes were read, %d writes noted", name, body.N, len(after)-len(before))
		}
		got := ask(http.MethodGet, name, 0, http.NoBody)
		if tc.status == 200 && (got.Code != 200 || got.Body.Len() != most) || tc.status != 200 && got.Code != 404 {
			t.Errorf("%s: the file has %d bytes, status %d", name, got.Body.Len(), got.Code)
		}
	}
}
