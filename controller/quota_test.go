package controller_test

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres"
	"github.com/coppice-dev/coppice/core"
)

// admin is a key that may do everything, with a row that others can be made of.
func (w *world) admin() controller.Key {
	w.t.Helper()
	key, err := w.Tenancy.Authenticate(w.t.Context(), "coppice-test-key")
	if err != nil {
		w.t.Fatal(err)
	}
	return key
}

func (w *world) quota(change func(*controller.QuotasPatch)) {
	w.t.Helper()
	var p controller.QuotasPatch
	change(&p)
	if _, err := w.Tenancy.PatchProject(w.t.Context(), w.admin(), w.project, p, controller.EncryptionPatch{}); err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) usage() controller.QuotaUsage {
	w.t.Helper()
	_, usage, err := w.Tenancy.Project(w.t.Context(), w.admin(), w.project)
	if err != nil {
		w.t.Fatal(err)
	}
	return usage
}

func wantQuota(t *testing.T, err error, name string, used, limit int) {
	t.Helper()
	text := fmt.Sprintf("quota %s is used up: it has %d of %d", name, used, limit)
	if core.CodeOf(err) != core.CodeQuotaExceeded || !strings.Contains(core.MessageOf(err), text) {
		t.Errorf("got %v, want %s with %q", err, core.CodeQuotaExceeded, text)
	}
}

// TestQuotaUnderRace has two controllers take 200 forks at once when there is room for 50: 50 are admitted, never 51, and the
// room of those that end can be had again.
func TestQuotaUnderRace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	second, _ := w.startOn(openStore(t, w.dsn), controller.Config{ClusterID: "test"})
	const room, racers, atOnce = 50, 200, 32                                         // as many at once as the two have connections
	w.quota(func(p *controller.QuotasPatch) { p.Workspaces = new(int64(room + 1)) }) // main lives too
	race := func() (won int64) {
		var admitted, refused atomic.Int64
		var group errgroup.Group
		group.SetLimit(atOnce)
		for i := range racers {
			c := []*controller.Controller{w.Controller, second}[i%2]
			group.Go(func() error {
				_, err := c.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
				switch core.CodeOf(err) {
				case "":
					admitted.Add(1)
				case core.CodeQuotaExceeded:
					refused.Add(1)
				default:
					return err
				}
				return nil
			})
		}
		if err := group.Wait(); err != nil {
			t.Error(err)
		}
		if admitted.Load()+refused.Load() != racers {
			t.Errorf("%d admitted, %d refused", admitted.Load(), refused.Load())
		}
		return admitted.Load()
	}
	if won := race(); won != room {
		t.Errorf("%d of %d were admitted", won, room)
	}
	if live := w.number(`SELECT count(*) FROM workspaces WHERE ended_at IS NULL`); live != room+1 {
		t.Errorf("%d workspaces live", live)
	}
	_, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
	wantQuota(t, err, "workspaces", room+1, room+1)
	list, err := w.Workspaces(t.Context(), w.project, controller.WorkspaceFilter{Page: controller.Page{Limit: 7}, Parent: cp.ID})
	if err != nil {
		t.Fatal(err)
	}
	for _, ws := range list {
		if _, err := w.Terminate(t.Context(), w.project, ws.ID, wait); err != nil {
			t.Fatal(err)
		}
	}
	if won := race(); won != 7 {
		t.Errorf("%d of 7 were admitted", won)
	}
	if u := w.usage(); u.Workspaces != room+1 || u.ForksInFlight != 0 {
		t.Errorf("usage %+v", u)
	}
}

// TestForksInFlight counts what is being made, not what was: more forks than the quota pass one after the other, and no more
// than that at once.
func TestForksInFlight(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	w.quota(func(p *controller.QuotasPatch) { p.ForksInFlight = new(int64(4)) })
	for range 3 {
		w.fork(cp.ID, 4)
	}
	_, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 5}, wait)
	wantQuota(t, err, "forks_in_flight", 0, 4)
	w.sql(`UPDATE workspaces SET state = 'restoring' WHERE id IN (SELECT id FROM workspaces WHERE state = 'ready' LIMIT 3)`)
	_, err = w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
	wantQuota(t, err, "forks_in_flight", 3, 4)
	w.fork(cp.ID, 1)
}

// TestCheckpointQuotas keeps a tree within its number of nodes, their bytes, its depth and its width. Deleting makes room.
func TestCheckpointQuotas(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	first := w.checkpoint(ws.ID)
	per := first.DeltaBytes + first.DeviceStateBytes + first.DiskBytes
	if u := w.usage(); u.Checkpoints != 1 || u.CheckpointBytes != per || per == 0 {
		t.Errorf("usage %+v, one has %d bytes", u, per)
	}
	capture := func() error {
		_, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, wait)
		return err
	}
	w.quota(func(p *controller.QuotasPatch) { p.Checkpoints = new(int64(1)) })
	wantQuota(t, capture(), "checkpoints", 1, 1)
	w.quota(func(p *controller.QuotasPatch) { p.Checkpoints, p.CheckpointBytes = new(int64(9)), &per })
	wantQuota(t, capture(), "checkpoint_bytes", int(per), int(per))
	w.quota(func(p *controller.QuotasPatch) { p.CheckpointBytes, p.Depth = new(per+1), new(int64(1)) })
	wantQuota(t, capture(), "depth", 1, 1)
	w.quota(func(p *controller.QuotasPatch) { p.Depth, p.Children = new(int64(9)), new(int64(0)) })
	wantQuota(t, capture(), "children", 0, 0)
	if w.state(ws.ID) != core.WorkspaceReady {
		t.Errorf("a refused capture left the workspace %s", w.state(ws.ID))
	}
	w.quota(func(p *controller.QuotasPatch) { p.Children = new(int64(1)) })
	second := w.checkpoint(ws.ID)
	if u := w.usage(); u.Checkpoints != 2 || u.CheckpointBytes != 2*per {
		t.Errorf("usage %+v", u)
	}
	if _, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, first.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.quota(func(p *controller.QuotasPatch) { p.CheckpointBytes = new(9 * per) })
	wantQuota(t, capture(), "children", 1, 1)
	if err := w.DeleteCheckpoint(t.Context(), w.project, second.ID); err != nil {
		t.Fatal(err)
	}
	if u := w.usage(); u.Checkpoints != 1 || u.CheckpointBytes != per {
		t.Errorf("after a deletion: %+v", u)
	}
	if err := capture(); err != nil {
		t.Errorf("the place of a deleted child: %v", err)
	}
	w.sql(`UPDATE checkpoints SET ended_at = now() WHERE id = $1`, second.ID)
	if u := w.usage(); u.Checkpoints != 2 || u.CheckpointBytes != 2*per {
		t.Errorf("a node that was deleted before counts again: %+v", u)
	}
}

// TestCheckpointQuotaUnderRace captures forty workspaces at once when there is room for ten.
func TestCheckpointQuotaUnderRace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	list := w.fork(cp.ID, 40)
	w.quota(func(p *controller.QuotasPatch) { p.Children = new(int64(10)) })
	var admitted atomic.Int64
	var group sync.WaitGroup
	for _, ws := range list {
		group.Go(func() {
			_, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, wait)
			switch core.CodeOf(err) {
			case "":
				admitted.Add(1)
			case core.CodeQuotaExceeded:
			default:
				t.Error(err)
			}
		})
	}
	group.Wait()
	if n := w.number(`SELECT count(*) FROM checkpoints WHERE parent_id = $1`, cp.ID); admitted.Load() != 10 || n != 10 {
		t.Errorf("%d were admitted, %d are there", admitted.Load(), n)
	}
	if u := w.usage(); u.Checkpoints != 11 {
		t.Errorf("usage %+v", u)
	}
}

// TestKeyQuota counts valid keys only, exactly under race.
func TestKeyQuota(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	admin := w.admin()
	w.quota(func(p *controller.QuotasPatch) { p.Keys = new(int64(5)) })
	var made atomic.Int64
	var group sync.WaitGroup
	var some atomic.Value
	for range 30 {
		group.Go(func() {
			key, _, err := w.Tenancy.CreateKey(t.Context(), admin, w.project, "k", nil, 0)
			switch core.CodeOf(err) {
			case "":
				made.Add(1)
				some.Store(key.ID)
			case core.CodeQuotaExceeded:
			default:
				t.Error(err)
			}
		})
	}
	group.Wait()
	if made.Load() != 4 { // the bootstrap key counts
		t.Errorf("%d keys were made", made.Load())
	}
	id, _ := some.Load().(core.KeyID)
	if err := w.Tenancy.RevokeKey(t.Context(), admin, id); err != nil {
		t.Fatal(err)
	}
	if _, _, err := w.Tenancy.CreateKey(t.Context(), admin, w.project, "k", nil, 0); err != nil {
		t.Errorf("the place of a revoked key: %v", err)
	}
	_, _, err := w.Tenancy.CreateKey(t.Context(), admin, w.project, "k", nil, 0)
	wantQuota(t, err, "keys", 5, 5)
}

// TestDeletedProject races the deletion of an empty project with a creation in it: one of them loses, and nothing is ever in
// a project that is gone.
func TestDeletedProject(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	admin := w.admin()
	w.create("template") // is made once
	for i := range 8 {
		p, err := w.Tenancy.CreateProject(t.Context(), admin, fmt.Sprintf("p%d", i), controller.QuotasPatch{}, controller.EncryptionPatch{})
		if err != nil {
			t.Fatal(err)
		}
		var group sync.WaitGroup
		var created, deleted error
		group.Go(func() {
			_, created = w.CreateWorkspace(t.Context(), p.ID, controller.CreateRequest{Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}}, wait)
		})
		group.Go(func() { deleted = w.Tenancy.DeleteProject(t.Context(), admin, p.ID) })
		group.Wait()
		switch {
		case created == nil && core.CodeOf(deleted) == core.CodeProjectNotEmpty:
		case core.CodeOf(created) == core.CodeProjectNotFound && deleted == nil:
		default:
			t.Errorf("created: %v; deleted: %v", created, deleted)
		}
	}
	if err := w.Tenancy.DeleteProject(t.Context(), admin, w.project); core.CodeOf(err) != core.CodePermissionDenied {
		t.Errorf("its own project: %v", err)
	}
	if err := w.Tenancy.DeleteProject(t.Context(), admin, controller.SystemProject); core.CodeOf(err) != core.CodeProjectNotFound {
		t.Errorf("the system's project: %v", err)
	}
}

// TestFailedTransactionTakesNoPlace fails an admission after it has taken its place.
func TestFailedTransactionTakesNoPlace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.quota(func(p *controller.QuotasPatch) { p.Workspaces = new(int64(3)) })
	store := openStore(t, w.dsn)
	for range 5 {
		err := store.InTx(t.Context(), controller.InProject(w.project), func(tx controller.AllTx) error {
			if err := tx.Admit(t.Context(), w.project, controller.Demand{Workspaces: 3, ForksInFlight: 3}); err != nil {
				return err
			}
			return core.Errorf(core.Conflict, core.CodeStateConflict, "rolled back")
		})
		wantCode(t, err, core.CodeStateConflict)
	}
	w.create("one")
	if n := w.number(`SELECT workspaces FROM quotas WHERE project_id = $1`, w.project); n != 1 {
		t.Errorf("%d places are taken", n)
	}
	// A project cannot take another's place.
	other, err := w.Tenancy.CreateProject(t.Context(), w.admin(), "other", controller.QuotasPatch{}, controller.EncryptionPatch{})
	if err != nil {
		t.Fatal(err)
	}
	err = admit(t.Context(), store, other.ID, w.project)
	wantCode(t, err, core.CodeProjectNotFound)
}

func admit(ctx context.Context, store *postgres.Store, as, of core.ProjectID) error {
	return store.InTx(ctx, controller.InProject(as), func(tx controller.AllTx) error {
		return tx.Admit(ctx, of, controller.Demand{Workspaces: 1})
	})
}
