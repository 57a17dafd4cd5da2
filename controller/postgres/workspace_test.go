package postgres_test

import (
	"context"
	"errors"
	"slices"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/core"
)

func TestWorkspaces(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	a, b := d.plan(d.project, from), d.plan(d.project, from)
	d.mine(func(ctx context.Context, tx controller.AllTx) error { return insert(ctx, tx, a, b) })
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		got, err := tx.Workspace(ctx, a.ID)
		if err != nil || got.State != core.WorkspaceRestoring || got.Head != from.ID || got.Parent != from.ID || got.Sandbox.Identity != a.Sandbox.Identity ||
			got.Sandbox.Endpoint == "" || got.Env["A"] != "1" || got.Unknown {
			t.Errorf("%+v, %v", got, err)
		}
		list, err := tx.ReadyWorkspaces(ctx, []controller.ReadyWorkspace{
			{ID: b.ID, Epoch: 1, Sandbox: b.Sandbox.ID}, {ID: a.ID, Epoch: 2, Sandbox: a.Sandbox.ID}, // a's epoch is another
		})
		if err != nil || len(list) != 1 || list[0].ID != b.ID || list[0].ReadyAt.IsZero() || list[0].Sandbox.ID != b.Sandbox.ID {
			t.Errorf("ready: %+v, %v", list, err)
		}
		list, err = tx.WorkspacesByID(ctx, []core.WorkspaceID{b.ID, a.ID, core.NewID[core.WorkspaceID]()})
		if err != nil || len(list) != 2 || list[0].ID != b.ID {
			t.Errorf("by id: %+v, %v", list, err)
		}
		list, err = tx.HeadWorkspaces(ctx, []core.CheckpointID{from.ID})
		if err != nil || len(list) != 2 {
			t.Errorf("heads: %+v, %v", list, err)
		}
		return nil
	})
	if err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.MoveWorkspace(ctx, a.ID, 1, core.WorkspaceCheckpointing)
		return err
	}); core.CodeOf(err) != core.CodeStateConflict {
		t.Errorf("restoring to checkpointing: %v", err)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		why := &controller.Failure{Code: "X", Message: "because"}
		list, err := tx.EndWorkspaces(ctx, []controller.EndedWorkspace{{ID: a.ID, To: core.WorkspaceFailed, Failure: why}, {ID: b.ID, To: core.WorkspaceFailed, Failure: why}})
		if err != nil || len(list) != 1 || list[0].ID != a.ID || list[0].Failure.Message != "because" || list[0].Sandbox.ID != "" {
			t.Errorf("only what is not ready can fail: %+v, %v", list, err)
		}
		if left, err := tx.WorkspaceSandboxes(ctx, a.ID); err != nil || len(left) != 0 {
			t.Errorf("sandboxes of a failed workspace: %+v, %v", left, err)
		}
		both, err := tx.Sandboxes(ctx, []core.SandboxID{a.Sandbox.ID, b.Sandbox.ID})
		if err != nil || len(both) != 2 {
			t.Errorf("ended sandboxes are still known: %+v, %v", both, err)
		}
		return nil
	})
	// The name is free again, the identity too.
	again := a
	again.ID, again.Sandbox.ID = core.NewID[core.WorkspaceID](), core.NewID[core.SandboxID]()
	again.Sandbox.WorkspaceID, again.Sandbox.Identity.Generation = again.ID, "g-other"
	d.mine(func(ctx context.Context, tx controller.AllTx) error { return insert(ctx, tx, again) })
	again.Name = b.Name
	again.ID = core.NewID[core.WorkspaceID]()
	wantCode(t, d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.InsertWorkspaces(ctx, []controller.Workspace{again}, 0)
		return err
	}), core.CodeNameTaken)
	// Another project may use the name.
	elsewhere := d.plan(d.newProject("other"), from)
	elsewhere.Name = b.Name
	d.in(controller.InProject(elsewhere.ProjectID), func(ctx context.Context, tx controller.AllTx) error { return insert(ctx, tx, elsewhere) })
}

func TestListWorkspaces(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	var all []controller.Workspace
	for range 5 {
		all = append(all, d.ready(d.project, from))
	}
	cp := d.node(all[0], from.ID)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if _, err := tx.MoveWorkspace(ctx, all[0].ID, 1, core.WorkspaceCheckpointing); err != nil {
			return err
		}
		w, err := tx.CapturedWorkspace(ctx, all[0].ID, 1, &cp)
		if err != nil || w.Head != cp.ID || w.Parent != from.ID || w.State != core.WorkspaceReady {
			t.Errorf("captured: %+v, %v", w, err)
		}
		return err
	})
	value := "v"
	for name, c := range map[string]struct {
		filter controller.WorkspaceFilter
		want   int
	}{
		"all":       {controller.WorkspaceFilter{Page: page(10)}, 5},
		"limit":     {controller.WorkspaceFilter{Page: page(2)}, 2},
		"name":      {controller.WorkspaceFilter{Page: page(10), Name: all[1].Name}, 1},
		"suffix":    {controller.WorkspaceFilter{Page: page(10), IDSuffix: core.Short(all[2].ID)}, 1},
		"states":    {controller.WorkspaceFilter{Page: page(10), States: []core.WorkspaceState{core.WorkspaceFailed, core.WorkspaceLost}}, 0},
		"head":      {controller.WorkspaceFilter{Page: page(10), Head: cp.ID}, 1},
		"parent":    {controller.WorkspaceFilter{Page: page(10), Parent: from.ID}, 5},
		"label":     {controller.WorkspaceFilter{Page: page(10), Labels: map[string]*string{"k": &value}}, 5},
		"label key": {controller.WorkspaceFilter{Page: page(10), Labels: map[string]*string{"k": nil}}, 5},
		"no label":  {controller.WorkspaceFilter{Page: page(10), Labels: map[string]*string{"x": nil, "k": &value}}, 0},
	} {
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			list, err := tx.Workspaces(ctx, c.filter)
			if len(list) != c.want {
				t.Errorf("%s: %d, want %d", name, len(list), c.want)
			}
			return err
		})
	}
	var ids []core.WorkspaceID
	for after := ""; ; {
		var list []controller.Workspace
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			list, err = tx.Workspaces(ctx, controller.WorkspaceFilter{Page: controller.Page{After: after, Limit: 2}})
			return err
		})
		if len(list) == 0 {
			break
		}
		for _, w := range list {
			ids = append(ids, w.ID)
		}
		after = string(list[len(list)-1].ID)
	}
	if len(ids) != 5 || !slices.IsSortedFunc(ids, func(a, b core.WorkspaceID) int { return -compare(a, b) }) {
		t.Errorf("pages: %v", ids)
	}
}

func compare[T ~string](a, b T) int {
	if a < b {
		return -1
	}
	if a > b {
		return 1
	}
	return 0
}

func TestPatchWorkspace(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	patch := func(p controller.WorkspacePatch) (controller.Workspace, error) {
		var got controller.Workspace
		err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			var err error
			got, err = tx.PatchWorkspace(ctx, w.ID, p)
			return err
		})
		return got, err
	}
	value, hour, none := "1", time.Hour, time.Duration(0)
	got, err := patch(controller.WorkspacePatch{Version: 1, Labels: map[string]*string{"k": nil, "n": &value}, TTL: &hour})
	if err != nil || got.Version != 2 || len(got.Labels) != 1 || got.Labels["n"] != "1" || time.Until(got.ExpiresAt) < 50*time.Minute {
		t.Errorf("%+v, %v", got, err)
	}
	_, err = patch(controller.WorkspacePatch{Version: 1})
	var conflict *controller.VersionConflictError
	if !errors.As(err, &conflict) || conflict.Current != 2 || core.CodeOf(err) != core.CodeVersionConflict {
		t.Errorf("stale: %v", err)
	}
	if got, err = patch(controller.WorkspacePatch{TTL: &none}); err != nil || !got.ExpiresAt.IsZero() || got.Labels["n"] != "1" {
		t.Errorf("%+v, %v", got, err)
	}
	d.exec(`UPDATE workspaces SET expires_at = now() - interval '1 s'`)
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		due, err := tx.ExpiredWorkspaces(ctx, 10)
		if len(due) != 1 || due[0].ID != w.ID {
			t.Errorf("due: %+v", due)
		}
		return err
	})
}

// TestRestoreHasTwoSandboxes follows a restore in place through the rows.
func TestRestoreHasTwoSandboxes(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	cp := d.node(w, w.Head)
	next := controller.Sandbox{
		ID: core.NewID[core.SandboxID](), ProjectID: d.project, WorkspaceID: w.ID, Epoch: 2, RunnerID: d.runner, Resources: shape, Identity: d.identity("w-next"),
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if _, err := tx.MoveWorkspace(ctx, w.ID, 1, core.WorkspaceRestoring); err != nil {
			return err
		}
		tx.InsertSandboxes([]controller.Sandbox{next})
		return nil
	})
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		held, err := tx.RunnerSandboxes(ctx, d.runner, controller.HeldFilter{All: true})
		if len(held) != 2 {
			t.Errorf("held: %+v", held)
		}
		for _, h := range held {
			if h.Current != (h.ID == w.Sandbox.ID) {
				t.Errorf("held: %+v", h)
			}
		}
		return err
	})
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		got, err := tx.SwitchWorkspace(ctx, w.ID, 1, next.ID, cp, grants.Given{Version: 1})
		if err != nil || got.Epoch != 2 || got.Sandbox.ID != next.ID || got.Head != cp.ID || got.State != core.WorkspaceReady {
			t.Errorf("switched: %+v, %v", got, err)
		}
		left, err := tx.WorkspaceSandboxes(ctx, w.ID)
		if len(left) != 1 || left[0].ID != next.ID {
			t.Errorf("left: %+v", left)
		}
		return err
	})
	wantCode(t, d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.SwitchWorkspace(ctx, w.ID, 1, next.ID, cp, grants.Given{Version: 1})
		return err
	}), core.CodeStateConflict)
}

// TestIdentitiesRace lets two connections want the same address at the same time.
func TestIdentitiesRace(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	first, second := d.plan(d.project, from), d.plan(d.project, from)
	second.Sandbox.Identity.IP = first.Sandbox.Identity.IP
	d.collide(first, second)
	for name, change := range map[string]func(*core.Identity){
		"mac":        func(id *core.Identity) { id.MAC = first.Sandbox.Identity.MAC },
		"machine id": func(id *core.Identity) { id.MachineID = first.Sandbox.Identity.MachineID },
		"hostname":   func(id *core.Identity) { id.Hostname = first.Sandbox.Identity.Hostname },
		"generation": func(id *core.Identity) { id.Generation = first.Sandbox.Identity.Generation },
	} {
		w := d.plan(d.project, from)
		change(&w.Sandbox.Identity)
		if err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error { return insert(ctx, tx, w) }); !errors.Is(err, controller.ErrIdentityTaken) {
			t.Errorf("%s twice: %v", name, err)
		}
	}
}
