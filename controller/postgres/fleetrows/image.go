package fleetrows

import (
	"context"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/imageref"
)

type newImage struct {
	ID        core.ImageID `json:"id"`
	Digest    core.Digest  `json:"digest"`
	Name      string       `json:"name"`
	SizeBytes int64        `json:"size_bytes"`
	BuiltAt   time.Time    `json:"built_at"`
}

// unlisted is in the place of the name of an image that was pulled for a project. It has a slash, so lists leave the image out.
const unlisted = "/"

// rowsOf returns a row for each name of an image, and one for each reference under which it was pulled. Both are in the column name: a name never
// has a slash, and a whole reference always has one.
func rowsOf(images []runnerapi.Image) []newImage {
	rows := make([]newImage, 0, len(images))
	for _, img := range images {
		row := newImage{ID: core.NewID[core.ImageID](), Digest: img.Digest, Name: img.Name, SizeBytes: img.SizeBytes, BuiltAt: img.CreatedAt}
		if img.Unlisted {
			row.Name = unlisted
		}
		rows = append(rows, row)
		for _, r := range img.References {
			if strings.Contains(r, "/") && len(r) <= imageref.MaxBytes {
				row.Name = r
				rows = append(rows, row)
			}
		}
	}
	return rows
}

// SetImages replaces what a runner is known to hold, and records the checksum of the list. What is in a runner's own store was put there by the operator: it
// is published to all projects.
func (t *Tx) SetImages(ctx context.Context, runner core.RunnerID, images []runnerapi.Image) error {
	rows := rowsOf(images)
	if _, err := t.Exec(ctx, `UPDATE runner_loads SET images_sum = @sum WHERE runner_id = @runner`, pgtx.Args{"sum": runnerapi.SumImages(images), "runner": runner}); err != nil {
		return err
	}
	const recordset = ` FROM jsonb_to_recordset(@rows::jsonb) AS v (id text, digest text, name text, size_bytes bigint, built_at timestamptz)`
	if _, err := t.Exec(ctx, `
		INSERT INTO images (id, project_id, digest, shared, size_bytes, built_at)
		SELECT DISTINCT ON (v.digest) v.id, @project, v.digest, true, v.size_bytes, v.built_at`+recordset+` ORDER BY v.digest
		ON CONFLICT ON CONSTRAINT images_project_digest_key DO NOTHING`, pgtx.Args{"rows": rows, "project": controller.SystemProject}); err != nil {
		return err
	}
	if _, err := t.Exec(ctx, `
		DELETE FROM image_locations l USING images i WHERE i.id = l.image_id AND l.runner_id = @runner
			AND NOT EXISTS (SELECT 1`+recordset+` WHERE v.digest = i.digest AND coalesce(v.name, '') = l.name)`,
		pgtx.Args{"rows": rows, "runner": runner}); err != nil {
		return err
	}
	_, err := t.Exec(ctx, `
		INSERT INTO image_locations (project_id, image_id, runner_id, name, shared)
		SELECT DISTINCT i.project_id, i.id, @runner, coalesce(v.name, ''), true`+recordset+` JOIN images i ON i.digest = v.digest AND i.project_id = @project
		ON CONFLICT ON CONSTRAINT image_locations_pkey DO NOTHING`, pgtx.Args{"rows": rows, "runner": runner, "project": controller.SystemProject})
	return err
}

type imageRow struct {
	ID        core.ImageID `db:"id"`
	Name      string       `db:"name"`
	Digest    core.Digest  `db:"digest"`
	SizeBytes int64        `db:"size_bytes"`
	BuiltAt   time.Time    `db:"built_at"`
	Runners   []string     `db:"runners"`
}

func (r imageRow) image() controller.Image {
	img := controller.Image{ID: r.ID, Name: r.Name, Digest: r.Digest, SizeBytes: r.SizeBytes, BuiltAt: r.BuiltAt}
	for _, id := range r.Runners {
		img.Runners = append(img.Runners, core.RunnerID(id))
	}
	return img
}

const imageColumns = ` i.id, i.digest, i.size_bytes, i.built_at, array_agg(DISTINCT l.runner_id::text) AS runners`

// Images lists what runners hold, one entry for each name of an image, newest first.
func (t *Tx) Images(ctx context.Context, p controller.Page) ([]controller.Image, error) {
	rows, err := pgtx.Many[imageRow](ctx, t, `
		SELECT`+imageColumns+`, l.name FROM image_locations l JOIN images i ON i.id = l.image_id WHERE l.name NOT LIKE '%/%'
		GROUP BY i.id, l.name HAVING (@after::text = '' OR (i.id || '/' || l.name) COLLATE "C" < @after COLLATE "C")
		ORDER BY (i.id || '/' || l.name) COLLATE "C" DESC LIMIT @limit`, pgtx.Args{"after": p.After, "limit": p.Limit})
	return pgtx.Map(rows, imageRow.image), err
}

// namedImages bounds the images of one name that FindImage looks at.
const namedImages = 16

type foundImageRow struct {
	ID        core.ImageID `db:"id"`
	Name      string       `db:"name"`
	Digest    core.Digest  `db:"digest"`
	SizeBytes int64        `db:"size_bytes"`
	BuiltAt   time.Time    `db:"built_at"`
}

const nameOfImage = `coalesce((SELECT l.name FROM image_locations l WHERE l.image_id = i.id AND l.name NOT LIKE '%/%' ORDER BY l.name DESC LIMIT 1), '')`

// FindImage steps through the images that have the name or the whole reference, the last recorded first, however many runners hold each. It
// takes the newest of them that a runner with a lease holds.
func (t *Tx) FindImage(ctx context.Context, ref string) (controller.Image, error) {
	absent := core.Errorf(core.NotFound, core.CodeImageNotFound, "no reachable runner has an image %q; build it with `coppice image build`, or pull it with `coppice image pull`", core.Clip(ref))
	if ref == unlisted { // in the place of a name it would find the image of any project
		return controller.Image{}, absent
	}
	rows, err := pgtx.ByIndex[foundImageRow](ctx, t, `
		WITH RECURSIVE named AS (
			(SELECT l.image_id, 1 AS n FROM image_locations l WHERE l.name = @ref AND l.name <> '' ORDER BY l.image_id DESC LIMIT 1)
			UNION ALL
			SELECT x.image_id, named.n + 1 FROM named CROSS JOIN LATERAL (
				SELECT l.image_id FROM image_locations l WHERE l.name = @ref AND l.image_id < named.image_id ORDER BY l.image_id DESC LIMIT 1
			) x WHERE named.n < @most
		), found AS (
			SELECT i.id, `+"CASE WHEN @ref::text LIKE '%/%' THEN "+nameOfImage+" ELSE @ref::text END"+` AS name, i.digest, i.size_bytes, i.built_at FROM named CROSS JOIN LATERAL (SELECT * FROM images x WHERE x.id = named.image_id LIMIT 1) i
			UNION ALL
			SELECT i.id, `+nameOfImage+`, i.digest, i.size_bytes, i.built_at
			FROM images i WHERE i.project_id = @system AND i.digest = @ref
		)
		SELECT f.id, f.name, f.digest, f.size_bytes, f.built_at FROM found f WHERE EXISTS (
			SELECT 1 FROM image_locations l CROSS JOIN LATERAL (
				SELECT 1 FROM runners r WHERE r.id = l.runner_id AND r.lease_expires_at > now() AND r.fenced_at IS NULL LIMIT 1
			) r WHERE l.image_id = f.id OFFSET 0)
		ORDER BY f.built_at DESC, f.id LIMIT 1`, pgtx.Args{"ref": ref, "most": namedImages, "system": controller.SystemProject})
	if err != nil || len(rows) == 0 {
		if err == nil {
			err = absent
		}
		return controller.Image{}, err
	}
	r := rows[0]
	return controller.Image{ID: r.ID, Name: r.Name, Digest: r.Digest, SizeBytes: r.SizeBytes, BuiltAt: r.BuiltAt}, nil
}
