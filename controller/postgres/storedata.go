package postgres

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// SealedAfter goes by the ids, which are in the order in which they were made.
func (t *tx) SealedAfter(ctx context.Context, after core.CheckpointID, including bool, limit int) ([]runnerapi.Stored, error) {
	rows, err := pgtx.Many[referenceRow](ctx, t, `
		SELECT id, manifest_key, manifest_digest, manifest_bytes FROM checkpoints
		WHERE state = 'sealed' AND (id > @after OR id = @after AND @including) ORDER BY id LIMIT @limit`, pgtx.Args{"after": after, "including": including, "limit": limit})
	list := make([]runnerapi.Stored, len(rows))
	for i, r := range rows {
		list[i] = runnerapi.Stored{CheckpointID: r.ID, Manifest: r.ManifestKey, Digest: r.ManifestDigest, Bytes: r.ManifestBytes}
	}
	return list, err
}

// CountSealed counts.
func (t *tx) CountSealed(ctx context.Context, after core.CheckpointID) (int, error) {
	rows, err := pgtx.Many[int](ctx, t, `SELECT count(*) AS n FROM checkpoints WHERE state = 'sealed' AND id > @after`, pgtx.Args{"after": after})
	if err != nil || len(rows) == 0 {
		return 0, err
	}
	return rows[0], nil
}

type neederRow struct {
	Key string            `db:"key"`
	ID  core.CheckpointID `db:"id"`
}

// NeededBy leaves out what attempts refer to.
func (t *tx) NeededBy(ctx context.Context, keys []string) (map[string][]core.CheckpointID, error) {
	rows, err := pgtx.Many[neederRow](ctx, t, `
		SELECT n.key, c.id FROM checkpoint_objects n JOIN checkpoints c ON c.id = n.checkpoint_id
		WHERE n.key = ANY(@keys::text[]) AND c.state = 'sealed' ORDER BY n.key, c.id`, pgtx.Args{"keys": keys})
	needs := make(map[string][]core.CheckpointID)
	for _, r := range rows {
		needs[r.Key] = append(needs[r.Key], r.ID)
	}
	return needs, err
}
