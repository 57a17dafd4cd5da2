package postgres_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func (d *db) begin(id core.CheckpointID, ancestors ...core.CheckpointID) (runnerapi.SealBegun, error) {
	var out runnerapi.SealBegun
	err := d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
		var err error
		out, err = tx.BeginSeal(ctx, d.runner, runnerapi.BeginSeal{LeaseEpoch: 1, CheckpointID: id, Ancestors: ancestors})
		return err
	})
	return out, err
}

// commit ends an attempt with a pack, a manifest and what it needs besides.
func (d *db) commit(id core.CheckpointID, begun runnerapi.SealBegun, needs ...string) error {
	in := runnerapi.CommitSeal{
		Stored: runnerapi.Stored{CheckpointID: id, Manifest: begun.Prefix + "manifest", Digest: d.image, Bytes: 7}, StoredBytes: 107,
		Written: []runnerapi.StoredObject{{Key: begun.Prefix + "manifest", Bytes: 7}, {Key: begun.Prefix + "pack", Bytes: 100}},
		Needs:   append([]string{begun.Prefix + "pack"}, needs...),
	}
	return d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
		at, _, err := tx.LockSeal(ctx, id)
		if err == nil {
			err = tx.CommitSeal(ctx, at, in)
		}
		return err
	})
}

func (d *db) sealed(id core.CheckpointID, ancestors ...core.CheckpointID) runnerapi.SealBegun {
	d.t.Helper()
	begun, err := d.begin(id, ancestors...)
	if err == nil {
		err = d.commit(id, begun, d.needs(ancestors...)...)
	}
	if err != nil {
		d.t.Fatal(err)
	}
	return begun
}

// column reads one column of text.
func (d *db) column(sql string, a ...any) []string {
	d.t.Helper()
	rows, err := d.conn().Query(d.t.Context(), sql, a...)
	if err != nil {
		d.t.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		d.t.Fatal(err)
	}
	return list
}

func (d *db) needs(ids ...core.CheckpointID) []string {
	return d.column(`SELECT DISTINCT key FROM checkpoint_objects WHERE checkpoint_id = ANY($1) ORDER BY key`, ids)
}

func (d *db) debris() []string { return d.column(`SELECT prefix FROM store_debris ORDER BY prefix`) }

func (d *db) get(id core.CheckpointID) controller.Checkpoint {
	d.t.Helper()
	var cp controller.Checkpoint
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		cp, err = tx.Checkpoint(ctx, id)
		return err
	})
	return cp
}

func (d *db) remove(id core.CheckpointID) error {
	return d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.DeleteCheckpoint(ctx, id, false)
		return err
	})
}

func TestSeal(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	a := d.node(w, from.ID)
	if got := d.get(a.ID); got.Seal != nil || got.Stored != nil {
		t.Errorf("before: %+v", got)
	}
	first, err := d.begin(a.ID, from.ID)
	if err != nil || first.Attempt != 1 || first.Reference != nil || first.Prefix != fmt.Sprintf("v1/%s/%s/1/", d.project, a.ID) {
		t.Fatalf("%+v, %v", first, err)
	}
	if got := d.get(a.ID); got.Seal == nil || got.Seal.State != controller.SealUploading || got.Seal.Attempt != 1 || got.State != core.CheckpointCaptured {
		t.Errorf("under way: %+v", got.Seal)
	}
	// A second attempt replaces it.
	second, err := d.begin(a.ID, from.ID)
	if err != nil || second.Attempt != 2 || !slices.Equal(d.debris(), []string{first.Prefix}) {
		t.Fatalf("%+v, %v; debris %v", second, err, d.debris())
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		at, cp, err := tx.LockSeal(ctx, a.ID)
		if err != nil || at.Attempt != 2 || at.Prefix != second.Prefix || at.RunnerID != d.runner || cp.ID != a.ID {
			t.Errorf("%+v, %v", at, err)
		}
		return tx.FailSeal(ctx, at, core.Errorf(core.Unavailable, core.CodeStoreUnavailable, "away"))
	})
	if got := d.get(a.ID).Seal; got.State != controller.SealFailed || got.Problem.Code != core.CodeStoreUnavailable || got.Problem.Message != "away" {
		t.Errorf("failed: %+v", got)
	}
	third, err := d.begin(a.ID, from.ID)
	if err != nil || third.Attempt != 3 || len(d.debris()) != 2 {
		t.Fatalf("%+v, %v; debris %v", third, err, d.debris())
	}
	if got := d.get(a.ID).Seal; got.State != controller.SealUploading || got.Problem == nil {
		t.Errorf("after a failure: %+v", got)
	}
	wantCode(t, d.commit(a.ID, third, "v1/somebody/elses/1/pack"), core.CodeInvalidField)
	if err := d.commit(a.ID, third); err != nil {
		t.Fatal(err)
	}
	got := d.get(a.ID)
	if got.State != core.CheckpointSealed || got.Seal != nil || got.StoredBytes != 107 || got.SealedAt.IsZero() ||
		*got.Stored != (runnerapi.Stored{CheckpointID: a.ID, Manifest: third.Prefix + "manifest", Digest: d.image, Bytes: 7}) {
		t.Errorf("sealed: %+v", got)
	}
	if needs := d.needs(a.ID); !slices.Equal(needs, []string{third.Prefix + "manifest", third.Prefix + "pack"}) || len(d.debris()) != 2 {
		t.Errorf("needs %v, debris %v", needs, d.debris())
	}
	if _, err := d.begin(a.ID); core.CodeOf(err) != core.CodeStateConflict {
		t.Errorf("sealed twice: %v", err)
	}
	if events := d.column(`SELECT type FROM events WHERE checkpoint_id = $1 ORDER BY id`, a.ID); !slices.Contains(events, "checkpoint.sealed") {
		t.Errorf("events: %v", events)
	}
	// What was sealed is so for ever.
	if _, err := d.conn().Exec(t.Context(), `UPDATE checkpoints SET manifest_digest = NULL WHERE id = $1`, a.ID); err == nil || !strings.Contains(err.Error(), "immutable") {
		t.Errorf("a manifest was changed: %v", err)
	}
}

func TestSealRefused(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	a, b := d.node(w, from.ID), d.node(w, from.ID)
	capturing := controller.Checkpoint{ID: core.NewID[core.CheckpointID](), ProjectID: d.project, Kind: controller.KindUser, Parent: from.ID, WorkspaceID: w.ID, WorkspaceEpoch: 1, Image: w.Image, Resources: shape, RunnerID: d.runner}
	d.mine(func(ctx context.Context, tx controller.AllTx) error { return tx.InsertCheckpoint(ctx, capturing) })
	if err := d.remove(b.ID); err != nil {
		t.Fatal(err)
	}
	for id, want := range map[core.CheckpointID]core.Code{
		capturing.ID: core.CodeCheckpointNotReady, b.ID: core.CodeCheckpointNotFound, core.NewID[core.CheckpointID](): core.CodeCheckpointNotFound,
	} {
		_, err := d.begin(id)
		wantCode(t, err, want)
	}
	err := d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.BeginSeal(ctx, core.NewID[core.RunnerID](), runnerapi.BeginSeal{CheckpointID: a.ID})
		return err
	})
	wantCode(t, err, core.CodePermissionDenied)
	for epoch, want := range map[int64]core.Code{1: "", 2: core.CodeRunnerLost} {
		wantCode(t, d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error { return tx.HasLease(ctx, d.runner, epoch) }), want)
	}
	// A reference of another project is none, and neither is one that is not sealed.
	other := d.newProject("other")
	foreign := d.node(d.ready(other, from), from.ID)
	d.sealed(foreign.ID)
	begun, err := d.begin(a.ID, from.ID, foreign.ID)
	if err != nil || begun.Reference != nil {
		t.Errorf("%+v, %v", begun, err)
	}
	// The attempt ends with the checkpoint.
	if err := d.remove(a.ID); err != nil {
		t.Fatal(err)
	}
	wantCode(t, d.commit(a.ID, begun), core.CodeCheckpointNotFound)
	if !slices.Equal(d.debris(), []string{begun.Prefix}) {
		t.Errorf("debris %v", d.debris())
	}
}

// TestReferenceIsHeld deletes what an attempt builds on, before and while it begins.
func TestReferenceIsHeld(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	d.sealed(from.ID)
	a := d.node(w, from.ID)
	d.sealed(a.ID, from.ID)
	b := d.node(w, a.ID)
	removed, deleting := make(chan error, 1), false
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		begun, err := tx.BeginSeal(ctx, d.runner, runnerapi.BeginSeal{LeaseEpoch: 1, CheckpointID: b.ID, Ancestors: []core.CheckpointID{a.ID, from.ID}})
		if err != nil || begun.Reference == nil || begun.Reference.CheckpointID != a.ID || deleting {
			return err
		}
		deleting = true
		go func() { removed <- d.remove(a.ID) }()
		select {
		case err := <-removed:
			t.Errorf("the reference was deleted while an attempt begins: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		return nil
	})
	if err := <-removed; err != nil {
		t.Fatal(err)
	}
	if len(d.needs(a.ID)) != 0 || len(d.needs(b.ID)) != 4 {
		t.Errorf("the deleted one needs %v, the attempt %v", d.needs(a.ID), d.needs(b.ID))
	}
	next, err := d.begin(b.ID, a.ID, from.ID) // the next nearest
	if err != nil || next.Reference == nil || next.Reference.CheckpointID != from.ID || len(d.needs(b.ID)) != 2 {
		t.Errorf("%+v, %v, needs %v", next, err, d.needs(b.ID))
	}
}

func TestAbandonSeals(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	d.sealed(from.ID)
	a, b := d.node(w, from.ID), d.node(w, from.ID)
	abandon := func() (list []core.CheckpointID) {
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			list, err = tx.AbandonSeals(ctx)
			return err
		})
		return list
	}
	begun, err := d.begin(a.ID, from.ID)
	if err != nil || len(abandon()) != 0 {
		t.Fatal(err)
	}
	d.exec(`UPDATE runners SET lease_epoch = 2`)
	if list := abandon(); !slices.Equal(list, []core.CheckpointID{a.ID}) || len(abandon()) != 0 {
		t.Errorf("given up: %v", list)
	}
	if got := d.get(a.ID).Seal; got.State != controller.SealFailed || got.Problem.Code != core.CodeRunnerLost {
		t.Errorf("%+v", got)
	}
	if len(d.needs(a.ID)) != 0 || !slices.Equal(d.debris(), []string{begun.Prefix}) {
		t.Errorf("needs %v, debris %v", d.needs(a.ID), d.debris())
	}
	if _, err := d.begin(b.ID, from.ID); err != nil {
		t.Error(err)
	}
}
