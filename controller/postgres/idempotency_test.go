package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func (d *db) claim(object string) controller.KeyUse {
	d.t.Helper()
	var use controller.KeyUse
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		use, err = tx.ClaimKey(ctx, d.project, "key", controller.KeyUse{Hash: [32]byte{1}, Object: object}, time.Hour)
		return err
	})
	return use
}

func TestClaimKey(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	if got := d.claim("op_1"); got.Object != "op_1" {
		t.Errorf("%+v", got)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.AnswerKey(ctx, d.project, "key", "op_2", []byte(`2`)); err != nil {
			return err
		}
		return tx.AnswerKey(ctx, d.project, "key", "op_1", []byte(`{"a": 1}`))
	})
	if got := d.claim("op_2"); got.Object != "op_1" || got.Hash != [32]byte{1} || string(got.Answer) != `{"a": 1}` {
		t.Errorf("%+v", got)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		return tx.ReleaseKey(ctx, d.project, "key", "op_2")
	})
	if got := d.claim("op_3"); got.Object != "op_1" {
		t.Errorf("somebody else's release freed it: %+v", got)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		return tx.ReleaseKey(ctx, d.project, "key", "op_1")
	})
	if got := d.claim("op_4"); got.Object != "op_4" {
		t.Errorf("%+v", got)
	}
	d.exec(`UPDATE idempotency_keys SET expires_at = now()`)
	if got := d.claim("op_5"); got.Object != "op_5" || got.Answer != nil {
		t.Errorf("expired: %+v", got)
	}
}

func TestSweepKeys(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	d.exec(`INSERT INTO idempotency_keys (project_id, key, hash, object_id, expires_at)
		SELECT $1, i::text, decode(repeat('00', 32), 'hex'), 'op_x', now() + make_interval(secs => i - 5) FROM generate_series(1, 8) AS i`, d.project)
	for _, want := range []int{3, 2, 0} {
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			n, err := tx.SweepKeys(ctx, 3)
			if n != want {
				t.Errorf("%d swept, want %d", n, want)
			}
			return err
		})
	}
}

// TestClaimsWaitForOneAnother claims a key that an open transaction has: whether it is taken is known when that has ended.
func TestClaimsWaitForOneAnother(t *testing.T) {
	t.Parallel()
	for name, first := range map[string]error{"committed": nil, "rolled back": errors.New("no")} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := newDB(t)
			claimed, second := make(chan struct{}), make(chan controller.KeyUse, 1)
			go func() {
				<-claimed
				second <- d.claim("op_2")
			}()
			err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
				if _, err := tx.ClaimKey(ctx, d.project, "key", controller.KeyUse{Object: "op_1"}, time.Hour); err != nil {
					return err
				}
				close(claimed)
				d.waitsForLock()
				return first
			})
			if !errors.Is(err, first) {
				t.Fatal(err)
			}
			want := "op_1"
			if first != nil {
				want = "op_2"
			}
			if got := <-second; got.Object != want {
				t.Errorf("%+v, want %s", got, want)
			}
		})
	}
}

// waitsForLock returns when a transaction of the database waits for another.
func (d *db) waitsForLock() {
	d.t.Helper()
	conn := d.conn()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for range 24_000 { // two minutes
		var n int
		if err := conn.QueryRow(d.t.Context(), `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&n); err != nil {
			d.t.Fatal(err)
		}
		if n > 0 {
			return
		}
		<-tick.C
	}
	d.t.Fatal("nobody waits")
}

// TestBusyKey does not wait for ever.
func TestBusyKey(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
		if _, err := tx.ClaimKey(ctx, d.project, "key", controller.KeyUse{Object: "op_1"}, time.Hour); err != nil {
			return err
		}
		return d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.ClaimKey(ctx, d.project, "key", controller.KeyUse{Object: "op_2"}, time.Hour)
			return err
		})
	})
	if core.CodeOf(err) != core.CodeIdempotencyInProgress {
		t.Errorf("%v", err)
	}
}

// TestUnknownOutcomeIsNotRepeated runs a transaction once whose commit may have succeeded.
func TestUnknownOutcomeIsNotRepeated(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	runs := 0
	err := d.try(controller.System(), func(context.Context, controller.AllTx) error {
		runs++
		return core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "the connection broke")
	})
	if core.CodeOf(err) != core.CodeDatabaseUnavailable || runs != 1 {
		t.Errorf("%d runs, %v", runs, err)
	}
}

// TestOperationOfKey: the operation that a request began is found without a look at the others.
func TestOperationOfKey(t *testing.T) {
	t.Parallel()
	const many = 5_000
	d := newDB(t)
	d.exec(fmt.Sprintf(`INSERT INTO operations (id, project_id, kind, state, input)
		SELECT 'op_' || n, '%s', 'build_image', 'pending', '{}' FROM generate_series(1, %d) n`, d.project, many))
	d.exec(`ANALYZE operations`)
	d.claim("op_7")
	read := d.counted(func() {
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			list, err := tx.Operations(ctx, controller.OperationFilter{
				Page: controller.Page{Limit: 20}, Kinds: []controller.OperationKind{controller.OpBuildImage}, ClaimedBy: "key",
			})
			if len(list) != 1 || list[0].ID != "op_7" {
				t.Errorf("%d operations", len(list))
			}
			return err
		})
	})
	if read > many/20 {
		t.Errorf("%d rows are read", read)
	}
}
