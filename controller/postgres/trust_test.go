package postgres_test

import (
	"context"
	"crypto/sha256"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// TestTokenOfAnEarlierHistory: a failover that loses commits may have lost that a token was spent, so no token lives longer than the history
// of the database that it was made in.
func TestTokenOfAnEarlierHistory(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	use := func(hash [32]byte) (controller.RunnerToken, error) {
		var row controller.RunnerToken
		err := d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
			var err error
			row, err = tx.UseRunnerToken(ctx, hash)
			return err
		})
		return row, err
	}
	insert := func(secret string) controller.RunnerToken {
		token := controller.RunnerToken{Hash: sha256.Sum256([]byte(secret)), RunnerID: core.NewID[core.RunnerID]()}
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.InsertRunnerToken(ctx, token, time.Hour)
			return err
		})
		return token
	}
	now, before := insert("now"), insert("before")
	d.exec(`UPDATE runner_tokens SET history = history - 1 WHERE hash = $1`, before.Hash[:])
	if got, err := use(now.Hash); err != nil || got.RunnerID != now.RunnerID {
		t.Errorf("%+v, %v", got, err)
	}
	_, err := use(before.Hash)
	wantCode(t, err, core.CodeJoinTokenRefused)
	_, err = use(now.Hash)
	wantCode(t, err, core.CodeJoinTokenRefused)
}
