package runner

import (
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// TestNewBaseIsNotCollected removes unused bases while one is on disk that no record names yet: that one stays, and so does what
// is made of it.
func TestNewBaseIsNotCollected(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	for _, point := range []string{"template.after_base", "rebase.after_base"} {
		t.Run(point, func(t *testing.T) { //nolint:paralleltest // see above
			r := newFakeRig(t, func(c *Config) { c.Rebase.Off = true })
			made := make(chan core.CheckpointID, 1)
			template := func() { made <- r.boot() }
			if point == "rebase.after_base" {
				s := r.fork(r.boot())
				c, err := r.Capture(t.Context(), s, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
				if err != nil {
					t.Fatal(err)
				}
				template = func() {
					if err := r.Rebase(c.ID); err != nil {
						t.Error(err)
					}
					made <- c.ID
				}
			}
			armed, err := failpoint.Arm(point, failpoint.Action{Kind: failpoint.Hang})
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(armed.Disarm)
			go template()
			select {
			case <-armed.Reached():
			case <-time.After(time.Minute):
				t.Fatal("the step was not reached")
			}
			if err := r.checkpoints.Collect(); err != nil {
				t.Error(err)
			}
			armed.Release()
			id := <-made
			r.fork(id)
			c, err := r.Checkpoint(id)
			if err != nil {
				t.Fatal(err)
			}
			// What nothing names or uses any more does go.
			for _, s := range r.Sandboxes() {
				if err := r.Destroy(t.Context(), s.ID); err != nil {
					t.Fatal(err)
				}
			}
			for _, cp := range r.Checkpoints() {
				if err := r.DeleteCheckpoint(cp.ID); err != nil {
					t.Fatal(err)
				}
			}
			if left, err := r.bases.List(); err != nil || len(left) > 0 {
				t.Errorf("the bases %v are left, %s among them? (%v)", left, c.Base, err)
			}
		})
	}
}
