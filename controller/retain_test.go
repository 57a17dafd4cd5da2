package controller_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

// grow puts n checkpoints below one by SQL, of which the first old ones are two days old. No runner has them.
func (w *world) grow(below core.CheckpointID, n, old int) {
	w.t.Helper()
	w.sql(fmt.Sprintf(`SET session_replication_role = replica;
		INSERT INTO checkpoints SELECT (jsonb_populate_record(x, jsonb_build_object('id', 'ckpt_bulk' || lpad(n::text, 22, '0'), 'depth', x.depth + 1, 'parent_id', x.id,
			'parent_project_id', x.project_id, 'created_at', now() - CASE WHEN n <= %[2]d THEN interval '2 days' ELSE interval '0' END))).*
		FROM checkpoints x, generate_series(1, %[1]d) n WHERE x.id = '%[3]s'`, n, old, below))
	w.sql(`ANALYZE checkpoints`)
}

// settle lets all that was recorded so far be old, and the policies rest no more.
func (w *world) settle() {
	w.t.Helper()
	w.sql(`SET session_replication_role = replica; UPDATE audit_records SET created_at = created_at - interval '1 minute'`)
	w.sql(`UPDATE retention_rounds SET next_at = now()`)
	w.sql(`ANALYZE`) // as autovacuum does at some moment: the plans, and so the rows that they read, are always those with statistics
}

// TestRetentionReadsInProportion applies a policy to a tree: a round after a change reads the tree once, a round without any reads none of it,
// and one operation after the other deletes all that the plan removes.
func TestRetentionReadsInProportion(t *testing.T) {
	t.Parallel()
	const nodes, old = 6000, 2100
	w := quiet(t)
	ctx := t.Context()
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.grow(cp.ID, nodes, old)
	policy := controller.RetentionPolicy{Policy: retention.Policy{MaxAge: 24 * time.Hour}}
	if _, err := w.PutRetention(ctx, w.project, ws.Parent, policy); err != nil {
		t.Fatal(err)
	}
	round := func(what string, most int) int {
		t.Helper()
		w.settle()
		got := w.counted(func(w *world) {
			if err := w.Retain(ctx); err != nil {
				t.Fatal(err)
			}
		})
		t.Logf("%s: rows read:%s", what, got)
		if n := got.rows("checkpoints"); n > most {
			t.Errorf("%s reads %d checkpoints; want at most %d", what, n, most)
		}
		return got.rows("checkpoints")
	}
	left := func() int {
		return w.number(`SELECT count(*) FROM checkpoints WHERE id LIKE 'ckpt_bulk%' AND state = 'captured'`)
	}
	// With statistics the planner reads the whole tree once, and once more the nodes that live.
	round("a round that deletes", nodes+20*old)
	if n := left(); n != nodes-old {
		t.Fatalf("%d are left; want %d", n, nodes-old)
	}
	if n := w.number(`SELECT count(*) FROM operations WHERE kind = 'prune_checkpoints' AND state = 'succeeded'`); n != 2 {
		t.Errorf("%d operations, want 2", n)
	}
	if n := round("the round after it", nodes+nodes-old+500); n < nodes-old {
		t.Errorf("it reads only %d checkpoints", n)
	}
	round("a round without any change", 0)
	w.sql(`UPDATE checkpoints SET version = version + 1, pinned = true WHERE id = $1`, cp.ID)
	if n := round("a round after one change", nodes+nodes-old+500); n < nodes-old {
		t.Errorf("it reads only %d checkpoints", n)
	}
	round("another without any change", 0)
	// Time alone is a change when a node becomes too old.
	w.sql(`UPDATE retention_rounds SET due_at = now()`)
	if n := round("a round that is due", nodes+nodes-old+500); n < nodes-old {
		t.Errorf("it reads only %d checkpoints", n)
	}
	if due := w.number(`SELECT count(*) FROM retention_rounds WHERE due_at > now() AND due_at <= now() + interval '1 hour'`); due != 1 {
		t.Error("the next round is not due within the hour")
	}
}

// TestRetentionGoesOn claims a policy as a controller that dies, and as one whose policy changes.
func TestRetentionGoesOn(t *testing.T) {
	t.Parallel()
	w := quiet(t)
	ctx := t.Context()
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.grow(cp.ID, 30, 20)
	policy := controller.RetentionPolicy{Policy: retention.Policy{MaxAge: 24 * time.Hour}}
	stored, err := w.PutRetention(ctx, w.project, ws.Parent, policy)
	if err != nil {
		t.Fatal(err)
	}
	claim := func(r controller.Retention) (turn int64) {
		t.Helper()
		if err := w.store.InTx(ctx, controller.InProject(w.project), func(tx controller.AllTx) (err error) {
			turn, err = tx.ClaimRetention(ctx, r, time.Hour)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return turn
	}
	renew := func(turn int64) error {
		return w.store.InTx(ctx, controller.InProject(w.project), func(tx controller.AllTx) error {
			return tx.RenewRetention(ctx, controller.RetentionRound{Stored: stored, Turn: turn}, time.Hour)
		})
	}
	const live = `SELECT count(*) FROM checkpoints WHERE id LIKE 'ckpt_bulk%' AND state = 'captured'`
	// The loop of the world's own controller may have it, or have done it.
	eventually(t, "nobody else has it", func() bool { return w.number(`SELECT count(*) FROM retention_rounds WHERE claimed_until > now()`) == 0 })
	turn := claim(stored)
	if turn == 0 || claim(stored) != 0 {
		t.Fatal("two claims")
	}
	if err := renew(turn); err != nil {
		t.Error(err)
	}
	if err := w.Retain(ctx); err != nil || w.number(live) != 30 {
		t.Errorf("what another has claimed is applied: %v", err)
	}
	w.sql(`UPDATE retention_rounds SET claimed_until = now()`) // it died
	if err := w.Retain(ctx); err != nil || w.number(live) != 10 {
		t.Errorf("nobody goes on: %d are left, %v", w.number(live), err)
	}
	wantCode(t, renew(turn), core.CodeStateConflict)
	w.settle()
	if err := w.Retain(ctx); err != nil { // the deletions were a change
		t.Error(err)
	}
	w.settle()
	turn = claim(stored)
	w.sql(`UPDATE retention_rounds SET claimed_until = now()`) // it died, and nothing has changed
	if err := w.Retain(ctx); err != nil || w.number(`SELECT turn::int FROM retention_rounds`) != int(turn)+1 {
		t.Errorf("nobody goes on: %v", err)
	}
	turn = claim(stored)
	policy.MaxAge = time.Minute
	if _, err := w.PutRetention(ctx, w.project, ws.Parent, policy); err != nil {
		t.Fatal(err)
	}
	wantCode(t, renew(turn), core.CodeStateConflict)
}

// TestRetentionThatFails has the operation of a policy fail. The round fails, and a later one does the work.
func TestRetentionThatFails(t *testing.T) {
	t.Parallel()
	w := quiet(t)
	ctx := t.Context()
	ws := w.create("main")
	w.grow(w.checkpoint(ws.ID).ID, 30, 20)
	w.sql(`CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'no row is deleted here'; END $$;
		CREATE TRIGGER refuse BEFORE UPDATE ON checkpoints FOR EACH ROW WHEN (NEW.state = 'deleted') EXECUTE FUNCTION refuse()`)
	if _, err := w.PutRetention(ctx, w.project, ws.Parent, controller.RetentionPolicy{Policy: retention.Policy{MaxAge: 24 * time.Hour}}); err != nil {
		t.Fatal(err)
	}
	eventually(t, "nobody else has it", func() bool {
		w.settle()
		return w.number(`SELECT count(*) FROM retention_rounds WHERE claimed_until > now()`) == 0 && w.Retain(ctx) != nil
	})
	const live = `SELECT count(*) FROM checkpoints WHERE id LIKE 'ckpt_bulk%' AND state = 'captured'`
	if n := w.number(live); n != 30 {
		t.Errorf("%d are left though their rows cannot change", n)
	}
	w.sql(`DROP TRIGGER refuse ON checkpoints`)
	w.settle()
	if err := w.Retain(ctx); err != nil || w.number(live) != 10 {
		t.Errorf("%d are left, %v", w.number(live), err)
	}
}
