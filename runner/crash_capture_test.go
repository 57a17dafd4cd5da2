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

// TestFailedCaptureIsNotRepeated: a late copy of a request to suspend gets the answer of the first. The machine runs on.
func TestFailedCaptureIsNotRepeated(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(*Config) {})
	s := r.fork(r.boot())
	r.driver.Arm(fakevmm.Fault{Step: fakevmm.StepSave, Kind: fakevmm.Fail, Times: 1})
	suspend := runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID](), Stop: true}
	_, first := r.Capture(t.Context(), s, suspend)
	if first == nil {
		t.Fatal("the capture did not fail")
	}
	if _, again := r.Capture(t.Context(), s, suspend); again == nil || again.Error() != first.Error() {
		t.Errorf("the copy was answered with %v, the first with %v", again, first)
	}
	cleanup := r.crash()
	r.start()
	if _, again := r.Capture(t.Context(), s, suspend); core.CodeOf(again) != core.CodeRunnerLost {
		t.Errorf("the next runner answered the copy with %v", again)
	}
	r.wantOnly(s)
	for range maxRefusals {
		r.driver.Arm(fakevmm.Fault{Step: fakevmm.StepSave, Kind: fakevmm.Fail, Times: 1})
		if _, err := r.Capture(t.Context(), s, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()}); err == nil {
			t.Fatal("the capture did not fail")
		}
	}
	box, err := r.find(s)
	if err != nil {
		t.Fatal(err)
	}
	if len(box.refused) != maxRefusals || box.refused.of(suspend.CheckpointID) != nil {
		t.Errorf("%d refusals are kept, the oldest too", len(box.refused))
	}
	if _, err := r.Capture(t.Context(), s, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID](), Stop: true}); err != nil {
		t.Error(err)
	}
	r.wantOnly()
	r.stop()
	cleanup()
}
