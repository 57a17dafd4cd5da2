package postgres

import (
	"context"
	"maps"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// maxSources bounds the ancestors in a request to a runner: a runner gains little from ancestors that are further up.
const maxSources = 64

// Sources walks up as Lineage does.
func (t *tx) Sources(ctx context.Context, id core.CheckpointID) ([]runnerapi.Stored, error) {
	rows, err := pgtx.Many[referenceRow](ctx, t, `
		WITH RECURSIVE up AS (
			SELECT c.id, c.parent_id, c.root_id, c.state, c.manifest_key, c.manifest_digest, c.manifest_bytes, 0 AS n FROM checkpoints c WHERE c.id = @id
			UNION ALL
			SELECT p.*, up.n + 1 FROM up CROSS JOIN LATERAL (
				SELECT c.id, c.parent_id, c.root_id, c.state, c.manifest_key, c.manifest_digest, c.manifest_bytes FROM checkpoints c WHERE c.id = up.parent_id LIMIT 1
			) p WHERE up.n < @most::int - 2
		), path AS (
			SELECT id, state, manifest_key, manifest_digest, manifest_bytes, n FROM up
			UNION ALL
			SELECT c.id, c.state, c.manifest_key, c.manifest_digest, c.manifest_bytes, @most FROM checkpoints c
			WHERE c.id = (SELECT root_id FROM up WHERE n = 0) AND NOT EXISTS (SELECT 1 FROM up WHERE up.id = c.id)
		)
		SELECT id, manifest_key, manifest_digest, manifest_bytes FROM path WHERE state = 'sealed' ORDER BY n`, pgtx.Args{"id": id, "most": maxSources})
	list := make([]runnerapi.Stored, len(rows))
	for i, r := range rows {
		list[i] = runnerapi.Stored{CheckpointID: r.ID, Manifest: r.ManifestKey, Digest: r.ManifestDigest, Bytes: r.ManifestBytes}
	}
	return list, err
}

// SetHolds changes what differs. The row of a checkpoint that is to be held is locked, so that its deletion comes before, and it is not held, or
// sees the hold.
func (t *tx) SetHolds(ctx context.Context, runner core.RunnerID, fetching []core.CheckpointID) error {
	rows, err := pgtx.Many[core.CheckpointID](ctx, t, `SELECT checkpoint_id AS id FROM store_holds WHERE runner_id = @runner`, pgtx.Args{"runner": runner})
	if err != nil {
		return err
	}
	fresh := make(map[core.CheckpointID]bool, len(fetching))
	for _, id := range fetching {
		fresh[id] = true
	}
	var ended []core.CheckpointID
	for _, r := range rows {
		if !fresh[r] {
			ended = append(ended, r)
		}
		delete(fresh, r)
	}
	if len(fresh) > 0 {
		_, err = t.Exec(ctx, `
			INSERT INTO store_holds (checkpoint_id, runner_id, project_id)
			SELECT c.id, @runner, c.project_id FROM checkpoints c WHERE c.id = ANY(@ids::text[]) AND c.state = 'sealed' ORDER BY c.id FOR SHARE`,
			pgtx.Args{"ids": pgtx.Texts(slices.Sorted(maps.Keys(fresh))), "runner": runner})
	}
	if len(ended) > 0 && err == nil {
		_, err = t.Exec(ctx, `DELETE FROM store_holds WHERE runner_id = @runner AND checkpoint_id = ANY(@ids::text[])`, pgtx.Args{"ids": pgtx.Texts(ended), "runner": runner})
	}
	return err
}

type nearRow struct {
	RunnerID core.RunnerID `db:"runner_id"`
	Distance int           `db:"distance"`
}

// nearest bounds the runners that are looked at for each distance.
const nearest = 16

// Near ranks runners: those with the checkpoint, with its parent, with its root, with its image; of each a few.
func (t *tx) Near(ctx context.Context, cp controller.Checkpoint) (map[core.RunnerID]int, error) {
	rows, err := pgtx.Many[nearRow](ctx, t, `
		SELECT runner_id, min(distance) AS distance FROM (
			SELECT k.runner_id, n.distance::int FROM unnest(ARRAY[@id, @parent, @root]::text[]) WITH ORDINALITY AS n (id, distance) CROSS JOIN LATERAL (
				SELECT x.runner_id FROM checkpoint_copies x WHERE x.checkpoint_id = n.id ORDER BY x.runner_id LIMIT @nearest
			) k
			UNION ALL
			SELECT l.runner_id, 4 FROM (SELECT id FROM images WHERE project_id = @system AND digest = @image) i CROSS JOIN LATERAL (
				SELECT x.runner_id FROM image_locations x WHERE x.image_id = i.id LIMIT @nearest
			) l
		) AS known GROUP BY runner_id`,
		pgtx.Args{"id": cp.ID, "parent": cp.Parent, "root": cp.Root, "image": cp.Image.Digest, "system": controller.SystemProject, "nearest": nearest})
	near := make(map[core.RunnerID]int, len(rows))
	for _, r := range rows {
		near[r.RunnerID] = r.Distance - 1
	}
	return near, err
}

// Peers are some of those that hold a copy and whose lease has not ended. Only the first copies of each checkpoint are looked at.
func (t *tx) Peers(ctx context.Context, cp controller.Checkpoint) ([]runnerapi.Peer, error) {
	return pgtx.Many[runnerapi.Peer](ctx, t, `
		SELECT r.id, r.endpoint FROM (
			SELECT k.runner_id, min(n.distance) AS distance
			FROM unnest(ARRAY[@id, @parent, @root]::text[]) WITH ORDINALITY AS n (id, distance) CROSS JOIN LATERAL (
				SELECT x.runner_id FROM checkpoint_copies x WHERE x.checkpoint_id = n.id ORDER BY x.runner_id LIMIT @nearest
			) k
			GROUP BY k.runner_id
		) AS near CROSS JOIN LATERAL (SELECT * FROM runners x WHERE x.id = near.runner_id LIMIT 1) r
		WHERE r.lease_expires_at > now() AND r.fenced_at IS NULL ORDER BY near.distance, r.id LIMIT @most`,
		pgtx.Args{"id": cp.ID, "parent": cp.Parent, "root": cp.Root, "most": runnerapi.MaxPeers, "nearest": nearest})
}

type copyRow struct {
	ID     core.CheckpointID `db:"id"`
	Summed bool              `db:"summed"`
}

// SetCopies compares what a runner has said before with what it says now. It does so here: the planner cannot know how long the lists are.
func (t *tx) SetCopies(ctx context.Context, id core.RunnerID, ids []core.CheckpointID) error {
	rows, err := pgtx.Many[copyRow](ctx, t, `SELECT checkpoint_id AS id, id_sum IS NOT NULL AS summed FROM checkpoint_copies WHERE runner_id = @runner`, pgtx.Args{"runner": id})
	if err != nil {
		return err
	}
	if slices.ContainsFunc(rows, func(r copyRow) bool { return !r.Summed }) { // of a controller of before
		if _, err := t.Exec(ctx, `UPDATE checkpoint_copies SET id_sum = coppice_id_sum(checkpoint_id) WHERE runner_id = @runner AND id_sum IS NULL`, pgtx.Args{"runner": id}); err != nil {
			return err
		}
	}
	fresh := make(map[core.CheckpointID]bool, len(ids))
	for _, cp := range ids {
		fresh[cp] = true
	}
	var gone []core.CheckpointID
	for _, r := range rows {
		if fresh[r.ID] {
			delete(fresh, r.ID)
		} else {
			gone = append(gone, r.ID)
		}
	}
	return t.ChangeCopies(ctx, id, slices.Sorted(maps.Keys(fresh)), gone)
}

// ChangeCopies locks the rows of checkpoints first, in order, as their deletion does: that comes before, and there is no copy, or it
// removes the copy.
func (t *tx) ChangeCopies(ctx context.Context, id core.RunnerID, come, gone []core.CheckpointID) error {
	if len(come) > 0 {
		if _, err := t.Exec(ctx, `
			INSERT INTO checkpoint_copies (checkpoint_id, runner_id, project_id, shared, id_sum)
			SELECT c.id, @runner, c.project_id, c.shared, coppice_id_sum(c.id) FROM checkpoints c
			WHERE c.id = ANY(@ids::text[]) AND c.state IN ('captured', 'sealed') ORDER BY c.id FOR SHARE
			ON CONFLICT DO NOTHING`, pgtx.Args{"ids": pgtx.Texts(come), "runner": id}); err != nil {
			return err
		}
	}
	if len(gone) == 0 {
		return nil
	}
	_, err := t.Exec(ctx, `DELETE FROM checkpoint_copies WHERE runner_id = @runner AND checkpoint_id = ANY(@ids::text[])`, pgtx.Args{"ids": pgtx.Texts(gone), "runner": id})
	return err
}
