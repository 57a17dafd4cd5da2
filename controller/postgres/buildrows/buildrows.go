// Package buildrows keeps images that projects have built, and the logs of builds, in PostgreSQL.
package buildrows

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}

// CountBuild counts under a lock.
func (t *Tx) CountBuild(ctx context.Context, project core.ProjectID, most int) error {
	t.LockProject(project, "builds")
	n, err := pgtx.One[int](ctx, t, nil, `SELECT count(*)::integer AS n FROM operations WHERE project_id = @project AND kind = 'build_image' AND state IN ('pending', 'running')`,
		pgtx.Args{"project": project})
	if err == nil && n >= most {
		err = core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "%d builds of the project have not ended; wait for one of them", most)
	}
	return err
}

type imageRow struct {
	Name       string              `db:"name"`
	Checkpoint core.CheckpointID   `db:"checkpoint_id"`
	Source     string              `db:"source"`
	Config     []byte              `db:"config"`
	Operation  core.OperationID    `db:"operation_id"`
	Steps      int                 `db:"steps"`
	Cached     int                 `db:"cached_steps"`
	Labels     pgtx.Object[string] `db:"labels"`
	CreatedAt  time.Time           `db:"created_at"`
	Open       bool                `db:"published"`
}

const imageColumns = `i.name, i.checkpoint_id, i.source, i.config, i.operation_id, i.steps, i.cached_steps, i.labels, i.created_at,
	(SELECT c.published FROM checkpoints c WHERE c.id = i.checkpoint_id) AS published`

func (r imageRow) image() (builds.Image, error) {
	out := builds.Image{
		Name: r.Name, Checkpoint: r.Checkpoint, From: r.Source, Operation: r.Operation, Steps: r.Steps, Cached: r.Cached, Labels: r.Labels, CreatedAt: r.CreatedAt, Open: r.Open,
	}
	if err := json.Unmarshal(r.Config, &out.Config); err != nil {
		return out, fmt.Errorf("read configuration of image %s: %w", r.Name, err)
	}
	return out, nil
}

// PutProjectImage counts under a lock.
func (t *Tx) PutProjectImage(ctx context.Context, project core.ProjectID, image builds.Image, most int) (builds.Image, error) {
	config, err := json.Marshal(image.Config)
	if err != nil {
		return image, fmt.Errorf("encode configuration of image %s: %w", image.Name, err)
	}
	labels := image.Labels
	if labels == nil {
		labels = map[string]string{}
	}
	t.LockProject(project, "images")
	// Nobody deletes the checkpoint until the name is committed: see LockCheckpoint of package postgres.
	t.Soon(`SELECT pg_advisory_xact_lock_shared(hashtextextended(@id::text, 0))`, pgtx.Args{"id": image.Checkpoint})
	forkable, err := pgtx.One[bool](ctx, t, nil, `SELECT EXISTS (SELECT FROM checkpoints c WHERE c.id = @checkpoint AND c.project_id = @project AND c.state IN ('captured', 'sealed')) AS forkable`,
		pgtx.Args{"project": project, "checkpoint": image.Checkpoint})
	if err == nil && !forkable {
		err = core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "checkpoint %s, which is the end of the build, was deleted meanwhile; repeat the build", image.Checkpoint)
	}
	if err != nil {
		return image, err
	}
	row, err := pgtx.One[imageRow](ctx, t, core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "the project has %d images; delete one", most), `
		WITH c AS (
			UPDATE checkpoints SET published = true WHERE id = @checkpoint AND project_id = @project AND @open AND NOT published
		)
		INSERT INTO project_images AS i (project_id, name, checkpoint_id, source, config, operation_id, steps, cached_steps, labels)
		SELECT @project, @name, @checkpoint, @source, @config::bytea, @operation, @steps::integer, @cached::integer, @labels::jsonb
		WHERE (SELECT count(*) FROM project_images o WHERE o.project_id = @project AND o.name <> @name) < @most::bigint
		ON CONFLICT ON CONSTRAINT project_images_pkey DO UPDATE SET checkpoint_id = excluded.checkpoint_id, version = i.version + 1, source = excluded.source,
			config = excluded.config, operation_id = excluded.operation_id, steps = excluded.steps, cached_steps = excluded.cached_steps, labels = excluded.labels, created_at = now()
		RETURNING `+imageColumns, pgtx.Args{
		"project": project, "name": image.Name, "checkpoint": image.Checkpoint, "source": image.From, "config": config, "operation": image.Operation,
		"steps": image.Steps, "cached": image.Cached, "labels": labels, "most": most, "open": image.Open,
	})
	if err != nil {
		return image, err
	}
	out, err := row.image()
	out.Open = image.Open
	return out, err
}

func noImage(name string) error {
	return core.Errorf(core.NotFound, core.CodeImageNotFound, "the project has no image %s", core.Clip(name))
}

// ProjectImage reads.
func (t *Tx) ProjectImage(ctx context.Context, project core.ProjectID, name string) (builds.Image, error) {
	row, err := pgtx.One[imageRow](ctx, t, noImage(name), `SELECT `+imageColumns+` FROM project_images i WHERE i.project_id = @project AND i.name = @name`,
		pgtx.Args{"project": project, "name": name})
	if err != nil {
		return builds.Image{}, err
	}
	return row.image()
}

// ProjectImages reads.
func (t *Tx) ProjectImages(ctx context.Context, project core.ProjectID) ([]builds.Image, error) {
	rows, err := pgtx.Many[imageRow](ctx, t, `SELECT `+imageColumns+` FROM project_images i WHERE i.project_id = @project ORDER BY i.name`, pgtx.Args{"project": project})
	if err != nil {
		return nil, err
	}
	list := make([]builds.Image, len(rows))
	for i, r := range rows {
		if list[i], err = r.image(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// DeleteProjectImage deletes.
func (t *Tx) DeleteProjectImage(ctx context.Context, project core.ProjectID, name string) error {
	n, err := t.Exec(ctx, `DELETE FROM project_images WHERE project_id = @project AND name = @name`, pgtx.Args{"project": project, "name": name})
	if err == nil && n == 0 {
		err = noImage(name)
	}
	return err
}

// BuildCheckpoint takes no checkpoint that only a runner without a lease has.
func (t *Tx) BuildCheckpoint(ctx context.Context, project core.ProjectID, key string) (core.CheckpointID, error) {
	list, err := pgtx.Many[struct {
		ID     core.CheckpointID `db:"id"`
		State  string            `db:"state"`
		Runner core.RunnerID     `db:"runner_id"`
	}](ctx, t, `SELECT c.id, c.state, coalesce(c.runner_id, '') AS runner_id FROM checkpoints c
		WHERE c.project_id = @project AND c.labels ? 'coppice.build/key' AND c.labels ->> 'coppice.build/key' = @key AND c.state IN ('captured', 'sealed')
		ORDER BY c.id DESC LIMIT 16`, pgtx.Args{"project": project, "key": key})
	if err != nil || len(list) == 0 {
		return "", err
	}
	ids := make([]string, 0, len(list))
	for _, c := range list {
		ids = append(ids, string(c.Runner))
	}
	alive, err := pgtx.AsSystem[core.RunnerID](ctx, t, `SELECT r.id FROM runners r WHERE r.id = ANY(@ids::text[]) AND r.lease_expires_at > now()`, pgtx.Args{"ids": ids})
	if err != nil {
		return "", err
	}
	there := map[core.RunnerID]bool{}
	for _, r := range alive {
		there[r] = true
	}
	for _, c := range list {
		if c.State == string(core.CheckpointSealed) || there[c.Runner] {
			return c.ID, nil
		}
	}
	return "", nil
}

// leftOut is the last part of a log that was cut.
const leftOut = "\nthe rest of the log is left out\n"

// AppendBuildLog leaves out what does not fit. It reads the last part only: a log has many.
func (t *Tx) AppendBuildLog(ctx context.Context, ref steps.Ref, data []byte, most int64) error {
	leased, err := pgtx.One[bool](ctx, t, nil, `
		WITH o AS (
			SELECT id, project_id FROM operations WHERE id = @op AND lease_epoch = @epoch AND state = 'running' FOR KEY SHARE
		), e AS (
			SELECT coalesce(max(l.at + length(l.data)), 0)::bigint AS at, coalesce(bool_or(l.data = convert_to(@cut::text, 'UTF8')), false) AS cut
			FROM (SELECT * FROM build_logs WHERE operation_id = @op ORDER BY at DESC LIMIT 1) l
		), i AS (
			INSERT INTO build_logs (operation_id, project_id, at, data) SELECT o.id, o.project_id, e.at,
				CASE WHEN e.at + length(@data::bytea) > @most::bigint THEN convert_to(@cut::text, 'UTF8') ELSE @data::bytea END
			FROM o, e WHERE e.at <= @most::bigint AND NOT e.cut
			ON CONFLICT DO NOTHING
		)
		SELECT EXISTS (SELECT FROM o) AS leased`, pgtx.Args{"op": ref.ID, "epoch": ref.Epoch, "data": data, "most": most, "cut": leftOut})
	if err == nil && !leased {
		err = operations.ErrLeaseLost
	}
	return err
}

// BuildLog reads parts up to 256 KiB.
func (t *Tx) BuildLog(ctx context.Context, id core.OperationID, offset int64) (builds.Log, error) {
	rows, err := pgtx.Many[struct {
		At   int64  `db:"at"`
		Data []byte `db:"data"`
	}](ctx, t, `SELECT l.at, l.data FROM build_logs l WHERE l.operation_id = @id AND l.at + length(l.data) > @offset::bigint ORDER BY l.at LIMIT 64`,
		pgtx.Args{"id": id, "offset": offset})
	out := builds.Log{Next: offset}
	if err != nil {
		return out, err
	}
	for _, r := range rows {
		out.Data = append(out.Data, r.Data[max(0, out.Next-r.At):]...)
		out.Next = r.At + int64(len(r.Data))
		if len(out.Data) >= 256<<10 {
			break
		}
	}
	return out, nil
}

// SweepBuildLogs finds logs by their first part.
func (t *Tx) SweepBuildLogs(ctx context.Context, kept time.Duration, newest, limit int) (int, error) {
	n, err := t.Exec(ctx, `
		DELETE FROM build_logs WHERE operation_id IN (
			SELECT s.operation_id FROM (
				SELECT operation_id, row_number() OVER (PARTITION BY project_id ORDER BY operation_id DESC) AS place FROM build_logs WHERE at = 0
			) s JOIN operations o ON o.id = s.operation_id
			WHERE o.state IN ('succeeded', 'failed') AND (o.ended_at < now() - make_interval(secs => @kept) OR s.place > @newest)
			ORDER BY s.operation_id LIMIT @limit
		)`, pgtx.Args{"kept": kept.Seconds(), "newest": newest, "limit": limit})
	return int(n), err
}
