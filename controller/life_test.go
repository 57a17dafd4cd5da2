package controller_test

import (
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

func TestLife(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	if ws.State != core.WorkspaceReady || ws.Epoch != 1 || ws.Name != "main" || ws.Sandbox.Identity.Hostname != "main" || ws.Parent == "" || ws.Head != ws.Parent {
		t.Fatalf("created: %+v", ws)
	}
	root, err := w.Tree.Checkpoint(t.Context(), w.project, ws.Parent)
	if err != nil {
		t.Fatal(err)
	}
	if root.Kind != controller.KindTemplate || root.State != core.CheckpointCaptured || root.Depth != 0 || root.Root != root.ID {
		t.Fatalf("template: %+v", root)
	}

	cp1 := w.checkpoint(ws.ID)
	cp2 := w.checkpoint(ws.ID)
	if cp1.Parent != root.ID || cp2.Parent != cp1.ID || cp2.Depth != 2 || cp2.Root != root.ID || cp2.DeltaBytes == 0 || len(cp2.ParentReseal) == 0 {
		t.Fatalf("checkpoints: %+v, %+v", cp1, cp2)
	}
	children := w.fork(cp1.ID, 3)
	seen := map[string]bool{}
	for _, c := range children {
		id := c.Sandbox.Identity
		for _, v := range []string{id.Generation, id.Hostname, id.MachineID, id.MAC, id.IP.String()} {
			if seen[v] || v == "" {
				t.Errorf("%q is shared or empty", v)
			}
			seen[v] = true
		}
		if c.State != core.WorkspaceReady || c.Head != cp1.ID || c.Parent != cp1.ID {
			t.Errorf("child: %+v", c)
		}
	}

	a, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp1.ID, wait)
	if err != nil {
		t.Fatal(err)
	}
	back := *a.Result.Workspace
	if back.Epoch != 2 || back.State != core.WorkspaceReady || back.Head != cp1.ID || back.Sandbox.ID == ws.Sandbox.ID || a.Result.Reseal == nil ||
		back.Sandbox.Identity.IP == ws.Sandbox.Identity.IP || back.Sandbox.Identity.Hostname == ws.Sandbox.Identity.Hostname {
		t.Fatalf("restored: %+v", back)
	}
	cp3 := w.checkpoint(ws.ID)
	if cp3.Parent != cp1.ID || cp3.WorkspaceEpoch != 2 {
		t.Fatalf("after the restore the tree must grow from the restored node: %+v", cp3)
	}

	a, err = w.ForkWorkspace(t.Context(), w.project, ws.ID, controller.CheckpointRequest{Name: "branch-point"}, controller.ForkRequest{Count: 2, Name: "try"}, wait)
	if err != nil {
		t.Fatal(err)
	}
	if a.Result.Checkpoint.Name != "branch-point" || a.Result.Checkpoint.Parent != cp3.ID || len(a.Result.Children) != 2 ||
		a.Result.Children[0].Workspace.Name != "try-1" || a.Result.Children[1].Workspace.Name != "try-2" || w.state(ws.ID) != core.WorkspaceReady {
		t.Fatalf("fork of a workspace: %+v", a)
	}
	again, err := w.Operation(t.Context(), w.project, a.Operation.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(names(a), names(again)); diff != "" || again.Result.Checkpoint.ID != a.Result.Checkpoint.ID || again.Result.Children[1].Reseal == nil {
		t.Fatalf("the operation, read again: %s %+v", diff, again)
	}

	for range 2 { // idempotent
		a, err = w.Terminate(t.Context(), w.project, ws.ID, wait)
		if err != nil || a.Result.Workspace.State != core.WorkspaceTerminated || a.Result.Workspace.Sandbox.ID != "" {
			t.Fatalf("terminate: %+v, %v", a, err)
		}
	}
	if n := len(w.runner.Sandboxes()); n != 5 {
		t.Errorf("the runner holds %d sandboxes, want the 5 forks", n)
	}
	nodes, err := w.Tree.Subtree(t.Context(), w.project, root.ID, controller.TreePage{Page: controller.Page{Limit: 100}, MaxDepth: -1})
	if err != nil || len(nodes) != 5 || nodes[0].Checkpoint.ID != root.ID || len(nodes[1].Workspaces) != 3 {
		t.Errorf("tree: %d nodes, %+v, %v", len(nodes), nodes, err)
	}
}

func names(a controller.Answer) []string {
	var list []string
	for _, c := range a.Result.Children {
		list = append(list, c.Workspace.Name)
	}
	return list
}

func TestCreatorsShareOneTemplate(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *controller.Config, rc *runnertest.Config) { rc.Template = 200 * time.Millisecond })
	const n = 8
	got := make(chan controller.Workspace, n)
	for range n {
		go func() {
			a, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 2}}, wait)
			if err != nil || a.Result.Workspace == nil {
				t.Errorf("create: %+v, %v", a, err)
				got <- controller.Workspace{}
				return
			}
			got <- *a.Result.Workspace
		}()
	}
	parents := map[core.CheckpointID]bool{}
	for range n {
		parents[(<-got).Parent] = true
	}
	if len(parents) != 1 || w.runner.Calls(runnertest.PointTemplate) != 1 {
		t.Errorf("%d templates, made by %d calls", len(parents), w.runner.Calls(runnertest.PointTemplate))
	}
}
