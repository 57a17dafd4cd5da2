package controller_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestStoredInputResumes stops a controller in the middle of a fork of a workspace, and puts the input of the operation into the words of
// earlier versions. Another controller ends the operation.
func TestStoredInputResumes(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.ShutdownGrace = time.Millisecond })
	ws := w.create("main")
	g := w.gate(runnertest.PointCapture)
	a, err := w.ForkWorkspace(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 2, AllOrNothing: true}, 0)
	if err != nil || a.Done {
		t.Fatalf("%+v, %v", a, err)
	}
	<-g.reached
	w.stop()
	close(g.open)

	conn, err := pgx.Connect(t.Context(), w.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.Close(t.Context()) }()
	children := ""
	for i, id := range controller.WorkspacesOf(a.Operation) {
		var sandbox string
		if err := conn.QueryRow(t.Context(), `SELECT id FROM sandboxes WHERE workspace_id = $1`, id).Scan(&sandbox); err != nil {
			t.Fatal(err)
		}
		if i > 0 {
			children += ","
		}
		children += fmt.Sprintf(`{"workspace_id":%q,"sandbox_id":%q}`, id, sandbox)
	}
	stored := fmt.Sprintf(`{"children":[%s],"all_or_nothing":true,"capture":%q,"epoch":%d,"sandbox":%q}`, children, a.Operation.CheckpointID, ws.Epoch, ws.Sandbox.ID)
	w.sql(`UPDATE operations SET input = $2 WHERE id = $1`, a.Operation.ID, stored)

	next, _ := w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
	end, err := next.Operation(t.Context(), w.project, a.Operation.ID, time.Minute)
	if err != nil || !end.Done || end.Operation.Problem != nil || len(end.Result.Children) != 2 {
		t.Fatalf("%+v, %v", end, err)
	}
	for _, child := range end.Result.Children {
		if child.Workspace == nil || child.Workspace.State != core.WorkspaceReady {
			t.Errorf("%+v", child)
		}
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("the captured workspace is %s", got)
	}
}
