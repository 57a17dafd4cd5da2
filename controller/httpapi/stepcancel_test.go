package httpapi_test

import (
	"context"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/runnertest"
)

// TestCanceledStepShowsItsCheckpoint: a step of a workspace that is canceled while its checkpoint is made has failed, but says what its program
// did and which checkpoint there is.
func TestCanceledStepShowsItsCheckpoint(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	begun, goOn := make(chan struct{}), make(chan struct{})
	w.runner.Hook(func(ctx context.Context, point, _ string) error {
		if point != runnertest.PointCapture {
			return nil
		}
		close(begun)
		select {
		case <-goOn:
		case <-ctx.Done():
		}
		return nil
	})
	var op api.Operation
	w.want(202, "POST", "/v1/workspaces/"+ws.ID+"/step?wait=0", map[string]any{"command": []string{"inc"}}, &op)
	<-begun
	w.want(202, "POST", "/v1/operations/"+op.ID+"/cancel?wait=0", nil, &op)
	close(goOn)
	var ended struct {
		State   api.OperationState
		Problem *api.Failure
		Result  api.StepActionResult
	}
	w.want(200, "GET", "/v1/operations/"+op.ID+"?wait=60", nil, &ended)
	if ended.State != api.OperationFailed || ended.Problem == nil || ended.Problem.Code != "OPERATION_CANCELED" {
		t.Errorf("%+v", ended)
	}
	r := ended.Result
	if r.CheckpointID == "" || r.ExitCode == nil || *r.ExitCode != 0 {
		t.Fatalf("%+v", r)
	}
	var cp api.Checkpoint
	w.want(200, "GET", "/v1/checkpoints/"+r.CheckpointID, nil, &cp)
	if cp.State != api.CheckpointCaptured {
		t.Errorf("the checkpoint is %s", cp.State)
	}
}
