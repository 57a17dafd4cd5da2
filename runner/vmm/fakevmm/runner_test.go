package fakevmm_test

import (
	"context"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/test/testvm"
	"github.com/coppice-dev/coppice/runner"
	"github.com/coppice-dev/coppice/runner/fakenet"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// child asks for a sandbox.
func child(i int) runnerapi.Child {
	return runnerapi.Child{
		SandboxID: core.NewID[core.SandboxID](), WorkspaceID: core.NewID[core.WorkspaceID](), Epoch: 1,
		Identity: core.Identity{
			Generation: fmt.Sprintf("%s-%d", core.NewID[core.OperationID](), i), Hostname: fmt.Sprintf("h%d", i), MachineID: fmt.Sprintf("%032x", i),
			MAC: fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8&255, i&255), IP: netip.AddrFrom4([4]byte{10, 1, byte(i >> 8), byte(i)}),
		},
		Egress: core.EgressDenyAll,
	}
}

// TestRunner runs the whole runner on fake machines: a template, a thousand forks, a capture of one and forks of that.
func TestRunner(t *testing.T) {
	t.Parallel()
	const n = 1000
	store, image := testvm.FakeImage(t)
	driver := fakevmm.New(fakevmm.Config{})
	dir := t.TempDir()
	runDir, err := os.MkdirTemp("", "run") //nolint:usetesting // t.TempDir is too long for the path of a unix socket
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(runDir) })
	r, err := runner.New(t.Context(), runner.Config{
		ID: core.NewID[core.RunnerID](), ClusterID: "test", DataDir: filepath.Join(dir, "data"), RunDir: runDir, Driver: driver, Images: store,
		Network: fakenet.Network{}, Log: slog.New(slog.DiscardHandler), MaxSandboxes: n + 16, Parallel: 32,
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- r.Run(ctx) }()
	defer func() {
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		if left := driver.Machines(); left != 0 {
			t.Errorf("%d machines are left", left)
		}
	}()

	template, err := r.Template(t.Context(), runnerapi.Template{
		CheckpointID: core.NewID[core.CheckpointID](), Image: image.Digest, Resources: core.Resources{VCPUs: 1, MemoryMiB: memoryMiB},
	})
	if err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	first := fork(t, r, template.ID, n)
	t.Logf("%d forks by the runner in %s", n, time.Since(start).Round(time.Millisecond))
	captured, err := r.Capture(t.Context(), first[0], runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
	if err != nil {
		t.Fatal(err)
	}
	fork(t, r, captured.ID, 8)

	// A fork that is not completely resealed is destroyed.
	driver.Arm(fakevmm.Fault{Step: fakevmm.ResealStep(guestapi.StepMachineID), Kind: fakevmm.Lie, Times: 1})
	before := driver.Machines()
	out, err := r.Fork(t.Context(), runnerapi.Fork{CheckpointID: captured.ID, Children: []runnerapi.Child{child(1)}})
	if err != nil {
		t.Fatal(err)
	}
	if p := out.Children[0].Problem; p == nil || p.Code != core.CodeResealFailed {
		t.Errorf("a fork that lies is %+v", out.Children[0])
	}
	if now := driver.Machines(); now != before {
		t.Errorf("there are %d machines, were %d", now, before)
	}
}

func fork(t *testing.T, r *runner.Runner, id core.CheckpointID, n int) []core.SandboxID {
	t.Helper()
	req := runnerapi.Fork{CheckpointID: id}
	for i := range n {
		req.Children = append(req.Children, child(i))
	}
	out, err := r.Fork(t.Context(), req)
	if err != nil {
		t.Fatal(err)
	}
	ids := make([]core.SandboxID, 0, n)
	for _, c := range out.Children {
		if c.Problem != nil {
			t.Fatalf("a fork failed: %+v", c.Problem)
		}
		ids = append(ids, c.SandboxID)
	}
	return ids
}
