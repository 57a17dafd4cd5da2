package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
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
		row, err := one[condemnRow](ctx, t, nil, `
			SELECT 0 AS looked, (SELECT count(DISTINCT o.key) FROM store_released r JOIN store_objects o ON o.key = r.key WHERE `+needless+`) AS condemned`, args{})
		return 0, row.Condemned, err
	}
	row, err := one[condemnRow](ctx, t, nil, `
		WITH looked AS (
			DELETE FROM store_released WHERE id IN (SELECT id FROM store_released ORDER BY id LIMIT @limit FOR UPDATE SKIP LOCKED) RETURNING key
		), condemned AS (
			UPDATE store_objects o SET condemned_at = now() WHERE o.key IN (SELECT key FROM looked) AND `+needless+` RETURNING 1
		)
		SELECT (SELECT count(*) FROM looked) AS looked, (SELECT count(*) FROM condemned) AS condemned`, args{"limit": limit})
	return row.Looked, row.Condemned, err
}

type objectRow struct {
	Key       string `db:"key"`
	Bytes     int64  `db:"bytes"`
	Condemned bool   `db:"condemned"`
}

// CondemnedObjects returns objects whose time has come.
func (t *tx) CondemnedObjects(ctx context.Context, grace time.Duration, after string, limit int) ([]runnerapi.StoredObject, int, error) {
	rows, err := many[objectRow](ctx, t, `
		SELECT key, bytes, true AS condemned FROM store_objects WHERE condemned_at <= now() - make_interval(secs => @grace) AND key > @after ORDER BY key LIMIT @limit`,
		args{"grace": grace.Seconds(), "after": after, "limit": limit})
	if err != nil {
		return nil, 0, err
	}
	waiting, err := one[countedRow](ctx, t, nil, `SELECT count(*) FROM store_objects WHERE condemned_at > now() - make_interval(secs => @grace)`, args{"grace": grace.Seconds()})
	list := make([]runnerapi.StoredObject, len(rows))
	for i, r := range rows {
		list[i] = runnerapi.StoredObject{Key: r.Key, Bytes: r.Bytes}
	}
	return list, int(waiting.Count), err
}

// ForgetObjects removes rows.
func (t *tx) ForgetObjects(ctx context.Context, keys []string) error {
	_, err := t.exec(ctx, `DELETE FROM store_objects WHERE key = ANY(@keys::text[]) AND condemned_at IS NOT NULL`, args{"keys": keys})
	return err
}

type prefixRow struct {
	Prefix string `db:"prefix"`
}

// Debris returns where given up attempts wrote.
func (t *tx) Debris(ctx context.Context, grace time.Duration, after string, limit int) ([]string, int, error) {
	rows, err := many[prefixRow](ctx, t, `
		SELECT prefix FROM store_debris WHERE since <= now() - make_interval(secs => @grace) AND prefix > @after ORDER BY prefix LIMIT @limit`,
		args{"grace": grace.Seconds(), "after": after, "limit": limit})
	if err != nil {
		return nil, 0, err
	}
	waiting, err := one[countedRow](ctx, t, nil, `SELECT count(*) FROM store_debris WHERE since > now() - make_interval(secs => @grace)`, args{"grace": grace.Seconds()})
	return prefixes(rows), int(waiting.Count), err
}

func prefixes(rows []prefixRow) []string {
	list := make([]string, len(rows))
	for i, r := range rows {
		list[i] = r.Prefix
	}
	return list
}

// ForgetDebris removes a row.
func (t *tx) ForgetDebris(ctx context.Context, prefix string) error {
	_, err := t.exec(ctx, `DELETE FROM store_debris WHERE prefix = @prefix`, args{"prefix": prefix})
	return err
}

// Objects returns a page of rows.
func (t *tx) Objects(ctx context.Context, after string, limit int) ([]controller.StoredObject, error) {
	rows, err := many[objectRow](ctx, t, `
		SELECT key, bytes, condemned_at IS NOT NULL AS condemned FROM store_objects WHERE key > @after ORDER BY key LIMIT @limit`, args{"after": after, "limit": limit})
	list := make([]controller.StoredObject, len(rows))
	for i, r := range rows {
		list[i] = controller.StoredObject(r)
	}
	return list, err
}

// KnownObjects returns the rows of keys.
func (t *tx) KnownObjects(ctx context.Context, keys []string) (map[string]controller.StoredObject, error) {
	rows, err := many[objectRow](ctx, t, `
		SELECT key, bytes, condemned_at IS NOT NULL AS condemned FROM store_objects WHERE key = ANY(@keys::text[])`, args{"keys": keys})
	known := make(map[string]controller.StoredObject, len(rows))
	for _, r := range rows {
		known[r.Key] = controller.StoredObject(r)
	}
	return known, err
}

// OpenPrefixes returns the prefixes of attempts without a commit.
func (t *tx) OpenPrefixes(ctx context.Context) (uploading, debris []string, err error) {
	open, err := many[prefixRow](ctx, t, `
		SELECT coppice_seal_prefix(project_id, checkpoint_id, attempt) AS prefix FROM seals WHERE state = @uploading
		UNION ALL SELECT coppice_seal_prefix(project_id, checkpoint_id, 1) FROM imports`, args{"uploading": controller.SealUploading})
	if err != nil {
		return nil, nil, err
	}
	left, err := many[prefixRow](ctx, t, `SELECT prefix FROM store_debris`, args{})
	return prefixes(open), prefixes(left), err
}
