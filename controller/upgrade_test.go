package controller_test

import (
	"net/netip"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestUpgradeOrder is what docs/OPERATIONS.md says of upgrades in the wrong order: the controller is new, and a runner of the
// release before refuses fields that it does not know. Workspaces that run go on. What would make a new machine is refused, in
// words, and leaves nothing behind. It works once the runner is upgraded.
func TestUpgradeOrder(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	w := newWorld(t, store)
	ws := w.createAllowing("main", "a.example")
	cp := w.checkpoint(ws.ID)
	w.seal(files, ws.Parent, cp.ID)
	w.runner.SetOld(true)
	before := len(w.runner.Sandboxes())

	refused := func(what string, err error) {
		t.Helper()
		if err == nil || !strings.Contains(err.Error(), "unknown field") || !strings.Contains(err.Error(), "expected") && !strings.Contains(err.Error(), "parent") {
			t.Errorf("%s on an old runner: %v", what, err)
		}
	}
	_, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
	refused("fork", err)
	_, err = w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait)
	refused("restore", err)
	_, err = w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Name: "new", Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}}, wait)
	refused("create", err)
	if n := len(w.runner.Sandboxes()); n != before {
		t.Errorf("%d sandboxes are left of what was refused", n-before)
	}

	// What runs goes on.
	w.beat()
	if state := w.state(ws.ID); state != core.WorkspaceReady {
		t.Fatalf("the workspace that ran is %s", state)
	}
	got, err := w.Exec(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"echo", "on"}})
	if err != nil || string(got.Stdout) != "on\n" {
		t.Errorf("exec: %q, %v", got.Stdout, err)
	}
	w.mustAllow(ws.ID, "a.example", "b.example")
	w.wantRules(ws.ID, "a.example", "b.example")
	if _, err := w.Ports().Open(t.Context(), w.project, ws.ID, 80, netip.MustParseAddrPort("127.0.0.1:0")); err != nil {
		t.Errorf("port: %v", err)
	}
	_, err = w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, wait)
	refused("checkpoint", err)
	_, err = w.Suspend(t.Context(), w.project, ws.ID, wait)
	refused("suspend", err)
	if state := w.state(ws.ID); state != core.WorkspaceReady {
		t.Errorf("after a suspension that was refused it is %s", state)
	}

	w.runner.SetOld(false)
	later := w.checkpoint(ws.ID)
	asleep := w.suspend(ws.ID)
	w.runner.SetOld(true)
	_, err = w.Resume(t.Context(), w.project, ws.ID, wait)
	refused("resume", err)
	if state := w.state(ws.ID); state != core.WorkspaceSuspended {
		t.Errorf("after a resume that was refused it is %s", state)
	}

	w.runner.SetOld(false)
	w.resume(asleep.ID)
	w.fork(later.ID, 1)
	w.fork(cp.ID, 1)
	w.consistent()
}
