package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
)

type condemnRow struct {
	Looked    int `db:"looked"`
	Condemned int `db:"condemned"`
}

// needless are the objects o that nothing needs. No object gets its first need, or another when it has lost its last, later than
// its row: so what this finds stays so.
const needless = `o.condemned_at IS NULL AND NOT EXISTS (SELECT 1 FROM checkpoint_objects n WHERE n.key = o.key)`

// CondemnObjects works off a batch of store_released.
func (t *tx) CondemnObjects(ctx context.Context, limit int, dryRun bool) (int, int, error) {
	if dryRun {
		row, err := pgtx.One[condemnRow](ctx, t, nil, `
			SELECT 0 AS looked, (SELECT count(DISTINCT o.key) FROM store_released r JOIN store_objects o ON o.key = r.key WHERE `+needless+`) AS condemned`, pgtx.Args{})
		return 0, row.Condemned, err
	}
	row, err := pgtx.One[condemnRow](ctx, t, nil, `
		WITH looked AS (
			DELETE FROM store_released WHERE id IN (SELECT id FROM store_released ORDER BY id LIMIT @limit FOR UPDATE SKIP LOCKED) RETURNING key
		), condemned AS (
			UPDATE store_objects o SET condemned_at = now() WHERE o.key IN (SELECT key FROM looked) AND `+needless+` RETURNING 1
		)
		SELECT (SELECT count(*) FROM looked) AS looked, (SELECT count(*) FROM condemned) AS condemned`, pgtx.Args{"limit": limit})
	return row.Looked, row.Condemned, err
}

// CondemnedObjects returns objects whose time has come.
func (t *tx) CondemnedObjects(ctx context.Context, grace time.Duration, after string, limit int) ([]runnerapi.StoredObject, int, error) {
	rows, err := pgtx.Many[controller.StoredObject](ctx, t, `
		SELECT key, bytes, true AS condemned FROM store_objects WHERE condemned_at <= now() - make_interval(secs => @grace) AND key > @after ORDER BY key LIMIT @limit`,
		pgtx.Args{"grace": grace.Seconds(), "after": after, "limit": limit})
	if err != nil {
		return nil, 0, err
	}
	waiting, err := pgtx.One[int64](ctx, t, nil, `SELECT count(*) FROM store_objects WHERE condemned_at > now() - make_interval(secs => @grace)`, pgtx.Args{"grace": grace.Seconds()})
	list := make([]runnerapi.StoredObject, len(rows))
	for i, r := range rows {
		list[i] = runnerapi.StoredObject{Key: r.Key, Bytes: r.Bytes}
	}
	return list, int(waiting), err
}

// ForgetObjects removes rows.
func (t *tx) ForgetObjects(ctx context.Context, keys []string) error {
	_, err := t.Exec(ctx, `DELETE FROM store_objects WHERE key = ANY(@keys::text[]) AND condemned_at IS NOT NULL`, pgtx.Args{"keys": keys})
	return err
}

// Debris returns where given up attempts wrote.
func (t *tx) Debris(ctx context.Context, grace time.Duration, after string, limit int) ([]string, int, error) {
	rows, err := pgtx.Many[string](ctx, t, `
		SELECT prefix FROM store_debris WHERE since <= now() - make_interval(secs => @grace) AND prefix > @after ORDER BY prefix LIMIT @limit`,
		pgtx.Args{"grace": grace.Seconds(), "after": after, "limit": limit})
	if err != nil {
		return nil, 0, err
	}
	waiting, err := pgtx.One[int64](ctx, t, nil, `SELECT count(*) FROM store_debris WHERE since > now() - make_interval(secs => @grace)`, pgtx.Args{"grace": grace.Seconds()})
	return rows, int(waiting), err
}

// ForgetDebris removes a row.
func (t *tx) ForgetDebris(ctx context.Context, prefix string) error {
	_, err := t.Exec(ctx, `DELETE FROM store_debris WHERE prefix = @prefix`, pgtx.Args{"prefix": prefix})
	return err
}

// Objects returns a page of rows.
func (t *tx) Objects(ctx context.Context, after string, limit int) ([]controller.StoredObject, error) {
	return pgtx.Many[controller.StoredObject](ctx, t, `
		SELECT key, bytes, condemned_at IS NOT NULL AS condemned FROM store_objects WHERE key > @after ORDER BY key LIMIT @limit`, pgtx.Args{"after": after, "limit": limit})
}

// KnownObjects returns the rows of keys.
func (t *tx) KnownObjects(ctx context.Context, keys []string) (map[string]controller.StoredObject, error) {
	rows, err := pgtx.Many[controller.StoredObject](ctx, t, `
		SELECT key, bytes, condemned_at IS NOT NULL AS condemned FROM store_objects WHERE key = ANY(@keys::text[])`, pgtx.Args{"keys": keys})
	known := make(map[string]controller.StoredObject, len(rows))
	for _, r := range rows {
		known[r.Key] = r
	}
	return known, err
}

// OpenPrefixes returns the prefixes of attempts without a commit.
func (t *tx) OpenPrefixes(ctx context.Context) (uploading, debris []string, err error) {
	uploading, err = pgtx.Many[string](ctx, t, `
		SELECT coppice_seal_prefix(project_id, checkpoint_id, attempt) AS prefix FROM seals WHERE state = @uploading
		UNION ALL SELECT coppice_seal_prefix(project_id, checkpoint_id, 1) FROM imports`, pgtx.Args{"uploading": controller.SealUploading})
	if err != nil {
		return nil, nil, err
	}
	debris, err = pgtx.Many[string](ctx, t, `SELECT prefix FROM store_debris`, pgtx.Args{})
	return uploading, debris, err
}
