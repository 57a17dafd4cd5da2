package runner

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/journal"
)

// TestStopLeavesNoVMM stops a runner in the middle of a boot and of a fork: nothing may be left of either, nor of what waits
// for a CPU. The rig's stop looks.
func TestStopLeavesNoVMM(t *testing.T) { //nolint:paralleltest // its machines take both CPUs
	t.Run("boot", func(t *testing.T) {
		r := newRig(t, func(*Config) {})
		ended := make(chan error, 1)
		go func() {
			_, err := r.Template(t.Context(), runnerapi.Template{
				CheckpointID: core.NewID[core.CheckpointID](), Image: r.image.Digest,
				Resources: core.Resources{VCPUs: 1, MemoryMiB: 256, DiskGiB: 1},
			})
			ended <- err
		}()
		r.awaitShell()
		r.stop()
		if err := <-ended; !errors.Is(err, errStopping) {
			t.Errorf("the boot ended with %v", err)
		}
	})
	t.Run("fork", func(t *testing.T) {
		r := newRig(t, func(c *Config) { c.Parallel = 1 })
		ckpt := r.template()
		children := make([]runnerapi.Child, 3)
		for i := range children {
			children[i] = r.child()
		}
		ended := make(chan runnerapi.ForkResult, 1)
		go func() {
			f, err := r.Fork(context.WithoutCancel(t.Context()), runnerapi.Fork{CheckpointID: ckpt, Children: children})
			if err != nil {
				t.Error(err)
			}
			ended <- f
		}()
		r.awaitShell()
		r.stop()
		failed := 0
		for _, c := range (<-ended).Children {
			if c.Problem != nil {
				failed++
			}
		}
		if failed < 2 {
			t.Errorf("%d of 3 children failed; one at a time is forked", failed)
		}
	})
}

// awaitShell waits until there is a VMM.
func (r *rig) awaitShell() {
	r.t.Helper()
	deadline := time.After(time.Minute)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for {
		journals, err := filepath.Glob(filepath.Join(r.cfg.RunDir, "*", journal.File))
		if err != nil {
			r.t.Fatal(err)
		}
		for _, j := range journals {
			if b, err := os.ReadFile(j); err == nil && bytes.Contains(b, []byte(`"handle"`)) {
				return
			}
		}
		select {
		case <-tick.C:
		case <-deadline:
			r.t.Fatal("no VMM was started")
		}
	}
}
