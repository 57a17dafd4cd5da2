package controller_test

import (
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestSuspendAtTTL: at the end of its time a workspace that asks for it is suspended, and a resume gives it all of its time
// again. Another one is terminated, as ever.
func TestSuspendAtTTL(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	create := func(name string, on controller.IdleAction) controller.Workspace {
		req := controller.CreateRequest{Name: name, Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}, TTL: time.Hour, IdlePolicy: controller.IdlePolicy{OnTTL: on}}
		a, err := w.CreateWorkspace(ctx, w.project, req, wait)
		if err != nil || a.Result.Workspace.IdlePolicy.OnTTL != on {
			t.Fatalf("%s: %+v, %v", name, a, err)
		}
		return *a.Result.Workspace
	}
	sleeper, goner := create("sleeper", controller.IdleSuspend), create("goner", "")
	w.sql(`UPDATE workspaces SET expires_at = now() - interval '1 s'`)
	eventually(t, "one is suspended and one is terminated", func() bool {
		return w.state(sleeper.ID) == core.WorkspaceSuspended && w.state(goner.ID) == core.WorkspaceTerminated
	})
	w.resume(sleeper.ID)
	now, err := w.Workspace(ctx, w.project, sleeper.ID)
	if left := time.Until(now.ExpiresAt); err != nil || now.State != core.WorkspaceReady || left < 30*time.Minute || left > 2*time.Hour {
		t.Errorf("after the resume it is %s and has %s left (%v)", now.State, left, err)
	}
	// What becomes of it may be changed, also while it sleeps.
	w.suspend(sleeper.ID)
	if now, err = w.PatchWorkspace(ctx, w.project, sleeper.ID, controller.WorkspacePatch{OnTTL: controller.IdleTerminate}); err != nil || now.IdlePolicy.OnTTL != "" {
		t.Errorf("%+v (%v)", now.IdlePolicy, err)
	}
	w.sql(`UPDATE workspaces SET expires_at = now() - interval '1 s' WHERE id = $1`, sleeper.ID)
	eventually(t, "it is terminated", func() bool { return w.state(sleeper.ID) == core.WorkspaceTerminated })
	w.consistent()
}

// TestSuspendAtTTLObeysTheQuota: without room for a checkpoint a workspace goes on, and is suspended when there is room.
func TestSuspendAtTTLObeysTheQuota(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ctx := t.Context()
	req := controller.CreateRequest{Name: "full", Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}, TTL: time.Hour, IdlePolicy: controller.IdlePolicy{OnTTL: controller.IdleSuspend}}
	a, err := w.CreateWorkspace(ctx, w.project, req, wait)
	if err != nil {
		t.Fatal(err)
	}
	id := a.Result.Workspace.ID
	w.quota(func(p *controller.QuotasPatch) { p.Checkpoints = new(int64(0)) })
	w.sql(`UPDATE workspaces SET expires_at = now() - interval '1 s'`)
	eventually(t, "it is tried", func() bool { return w.number(`SELECT suspend_tries FROM workspaces WHERE id = $1`, id) == 1 })
	if got := w.state(id); got != core.WorkspaceReady || w.number(`SELECT count(*) FROM operations WHERE kind = 'suspend_workspace'`) != 0 {
		t.Errorf("without room it is %s", got)
	}
	w.quota(func(p *controller.QuotasPatch) { p.Checkpoints = new(int64(100)) })
	w.sql(`UPDATE workspaces SET suspend_next_at = now()`) // the pause ends
	eventually(t, "it is suspended", func() bool { return w.state(id) == core.WorkspaceSuspended })
	w.consistent()
}
