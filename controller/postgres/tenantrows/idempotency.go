package tenantrows

import (
	"context"
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

type keyUseRow struct {
	Hash   []byte `db:"hash"`
	Object string `db:"object_id"`
	Answer []byte `db:"answer"`
}

func (r keyUseRow) use() controller.KeyUse {
	use := controller.KeyUse{Object: r.Object, Answer: r.Answer}
	copy(use.Hash[:], r.Hash)
	return use
}

// claimAttempts is how often a claim that lost to a row that is gone now is tried.
const claimAttempts = 3

const claimKey = `
	INSERT INTO idempotency_keys AS k (project_id, key, hash, object_id, expires_at)
	VALUES (@project, @key, @hash, @object, now() + make_interval(secs => @ttl))
	ON CONFLICT ON CONSTRAINT idempotency_keys_pkey DO UPDATE
		SET hash = excluded.hash, object_id = excluded.object_id, answer = NULL, created_at = now(), expires_at = excluded.expires_at
		WHERE k.expires_at <= now()`

// ClaimKey meets other claimants at the primary key. An expired row is taken over.
func (t *Tx) ClaimKey(ctx context.Context, project core.ProjectID, key string, use controller.KeyUse, ttl time.Duration) (controller.KeyUse, error) {
	for range claimAttempts {
		n, err := t.Exec(ctx, claimKey, pgtx.Args{"project": project, "key": key, "hash": use.Hash[:], "object": use.Object, "ttl": ttl.Seconds()})
		switch {
		case pgtx.IsLockTimeout(err):
			return controller.KeyUse{}, core.Wrapf(err, core.Conflict, core.CodeIdempotencyInProgress, "the first request with this idempotency key is being admitted; repeat yours")
		case err != nil || n == 1:
			return use, err
		}
		if other, err := t.KeyUse(ctx, project, key); err != nil || other.Object != "" {
			return other, err
		}
	}
	return controller.KeyUse{}, core.Errorf(core.Conflict, core.CodeIdempotencyInProgress, "others use this idempotency key at this moment; repeat the request")
}

// KeyUse reads.
func (t *Tx) KeyUse(ctx context.Context, project core.ProjectID, key string) (controller.KeyUse, error) {
	rows, err := pgtx.Many[keyUseRow](ctx, t, `SELECT hash, object_id, answer FROM idempotency_keys WHERE project_id = @project AND key = @key AND expires_at > now()`,
		pgtx.Args{"project": project, "key": key})
	if err != nil || len(rows) == 0 {
		return controller.KeyUse{}, err
	}
	return rows[0].use(), nil
}

// AnswerKey records what was made.
func (t *Tx) AnswerKey(ctx context.Context, project core.ProjectID, key, object string, answer json.RawMessage) error {
	_, err := t.Exec(ctx, `UPDATE idempotency_keys SET answer = @answer WHERE project_id = @project AND key = @key AND object_id = @object`,
		pgtx.Args{"project": project, "key": key, "object": object, "answer": answer})
	return err
}

// ReleaseKey makes the key free.
func (t *Tx) ReleaseKey(ctx context.Context, project core.ProjectID, key, object string) error {
	_, err := t.Exec(ctx, `DELETE FROM idempotency_keys WHERE project_id = @project AND key = @key AND object_id = @object`,
		pgtx.Args{"project": project, "key": key, "object": object})
	return err
}

// SweepKeys removes expired keys. One that is being taken over is skipped.
func (t *Tx) SweepKeys(ctx context.Context, limit int) (int, error) {
	n, err := t.Exec(ctx, `
		DELETE FROM idempotency_keys WHERE ctid = ANY(ARRAY(
			SELECT ctid FROM idempotency_keys WHERE expires_at <= now() ORDER BY expires_at LIMIT @limit FOR UPDATE SKIP LOCKED))`,
		pgtx.Args{"limit": limit})
	return int(n), err
}
