package httpapi_test

import (
	"context"
	"testing"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/runnertest"
)

// holdForks makes the runner begin forks and not answer until the test ends. The channel tells of each that has begun.
func (w *world) holdForks() <-chan struct{} {
	w.t.Helper()
	begun, release := make(chan struct{}, 64), make(chan struct{})
	w.t.Cleanup(func() { close(release) })
	w.runner.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointFork {
			begun <- struct{}{}
			<-release
		}
		return nil
	})
	return begun
}

// TestCancelOperation: a fork that is under way is listed, is ended on request, and leaves nothing that could become ready.
func TestCancelOperation(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	begun := w.holdForks()
	var op api.Operation
	w.want(202, "POST", "/v1/checkpoints/"+cp.ID+"/fork?wait=0", map[string]any{"count": 2, "branch_name": "try"}, &op)
	answer := make(chan reply, 1)
	go func() {
		answer <- w.do(call{method: "POST", path: "/v1/workspaces/" + ws.ID + "/fork", body: `{}`})
	}()
	<-begun
	<-begun
	var list api.OperationList
	w.want(200, "GET", "/v1/operations?state=running&checkpoint_id="+cp.ID, nil, &list)
	if len(list.Items) != 1 || list.Items[0].ID != op.ID || len(list.Items[0].WorkspaceIDs) != 2 || !list.Items[0].CancelRequestedAt.IsZero() {
		t.Fatalf("running: %+v", list.Items)
	}
	children := list.Items[0].WorkspaceIDs
	for range 2 { // the second time it has ended
		w.want(200, "POST", "/v1/operations/"+op.ID+"/cancel", nil, &op)
		if op.State != api.OperationFailed || op.Problem == nil || op.Problem.Code != "OPERATION_CANCELED" || op.CancelRequestedAt.IsZero() {
			t.Errorf("canceled: %+v", op)
		}
	}
	for _, id := range children {
		var child api.Workspace
		w.want(200, "GET", "/v1/workspaces/"+id, nil, &child)
		if child.State != api.WorkspaceFailed || child.Failure == nil || child.Failure.Code != "OPERATION_CANCELED" {
			t.Errorf("child: %+v", child)
		}
	}

	// A fork of a running workspace keeps its checkpoint. Whoever waits for it is told.
	w.want(200, "GET", "/v1/operations?state=running&kind=fork_workspace&workspace_id="+ws.ID, nil, &list)
	if len(list.Items) != 1 {
		t.Fatalf("running: %+v", list.Items)
	}
	taken := list.Items[0].CheckpointID
	w.want(200, "POST", "/v1/operations/"+list.Items[0].ID+"/cancel", nil, &op)
	if got := <-answer; got.status != 409 || got.problem(t).Code != "OPERATION_CANCELED" || got.problem(t).OperationID != op.ID {
		t.Errorf("who waits gets %d %s", got.status, got.body)
	}
	var kept api.Checkpoint
	w.want(200, "GET", "/v1/checkpoints/"+taken, nil, &kept)
	w.want(200, "GET", "/v1/workspaces/"+ws.ID, nil, &ws)
	if kept.State != api.CheckpointCaptured && kept.State != api.CheckpointSealed || ws.State != api.WorkspaceReady || ws.CheckpointID != taken {
		t.Errorf("its checkpoint is %s, and the workspace %s at %s", kept.State, ws.State, ws.CheckpointID)
	}
	w.want(200, "GET", "/v1/operations?state=pending&state=running", nil, &list)
	if len(list.Items) != 0 {
		t.Errorf("still there: %+v", list.Items)
	}
	w.want(200, "GET", "/v1/operations?limit=1", nil, &list)
	if len(list.Items) != 1 || list.NextCursor == "" {
		t.Errorf("a page: %+v", list)
	}
}

// TestCancelTooLate: an operation that has ended stays as it is, and one that changes what was there is not canceled.
func TestCancelTooLate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	var list api.OperationList
	w.want(200, "GET", "/v1/operations?kind=create_workspace", nil, &list)
	if len(list.Items) != 1 || list.Items[0].State != api.OperationSucceeded || list.Items[0].Result != nil {
		t.Fatalf("created: %+v", list.Items)
	}
	var op api.Operation
	w.want(200, "POST", "/v1/operations/"+list.Items[0].ID+"/cancel", nil, &op)
	if op.State != api.OperationSucceeded || op.Result == nil || !op.CancelRequestedAt.IsZero() {
		t.Errorf("too late: %+v", op)
	}
	release := make(chan struct{})
	w.runner.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointCapture {
			<-release
		}
		return nil
	})
	w.want(202, "POST", "/v1/workspaces/"+ws.ID+"/suspend?wait=0", nil, &op)
	if got := w.do(call{method: "POST", path: "/v1/operations/" + op.ID + "/cancel"}); got.status != 409 || got.problem(t).Code != "OPERATION_NOT_CANCELABLE" {
		t.Errorf("a suspension: %d %s", got.status, got.body)
	}
	close(release)
	w.want(200, "GET", "/v1/operations/"+op.ID+"?wait=60", nil, &op)
	if op.State != api.OperationSucceeded {
		t.Errorf("it went on as %+v", op)
	}
}
