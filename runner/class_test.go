package runner

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// wantIncompatible wants an error that names the field.
func wantIncompatible(t *testing.T, what string, err error, field string) {
	t.Helper()
	if core.CodeOf(err) != core.CodeIncompatibleHost || !strings.Contains(core.MessageOf(err), field) {
		t.Errorf("%s: got %v, want %s with %q", what, err, core.CodeIncompatibleHost, field)
	}
}

func (r *fakeRig) tryFork(id core.CheckpointID) error {
	_, err := r.Fork(r.t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{r.child()}})
	return err
}

// record is what was logged. The runner goes on to write it.
type record struct {
	mu   sync.Mutex // guards text
	text strings.Builder
}

func (r *record) Write(b []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(b)
}

func (r *record) String() string {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.String()
}

// TestAnotherVMM restarts a runner with another VMM: what runs goes on under its own, what it is captured as says so, and nothing of one
// is forked by the other.
func TestAnotherVMM(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(*Config) {})
	template := r.boot()
	old := r.fork(template)
	before := r.capture(old)
	first, second := r.driver, fakevmm.New(fakevmm.Config{Fingerprint: vmm.Fingerprint{VMM: "other", Version: "53.0"}})
	cleanup := r.crash()
	r.use(second)
	var log record
	r.cfg.Log = slog.New(slog.NewTextHandler(io.MultiWriter(&log, t.Output()), nil))
	r.start()
	r.cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	r.wantOnly(old)
	if want := `count=2 difference="its vmm is \"fake\" and the runner's is \"other\""`; !strings.Contains(log.String(), want) {
		t.Errorf("what it says at the start has no %s:\n%s", want, log.String())
	}
	const field = `its vmm is "fake" and the runner's is "other"`
	for name, id := range map[string]core.CheckpointID{"template": template, "checkpoint": before} {
		wantIncompatible(t, name, r.tryFork(id), field)
	}
	for name, req := range map[string]runnerapi.Capture{"suspend": {Stop: true}, "fork": {Fork: true}} {
		req.CheckpointID = core.NewID[core.CheckpointID]()
		_, err := r.Capture(t.Context(), old, req)
		wantIncompatible(t, name, err, field)
		if _, err := r.Checkpoint(req.CheckpointID); core.CodeOf(err) != core.CodeCheckpointNotFound {
			t.Errorf("%s: a checkpoint is there: %v", name, err)
		}
	}
	after := r.capture(old)
	if c, err := r.Checkpoint(after); err != nil || c.Class.VMM != "fake" || c.Class.VMMVersion != "1" || c.Parent != before {
		t.Errorf("what was captured of the other VMM: %+v, %v", c, err)
	}
	fresh := r.fork(r.boot())
	r.wantOnly(old, fresh)
	if first.Machines() != 1 || second.Machines() != 1 {
		t.Errorf("%d machines are on the first VMM and %d on the second", first.Machines(), second.Machines())
	}
	newer := r.capture(fresh)
	if c, err := r.Checkpoint(newer); err != nil || c.Class.VMM != "other" || c.Class.VMMVersion != "53.0" {
		t.Errorf("what was captured of the new VMM: %+v, %v", c, err)
	}

	again := r.crash()
	r.use(first)
	r.start()
	r.wantOnly(old, fresh)
	child := r.fork(after)
	r.wantOnly(old, fresh, child)
	wantIncompatible(t, "back on the first", r.tryFork(newer), `its vmm is "other" and the runner's is "fake"`)
	r.stop()
	r.wantOnly()
	cleanup()
	again()
}

// TestAnotherVMMLeavesNothing: what the VMM of before left and nobody goes on with is ended, where no journal leads to it too.
func TestAnotherVMMLeavesNothing(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(c *Config) { c.Warm = 2 })
	template := r.boot()
	id := r.fork(template)
	stray, err := r.driver.Spawn(t.Context(), vmm.Spec{
		ID: core.NewID[core.SandboxID](), Cluster: r.clusterHash, Dir: t.TempDir(), VCPUs: 1, MemoryMiB: fakeMiB, Base: mustFind(t, r, id).base.File(),
	})
	if err != nil {
		t.Fatal(err)
	}
	cleanup := r.crash()
	r.use(fakevmm.New(fakevmm.Config{Fingerprint: vmm.Fingerprint{VMM: "other"}}))
	r.start()
	r.wantOnly(id)
	select {
	case <-stray.Done():
	case <-t.Context().Done():
	}
	cleanup()
}

func mustFind(t *testing.T, r *fakeRig, id core.SandboxID) *sandbox {
	t.Helper()
	s, err := r.find(id)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// TestUpgrade restarts a runner whose VMM, accelerator or CPU is not what it was: the machines that run are still what they were.
func TestUpgrade(t *testing.T) {
	t.Parallel()
	for field, fp := range map[string]vmm.Fingerprint{
		"vmm_version": {Version: "2"}, "machine_type": {MachineType: "fake-2"}, "accelerator": {Accelerator: "kvm"}, "cpu_model": {CPUModel: "host:other"},
	} {
		t.Run(field, func(t *testing.T) {
			t.Parallel()
			r := newFakeRig(t, func(*Config) {})
			template := r.boot()
			id := r.fork(template)
			cleanup := r.crash()
			r.driver.Become(fp)
			r.start()
			r.wantOnly(id)
			wantIncompatible(t, "template", r.tryFork(template), "its "+field+" is")
			wantIncompatible(t, "checkpoint of what runs on", r.tryFork(r.capture(id)), "its "+field+" is")
			_, err := r.Capture(context.WithoutCancel(t.Context()), id, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID](), Stop: true})
			wantIncompatible(t, "suspend", err, "its "+field+" is")
			r.wantOnly(id, r.fork(r.boot()))
			cleanup()
		})
	}
}
