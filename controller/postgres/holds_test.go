package postgres_test

import (
	"context"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// joined registers another runner.
func (d *db) joined() core.RunnerID {
	d.t.Helper()
	info := d.info()
	info.RunnerID = core.NewID[core.RunnerID]()
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: info, Endpoint: "http://127.0.0.1:2"}, time.Minute)
		return err
	})
	return info.RunnerID
}

func (d *db) fetches(runner core.RunnerID, ids ...core.CheckpointID) {
	d.t.Helper()
	d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.SetHolds(ctx, runner, ids) })
}

func (d *db) holds() []string {
	return d.column(`SELECT checkpoint_id FROM store_holds ORDER BY checkpoint_id`)
}

// TestHolds: what runners fetch keeps its needs when it is deleted, until the last of them has it.
func TestHolds(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	one, two := d.joined(), d.joined()
	a, b, unsealed := d.node(w, from.ID), d.node(w, from.ID), d.node(w, from.ID)
	d.sealed(a.ID)
	d.sealed(b.ID, a.ID)
	d.fetches(one, a.ID, a.ID, unsealed.ID, core.NewID[core.CheckpointID]())
	d.fetches(two, a.ID)
	if got := d.holds(); len(got) != 2 || got[0] != string(a.ID) || got[1] != string(a.ID) {
		t.Errorf("held: %v", got)
	}
	for _, id := range []core.CheckpointID{a.ID, b.ID} {
		if err := d.remove(id); err != nil {
			t.Fatal(err)
		}
	}
	if _, condemned := d.condemn(false); condemned != 2 || len(d.needs(a.ID)) == 0 || len(d.needs(b.ID)) != 0 { // what b alone needed
		t.Errorf("deleted while one is fetched: %d condemned, %v and %v needed", condemned, d.needs(a.ID), d.needs(b.ID))
	}
	d.fetches(two, b.ID) // too late
	if got := d.holds(); len(got) != 1 {
		t.Errorf("one has it: %v", got)
	}
	if _, condemned := d.condemn(false); condemned != 0 {
		t.Errorf("one still fetches it: %d condemned", condemned)
	}
	d.fetches(one, a.ID)
	if _, condemned := d.condemn(false); condemned != 0 {
		t.Errorf("it says so again: %d condemned", condemned)
	}
	d.fetches(one)
	if _, condemned := d.condemn(false); condemned != 2 || len(d.holds()) != 0 || len(d.needs(a.ID)) != 0 {
		t.Errorf("all have it: %d condemned, %v held", condemned, d.holds())
	}
}

// TestHoldsOfTheLost: a runner that is given up holds nothing any more.
func TestHoldsOfTheLost(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	a := d.node(w, from.ID)
	d.sealed(a.ID)
	other := d.joined()
	d.fetches(other, a.ID)
	if err := d.remove(a.ID); err != nil {
		t.Fatal(err)
	}
	fence := func() {
		t.Helper()
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.FenceRunners(ctx, time.Hour, 10)
			return err
		})
	}
	d.exec(`UPDATE runners SET lease_expires_at = now() - interval '59 minutes' WHERE id = $1`, other)
	fence()
	if _, condemned := d.condemn(false); condemned != 0 || len(d.holds()) != 1 {
		t.Errorf("before its time: %d condemned, %v", condemned, d.holds())
	}
	d.exec(`UPDATE runners SET lease_expires_at = now() - interval '61 minutes' WHERE id = $1`, other)
	fence()
	if _, condemned := d.condemn(false); condemned != 2 || len(d.holds()) != 0 {
		t.Errorf("given up: %d condemned, %v", condemned, d.holds())
	}
}

// TestHoldsOfWhatWasCaptured: what a lost runner fetches, and has captured something on, stays until that is sealed, which it can when it is
// back, or deleted, or the runner is removed.
func TestHoldsOfWhatWasCaptured(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	register := func(runner core.RunnerID) {
		t.Helper()
		info := d.info()
		info.RunnerID = runner
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: info, Endpoint: "http://127.0.0.1:2"}, time.Minute)
			return err
		})
	}
	lose := func(runner core.RunnerID) {
		t.Helper()
		d.exec(`UPDATE runners SET lease_expires_at = now() - interval '61 minutes' WHERE id = $1`, runner)
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.FenceRunners(ctx, time.Hour, 10)
			return err
		})
	}
	// captureOn returns a checkpoint that is sealed, is fetched by a runner and deleted, and what the runner is capturing on it.
	captureOn := func(runner core.RunnerID) (x, y controller.Checkpoint) {
		t.Helper()
		x = d.node(w, from.ID)
		d.sealed(x.ID)
		d.fetches(runner, x.ID)
		y = controller.Checkpoint{
			ID: core.NewID[core.CheckpointID](), ProjectID: d.project, Kind: controller.KindUser, Parent: x.ID, WorkspaceID: w.ID, WorkspaceEpoch: w.Epoch,
			Image: w.Image, Resources: w.Resources, RunnerID: runner,
		}
		d.mine(func(ctx context.Context, tx controller.AllTx) error { return tx.InsertCheckpoint(ctx, y) })
		if err := d.remove(x.ID); err != nil {
			t.Fatal(err)
		}
		return x, y
	}
	capture := func(y controller.Checkpoint) {
		t.Helper()
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.CaptureCheckpoint(ctx, y.ID, y.RunnerID, d.captured())
			return err
		})
	}
	kept := func(what string, x controller.Checkpoint, want bool) {
		t.Helper()
		_, condemned := d.condemn(false)
		if got := len(d.needs(x.ID)) == 2; got != want || (condemned == 0) != want {
			t.Errorf("%s: %v needed, %d condemned", what, d.needs(x.ID), condemned)
		}
	}
	sealed, deleted, removed := d.joined(), d.joined(), d.joined()
	x, y := captureOn(sealed)
	lose(sealed)
	kept("lost while it captures", x, true)
	capture(y)
	lose(sealed)
	kept("captured by one that is lost", x, true)
	register(sealed)
	d.fetches(sealed, x.ID)
	kept("back", x, true)
	lose(sealed)
	kept("lost again", x, true)
	register(sealed)
	d.fetches(sealed) // it has all of it
	kept("whole", x, false)

	x, y = captureOn(deleted)
	capture(y)
	lose(deleted)
	kept("captured", x, true)
	if err := d.remove(y.ID); err != nil {
		t.Fatal(err)
	}
	lose(deleted)
	kept("the descendant was deleted", x, false)

	x, y = captureOn(removed)
	capture(y)
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, _, err := tx.RemoveRunner(ctx, removed)
		return err
	})
	lose(removed)
	kept("its runner was removed", x, false)
}

// TestHoldRaces: a hold and a deletion, and the last two holds, that do not see one another.
func TestHoldRaces(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	one, two := d.joined(), d.joined()
	a, b, c := d.node(w, from.ID), d.node(w, from.ID), d.node(w, from.ID)
	for _, cp := range []controller.Checkpoint{a, b, c} {
		d.sealed(cp.ID)
	}
	// beside runs another transaction that waits for what the first has locked.
	beside := func(first func(ctx context.Context, tx controller.AllTx) error, second func() error) {
		t.Helper()
		done := make(chan error, 1)
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			if err := first(ctx, tx); err != nil {
				return err
			}
			go func() { done <- second() }()
			d.waitsForLock()
			return nil
		})
		if err := <-done; err != nil {
			t.Fatal(err)
		}
	}
	hold := func(runner core.RunnerID, ids ...core.CheckpointID) func(context.Context, controller.AllTx) error {
		return func(ctx context.Context, tx controller.AllTx) error { return tx.SetHolds(ctx, runner, ids) }
	}
	beside(hold(one, a.ID), func() error { return d.remove(a.ID) })
	if len(d.needs(a.ID)) != 2 {
		t.Errorf("deleted after it was held: %v", d.needs(a.ID))
	}
	beside(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.DeleteCheckpoint(ctx, b.ID, false)
		return err
	}, func() error { return d.try(controller.System(), hold(two, b.ID)) })
	if len(d.needs(b.ID)) != 0 || len(d.holds()) != 1 {
		t.Errorf("held after it was deleted: %v, %v", d.needs(b.ID), d.holds())
	}
	d.fetches(one, c.ID)
	d.fetches(two, c.ID)
	if err := d.remove(c.ID); err != nil {
		t.Fatal(err)
	}
	beside(hold(one), func() error { return d.try(controller.System(), hold(two)) })
	if len(d.needs(c.ID))+len(d.needs(a.ID)) != 0 || len(d.holds()) != 0 {
		t.Errorf("the last two holds: %v, %v, %v", d.needs(c.ID), d.needs(a.ID), d.holds())
	}
}
