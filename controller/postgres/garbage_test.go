package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func (d *db) condemn(dryRun bool) (looked, condemned int) {
	d.t.Helper()
	d.system(func(ctx context.Context, tx controller.AllTx) (err error) {
		looked, condemned, err = tx.CondemnObjects(ctx, 100, dryRun)
		return err
	})
	return looked, condemned
}

func TestCondemn(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	a, b := d.node(w, from.ID), d.node(w, from.ID)
	first := d.sealed(a.ID)
	d.sealed(b.ID, a.ID)
	if looked, condemned := d.condemn(false); looked != 0 || condemned != 0 {
		t.Errorf("with everything needed: %d, %d", looked, condemned)
	}
	// The two that share two objects are deleted by transactions that do not see one another.
	second, both := make(chan struct{}), make(chan error, 1)
	go func() {
		<-second
		both <- d.remove(b.ID)
	}()
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if _, err := tx.DeleteCheckpoint(ctx, a.ID, false); err != nil {
			return err
		}
		close(second)
		return <-both
	})
	if _, condemned := d.condemn(true); condemned != 4 {
		t.Errorf("dry run: %d", condemned)
	}
	if looked, condemned := d.condemn(false); looked != 6 || condemned != 4 {
		t.Errorf("after the last needs: %d losses, %d condemned", looked, condemned)
	}
	if looked, condemned := d.condemn(false); looked != 0 || condemned != 0 {
		t.Errorf("again: %d, %d", looked, condemned)
	}
	// A condemned object cannot be needed again, and one that is needed cannot go.
	c := d.node(w, from.ID)
	begun, err := d.begin(c.ID)
	if err != nil {
		t.Fatal(err)
	}
	wantCode(t, d.commit(c.ID, begun, first.Prefix+"pack"), core.CodeInvalidField)
	var pg *pgconn.PgError
	if _, err := d.conn().Exec(t.Context(), `INSERT INTO checkpoint_objects (checkpoint_id, key, project_id) VALUES ($1, $2, $3)`, c.ID, first.Prefix+"pack", d.project); !errors.As(err, &pg) || pg.ConstraintName != "checkpoint_objects_condemned_check" {
		t.Errorf("need of a condemned object: %v", err)
	}
	if err := d.commit(c.ID, begun); err != nil {
		t.Fatal(err)
	}
	if _, err := d.conn().Exec(t.Context(), `DELETE FROM store_objects WHERE key = $1`, begun.Prefix+"pack"); !errors.As(err, &pg) || pg.ConstraintName != "checkpoint_objects_object_fk" {
		t.Errorf("removal of a needed object: %v", err)
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		list, waiting, err := tx.CondemnedObjects(ctx, time.Hour, "", 10)
		if err != nil || len(list) != 0 || waiting != 4 {
			t.Errorf("within the grace: %v, %d, %v", list, waiting, err)
		}
		list, waiting, err = tx.CondemnedObjects(ctx, 0, first.Prefix+"manifest", 10)
		if err != nil || len(list) != 3 || waiting != 0 || list[0] != (runnerapi.StoredObject{Key: first.Prefix + "pack", Bytes: 100}) {
			t.Errorf("condemned: %v, %d, %v", list, waiting, err)
		}
		if err := tx.ForgetObjects(ctx, []string{first.Prefix + "pack", begun.Prefix + "pack"}); err != nil {
			return err
		}
		known, err := tx.KnownObjects(ctx, []string{first.Prefix + "manifest", first.Prefix + "pack", begun.Prefix + "pack"})
		if !known[first.Prefix+"manifest"].Condemned || known[begun.Prefix+"pack"].Bytes != 100 || len(known) != 2 {
			t.Errorf("known: %+v", known)
		}
		rows, err2 := tx.Objects(ctx, "", 100)
		if len(rows) != 5 || !slices.IsSortedFunc(rows, func(a, b controller.StoredObject) int { return strings.Compare(a.Key, b.Key) }) {
			t.Errorf("rows: %+v", rows)
		}
		return errors.Join(err, err2)
	})
}

func TestDebris(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	a, b := d.node(w, from.ID), d.node(w, from.ID)
	var prefixes []string
	for range 3 {
		begun, err := d.begin(a.ID)
		if err != nil {
			t.Fatal(err)
		}
		prefixes = append(prefixes, begun.Prefix)
	}
	leave := func(id core.CheckpointID, attempts ...int64) {
		t.Helper()
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			for _, n := range attempts {
				if err := tx.LeaveDebris(ctx, d.runner, id, n); err != nil {
					return err
				}
			}
			return nil
		})
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		uploading, debris, err := tx.OpenPrefixes(ctx)
		if !slices.Equal(uploading, prefixes[2:]) || len(debris) != 2 {
			t.Errorf("open: %v, %v", uploading, debris)
		}
		none, waiting, err2 := tx.Debris(ctx, time.Hour, "", 10)
		list, _, err3 := tx.Debris(ctx, 0, prefixes[0], 10)
		if len(none) != 0 || waiting != 2 || !slices.Equal(list, prefixes[1:2]) {
			t.Errorf("debris: %v, %d, %v", none, waiting, list)
		}
		return errors.Join(err, err2, err3, tx.ForgetDebris(ctx, prefixes[0]), tx.ForgetDebris(ctx, prefixes[1]))
	})
	// Neither the attempt under way nor those that may come are debris, whatever a runner says; one that ended is.
	leave(a.ID, 3, 4, 0, -1, 1)
	if got := d.debris(); !slices.Equal(got, prefixes[:1]) {
		t.Errorf("%v", got)
	}
	if err := d.commit(a.ID, runnerapi.SealBegun{Prefix: prefixes[2]}); err != nil {
		t.Fatal(err)
	}
	leave(a.ID, 3, 2)
	if got := d.debris(); !slices.Equal(got, prefixes[:2]) {
		t.Errorf("after the commit: %v", got)
	}
	if err := d.remove(a.ID); err != nil {
		t.Fatal(err)
	}
	leave(a.ID, 3)
	leave(b.ID, 1)
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		return tx.LeaveDebris(ctx, core.NewID[core.RunnerID](), a.ID, 9) // of somebody else
	})
	if got := d.debris(); !slices.Equal(got, prefixes[:2]) {
		t.Errorf("after the deletion: %v", got)
	}
}

func TestCopies(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	a := d.node(w, from.ID)
	b := d.node(w, a.ID)
	other := core.NewID[core.RunnerID]()
	info := d.info()
	info.RunnerID = other
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: info, Endpoint: "http://127.0.0.1:2"}, time.Minute)
		return err
	})
	held := func(ids ...core.CheckpointID) {
		t.Helper()
		d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.SetCopies(ctx, other, ids) })
	}
	near := func(cp controller.Checkpoint) (out map[core.RunnerID]int) {
		t.Helper()
		d.mine(func(ctx context.Context, tx controller.AllTx) (err error) {
			out, err = tx.Near(ctx, cp)
			return err
		})
		return out
	}
	for _, c := range []struct {
		held []core.CheckpointID
		want map[core.RunnerID]int
	}{
		{nil, map[core.RunnerID]int{d.runner: 0}},
		{[]core.CheckpointID{from.ID, core.NewID[core.CheckpointID]()}, map[core.RunnerID]int{d.runner: 0, other: 2}},
		{[]core.CheckpointID{from.ID, a.ID, a.ID}, map[core.RunnerID]int{d.runner: 0, other: 1}},
		{[]core.CheckpointID{b.ID}, map[core.RunnerID]int{d.runner: 0, other: 0}},
	} {
		held(c.held...)
		if got := near(b); !maps.Equal(got, c.want) {
			t.Errorf("holding %v: %v, want %v", c.held, got, c.want)
		}
	}
	held()
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		return tx.SetImages(ctx, other, []runnerapi.Image{{Name: "base", Digest: from.Image.Digest}})
	})
	if got := near(b); got[other] != 3 {
		t.Errorf("with the image: %v", got)
	}
	// A runner may hold a sealed checkpoint that another runner captured.
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		list, err := tx.HeldCheckpoints(ctx, other, []core.CheckpointID{a.ID, b.ID})
		if len(list.Copies) != 0 {
			t.Errorf("captured elsewhere: %+v", list)
		}
		return err
	})
	d.sealed(a.ID)
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		list, err := tx.HeldCheckpoints(ctx, other, []core.CheckpointID{a.ID, b.ID})
		if !slices.Equal(list.Copies, []core.CheckpointID{a.ID}) {
			t.Errorf("sealed elsewhere: %+v", list)
		}
		return err
	})
}

// TestManyKeys does what compares lists with long ones: before it was done outside the database, the second heartbeat with 10,000
// checkpoints took longer than a statement may.
func TestManyKeys(t *testing.T) {
	t.Parallel()
	const many = 10_000
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	d.exec(`SET session_replication_role = replica; INSERT INTO checkpoints (id, project_id, kind, state, parent_project_id, parent_id, root_id, depth, workspace_id, workspace_epoch,
			image_name, image_digest, vcpus, memory_mib, disk_gib, runner_id, runner_class, class_key, base_id, captured_at)
		SELECT 'ckpt_' || lpad(n::text, 5, '0'), '` + string(d.project) + `', 'user', 'captured', '` + string(controller.SystemProject) + `', '` + string(from.ID) + `', '` + string(from.ID) + `', 1, '` + string(w.ID) + `', 1,
			'base', '` + string(from.Image.Digest) + `', 1, 512, 1, '` + string(d.runner) + `', '{}', 'c', 'base_x', now() FROM generate_series(1, ` + fmt.Sprint(many) + `) AS n`)
	held := make([]core.CheckpointID, many)
	for i := range held {
		held[i] = core.CheckpointID(fmt.Sprintf("ckpt_%05d", i+1))
	}
	for _, n := range []int{many, many, many / 2, 0} {
		start := time.Now()
		d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.SetCopies(ctx, d.runner, held[:n]) })
		t.Logf("copies of %d: %s", n, time.Since(start))
		if got := d.column(`SELECT count(*)::text FROM checkpoint_copies`); got[0] != fmt.Sprint(n) {
			t.Errorf("%s copies, want %d", got[0], n)
		}
	}
	// A chain of two checkpoints with as many objects. The second needs every other object of the first.
	a, b := d.node(w, from.ID), d.node(w, from.ID)
	seal := func(id core.CheckpointID, needs func(i int, key string) bool, ancestors ...core.CheckpointID) {
		t.Helper()
		begun, err := d.begin(id, ancestors...)
		if err != nil {
			t.Fatal(err)
		}
		in := runnerapi.CommitSeal{Stored: runnerapi.Stored{CheckpointID: id, Manifest: begun.Prefix + "manifest", Digest: d.image, Bytes: 7}}
		in.Written = []runnerapi.StoredObject{{Key: begun.Prefix + "manifest", Bytes: 7}}
		for i := range many {
			key := fmt.Sprintf("%s%05d", begun.Prefix, i)
			in.Written, in.Needs = append(in.Written, runnerapi.StoredObject{Key: key, Bytes: 1}), append(in.Needs, key)
		}
		for i, key := range d.needs(ancestors...) {
			if needs(i, key) {
				in.Needs = append(in.Needs, key)
			}
		}
		start := time.Now()
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			at, _, err := tx.LockSeal(ctx, id)
			if err == nil {
				err = tx.CommitSeal(ctx, at, in)
			}
			return err
		})
		t.Logf("commit with %d needs: %s", len(in.Needs), time.Since(start))
	}
	seal(a.ID, nil)
	seal(b.ID, func(i int, _ string) bool { return i%2 == 0 }, a.ID)
	if got := len(d.needs(b.ID)); got != many+1+many/2+1 {
		t.Errorf("%d needs", got)
	}
	if err := d.remove(a.ID); err != nil {
		t.Fatal(err)
	}
	condemned := 0
	for looked := 1; looked > 0; {
		n := 0
		d.system(func(ctx context.Context, tx controller.AllTx) (err error) {
			looked, n, err = tx.CondemnObjects(ctx, 1000, false)
			return err
		})
		condemned += n
	}
	if condemned != many/2 {
		t.Errorf("%d condemned", condemned)
	}
}
