package controller_test

import (
	"context"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestProjectFullOfSessions fills the sessions of a whole project: the rows of machines that ended count until they are swept.
// New sessions are refused with what to do, in every workspace of the project. What runs goes on, another project has its own
// room, and there is room again when sessions are swept.
func TestProjectFullOfSessions(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) {
		c.SessionQuota = controller.SessionQuota{Workspace: 3, Project: 9}
	})
	most := int64(2)
	w.quota(func(p *controller.QuotasPatch) { p.Workspaces = &most })
	count := func() {
		t.Helper()
		if err := w.store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error {
			_, err := tx.CountSessions(t.Context(), "", 1000)
			return err
		}); err != nil {
			t.Fatal(err)
		}
	}
	start := func(project core.ProjectID, id core.WorkspaceID) (controller.SessionView, error) {
		return w.StartSession(t.Context(), project, id, controller.ExecRequest{Command: []string{"sleep", "1000"}})
	}
	// A controller counts now and then by itself, so the count may be of now: there is room until the last session has begun.
	ws := w.create("long")
	running, err := start(w.project, ws.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, sessions := range []int{3, 3, 2} { // whose rows are left
		ws := w.create("short")
		for range sessions {
			if _, err := start(w.project, ws.ID); err != nil {
				t.Fatal(err)
			}
		}
		if _, err := w.Terminate(t.Context(), w.project, ws.ID, wait); err != nil {
			t.Fatal(err)
		}
	}
	count()
	full := func(id core.WorkspaceID) {
		t.Helper()
		_, err := start(w.project, id)
		wantCode(t, err, core.CodeQuotaExceeded)
		if core.CategoryOf(err) != core.Exhausted || !strings.Contains(err.Error(), "delete ended sessions, or wait a minute") {
			t.Errorf("%s: %v", core.CategoryOf(err), err)
		}
		_, err = w.Exec(t.Context(), w.project, id, controller.ExecRequest{Command: []string{"true"}})
		wantCode(t, err, core.CodeQuotaExceeded)
	}
	full(ws.ID)
	other := w.create("other")
	full(other.ID)
	if got, err := w.Session(t.Context(), w.project, running.ID, 0); err != nil || got.Guest.State != "running" {
		t.Errorf("a session that runs: %+v, %v", got.Guest, err)
	}
	if list, err := w.Sessions(t.Context(), w.project, ws.ID, controller.Page{Limit: 10}); err != nil || len(list) != 1 {
		t.Errorf("its workspace has %d sessions, %v", len(list), err)
	}
	if err := w.SignalSession(t.Context(), w.project, running.ID, "TERM"); err != nil {
		t.Error(err)
	}
	project, theirs := w.other()
	if _, err := start(project, theirs); err != nil {
		t.Errorf("in another project: %v", err)
	}
	sweep := func(ctx context.Context, tx controller.AllTx) error {
		_, n, err := tx.SweepSessions(ctx, "", 0, 100)
		if n != 8 {
			t.Errorf("%d rows were swept", n)
		}
		return err
	}
	if err := w.store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error { return sweep(t.Context(), tx) }); err != nil {
		t.Fatal(err)
	}
	count()
	for _, id := range []core.WorkspaceID{ws.ID, other.ID} {
		if _, err := start(w.project, id); err != nil {
			t.Errorf("with room again: %v", err)
		}
	}
}
