package runner

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner/netns"
	"github.com/coppice-dev/coppice/runner/sandboxnet"
	"github.com/coppice-dev/coppice/runner/vmm/qemu"
	"github.com/coppice-dev/coppice/runner/volume"
)

// rig is a runner with real VMs.
type rig struct {
	*Runner
	t     *testing.T
	image images.Image
	next  int
	stop  func() // as Ctrl-C does; waits for the end of the runner, and fails the test if that has left something
}

// newRig starts a runner that ends with the test, leaving nothing.
func newRig(t *testing.T, change func(*Config)) *rig {
	t.Helper()
	store, img := testvm.Image(t)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	v, err := volume.Open(t.Context(), t.TempDir(), 8<<30, log)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := v.Close(); err != nil {
			t.Error(err)
		}
	})
	cluster := "test of " + t.Name() + " " + string(core.NewID[core.RunnerID]())
	pool, err := netns.NewPool(netns.Config{ClusterID: cluster, Warm: 2, Log: log})
	if err != nil {
		t.Fatal(err)
	}
	runDir, err := os.MkdirTemp("/run", "coppice-test-") //nolint:usetesting // it must be short: it holds sockets
	if err != nil {
		t.Fatal(err)
	}
	cfg := Config{
		ID: core.NewID[core.RunnerID](), ClusterID: cluster, DataDir: filepath.Join(v.Path, "runner"), RunDir: runDir,
		Driver: qemu.New(qemu.Config{}), Images: store, Log: log, FirstUID: 64100,
	}
	change(&cfg)
	if cfg.Network == nil {
		cfg.Network = sandboxnet.Of(pool, cfg.Egress != nil)
	}
	r, err := New(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	poolEnded := make(chan error, 1)
	go func() { poolEnded <- pool.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		// At once: the program may exit now, and whatever is still being taken down would be left.
		if left, err := os.ReadDir(r.shellsDir()); err != nil || len(left) > 0 {
			t.Errorf("%d shells are left at the end of the runner (%v)", len(left), err)
		}
	})
	t.Cleanup(func() {
		stop()
		if err := <-poolEnded; err != nil {
			t.Error(err)
		}
		if err := pool.Close(context.WithoutCancel(ctx)); err != nil {
			t.Error(err)
		}
		if err := os.RemoveAll(runDir); err != nil {
			t.Error(err)
		}
	})
	return &rig{Runner: r, t: t, image: img, stop: stop}
}

func (r *rig) template() core.CheckpointID {
	r.t.Helper()
	c, err := r.Template(r.t.Context(), runnerapi.Template{
		CheckpointID: core.NewID[core.CheckpointID](), Image: r.image.Digest,
		Resources: core.Resources{VCPUs: 1, MemoryMiB: 256, DiskGiB: 1},
	})
	if err != nil {
		r.t.Fatal(err)
	}
	return c.ID
}

func (r *rig) fork(id core.CheckpointID) core.SandboxID {
	r.t.Helper()
	f, err := r.Fork(r.t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{r.child()}})
	if err != nil {
		r.t.Fatal(err)
	}
	if p := f.Children[0].Problem; p != nil {
		r.t.Fatalf("fork: %+v", p)
	}
	return f.Children[0].SandboxID
}

func (r *rig) child() runnerapi.Child {
	r.next++
	return runnerapi.Child{
		SandboxID: core.NewID[core.SandboxID](), WorkspaceID: core.NewID[core.WorkspaceID](), Egress: core.EgressDenyAll,
		Identity: core.Identity{
			Generation: string(core.NewID[core.OperationID]()), Hostname: fmt.Sprintf("child-%d", r.next), MachineID: fmt.Sprintf("%032x", r.next+1),
			MAC: fmt.Sprintf("02:00:00:00:02:%02x", r.next), IP: netip.AddrFrom4([4]byte{10, 83, 2, byte(r.next)}),
		},
	}
}

func (r *rig) capture(id core.SandboxID) runnerapi.Checkpoint {
	r.t.Helper()
	c, err := r.Capture(r.t.Context(), id, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

func (r *rig) destroy(id core.SandboxID) {
	r.t.Helper()
	if err := r.Destroy(r.t.Context(), id); err != nil {
		r.t.Fatal(err)
	}
}

// sh runs a script in a sandbox and returns what it wrote.
func (r *rig) sh(id core.SandboxID, script string) string {
	r.t.Helper()
	spec, err := json.Marshal(guestapi.SessionSpec{Command: []string{"sh", "-euc", script}, Cwd: "/root"})
	if err != nil {
		r.t.Fatal(err)
	}
	var s guestapi.Session
	if err := json.Unmarshal(r.ask(id, http.MethodPost, guestapi.PathSessions, spec), &s); err != nil {
		r.t.Fatal(err)
	}
	path := guestapi.PathSessions + "/" + string(s.ID)
	for s.State != guestapi.SessionExited {
		if err := json.Unmarshal(r.ask(id, http.MethodGet, path+"/wait?timeout_ms=60000", nil), &s); err != nil {
			r.t.Fatal(err)
		}
	}
	out := string(r.ask(id, http.MethodGet, path+"/output?stream=stdout&offset=0", nil))
	if *s.ExitCode != 0 {
		r.t.Fatalf("%q ended with %d: %s%s", script, *s.ExitCode, out, r.ask(id, http.MethodGet, path+"/output?stream=stderr&offset=0", nil))
	}
	return out
}

func (r *rig) ask(id core.SandboxID, method, path string, body []byte) []byte {
	r.t.Helper()
	ctx, cancel := context.WithTimeout(r.t.Context(), 2*time.Minute)
	defer cancel()
	h, err := r.Guest(ctx, id, func(w http.ResponseWriter, _ *http.Request, err error) {
		w.WriteHeader(http.StatusBadGateway)
		_, _ = io.WriteString(w, err.Error())
	})
	if err != nil {
		r.t.Fatal(err)
	}
	req := httptest.NewRequestWithContext(ctx, method, path, bytes.NewReader(body))
	req.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	if w.Code >= http.StatusBadRequest {
		r.t.Fatalf("%s %s: %d %s", method, path, w.Code, w.Body)
	}
	return w.Body.Bytes()
}
