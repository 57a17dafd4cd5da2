package e2e

import (
	"context"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// killRunnerAt kills the runner at a step of a capture.
func killRunnerAt(point string) func(*testing.T, *installation) {
	return func(t *testing.T, in *installation) {
		t.Helper()
		in.rearm(t, in.runner, point+"=kill")
		in.awaitParent(t)
		captured := make(chan error, 1)
		go func() {
			_, err := in.host.client.CreateCheckpoint(context.WithoutCancel(t.Context()), in.parent, coppice.CreateCheckpointRequest{})
			captured <- err
		}()
		select {
		case <-in.runner.ended:
		case <-time.After(time.Minute):
			t.Fatalf("the runner did not come by %s: %v", point, <-captured)
		}
		in.heal(t)
		_ = wantCode(t, <-captured, "RUNNER_LOST")
	}
}

// awaitParent waits until the parent can be worked with.
func (in *installation) awaitParent(t *testing.T) {
	t.Helper()
	until(t, "the parent is ready", func() (bool, error) {
		w, err := in.host.client.Workspace(t.Context(), in.parent)
		return w.State == coppice.WorkspaceReady && w.Condition != coppice.ConditionUnknown, err
	})
}

// show writes the end of every log.
func (in *installation) show(t *testing.T) {
	t.Helper()
	for _, s := range []*server{in.controllers[0], in.controllers[1], in.runner} {
		t.Logf("the %s's log ends with:\n%s", s.name, s.tail())
	}
}
