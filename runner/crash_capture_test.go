package runner

import (
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// TestMachineDiesInCapture: it is reported with how it ended, not with what could then not be done with it.
func TestMachineDiesInCapture(t *testing.T) {
	t.Parallel()
	for _, step := range []fakevmm.Step{fakevmm.StepPause, fakevmm.StepSave, fakevmm.StepResume} {
		t.Run(string(step), func(t *testing.T) {
			t.Parallel()
			r := newFakeRig(t, func(*Config) {})
			template := r.boot()
			bystander, s := r.fork(template), r.fork(template)
			doomed, err := r.find(s)
			if err != nil {
				t.Fatal(err)
			}
			r.driver.Arm(fakevmm.Fault{Step: step, Kind: fakevmm.Die, Sandbox: doomed.ID, Times: 1})
			_, err = r.Capture(t.Context(), s, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
			if whole := step == fakevmm.StepResume; whole && err != nil || !whole && core.CodeOf(err) != core.CodeVMMFailed { // by then it has all of the checkpoint
				t.Errorf("its capture: %v", err)
			}
			deadline := time.After(time.Minute)
			for {
				got, err := r.Sandbox(s)
				if err != nil {
					t.Fatal(err)
				}
				if got.State == runnerapi.SandboxDead {
					if !strings.HasPrefix(got.Exit, "its VMM ended: ") {
						t.Errorf("it is reported as %q", got.Exit)
					}
					break
				}
				select {
				case <-deadline:
					t.Fatalf("it is %s", got.State)
				case <-time.After(time.Millisecond):
				}
			}
			<-doomed.gone
			r.wantOnly(bystander)
		})
	}
}
