package controller_test

import (
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestAllowAllIsTheOperators has a workspace and a checkpoint under allow-all from when it was allowed. Then it is not, and no new sandbox is
// made under it, in whatever way.
func TestAllowAllIsTheOperators(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	set := func(to controller.AllowAll) {
		t.Helper()
		w.quota(func(p *controller.QuotasPatch) { p.AllowAll = &to })
	}
	small := core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}
	open := controller.CreateRequest{Resources: small, Egress: core.EgressAllowAll}
	a, err := w.CreateWorkspace(t.Context(), w.project, open, wait)
	if err != nil {
		t.Fatal(err)
	}
	ws := *a.Result.Workspace
	cp := w.checkpoint(ws.ID)
	if _, err := w.Suspend(t.Context(), w.project, w.fork(cp.ID, 1)[0].ID, wait); err != nil {
		t.Fatal(err)
	}
	suspended, err := w.Workspaces(t.Context(), w.project, controller.WorkspaceFilter{Page: controller.Page{Limit: 5}, Parent: cp.ID})
	if err != nil || len(suspended) != 1 {
		t.Fatal(suspended, err)
	}
	closed, _ := w.startOn(openStore(t, w.dsn), controller.Config{ClusterID: "test"}) // of an operator who does not allow it
	tries := map[string]func(c *controller.Controller) error{
		"create": func(c *controller.Controller) error {
			_, err := c.CreateWorkspace(t.Context(), w.project, open, wait)
			return err
		},
		"fork": func(c *controller.Controller) error {
			_, err := c.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
			return err
		},
		"fork of a workspace": func(c *controller.Controller) error {
			_, err := c.ForkWorkspace(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 1}, wait)
			return err
		},
		"restore as another": func(c *controller.Controller) error {
			_, err := c.RestoreCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{}, wait)
			return err
		},
		"restore in place": func(c *controller.Controller) error {
			_, err := c.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait)
			return err
		},
		"resume": func(c *controller.Controller) error {
			_, err := c.Resume(t.Context(), w.project, suspended[0].ID, wait)
			return err
		},
	}
	forbidden := func(c *controller.Controller, when string) {
		t.Helper()
		for name, try := range tries {
			if err := try(c); core.CodeOf(err) != core.CodeEgressForbidden {
				t.Errorf("%s, %s: %v", when, name, err)
			}
		}
	}
	forbidden(closed, "the operator does not allow it")
	set(controller.AllowAllDenied)
	forbidden(w.Controller, "the project is denied it")
	if _, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1, Egress: core.EgressDenyAll}, wait); err != nil {
		t.Errorf("with deny-all: %v", err)
	}
	set(controller.AllowAllAllowed)
	for _, name := range []string{"create", "fork", "resume", "restore in place"} {
		if err := tries[name](closed); err != nil {
			t.Errorf("the project is allowed it, %s: %v", name, err)
		}
	}
}
