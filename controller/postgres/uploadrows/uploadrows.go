// Package uploadrows keeps uploads in PostgreSQL.
package uploadrows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/uploads"
	"github.com/coppice-dev/coppice/core"
)

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}

type uploadRow struct {
	ID        string    `db:"id"`
	Size      int64     `db:"bytes"`
	SHA256    string    `db:"sha256"`
	CreatedAt time.Time `db:"created_at"`
	ExpiresAt time.Time `db:"expires_at"`
	Data      string    `db:"data_id"`
	Parts     int       `db:"parts"`
}

const uploadColumns = `u.id, u.bytes, coalesce(u.sha256, '') AS sha256, u.created_at, u.expires_at, u.data_id, u.parts`

// BeginUpload counts under a lock.
func (t *Tx) BeginUpload(ctx context.Context, project core.ProjectID, id, data string, count int, life time.Duration) error {
	t.LockProject(project, "uploads")
	n, err := t.Exec(ctx, `
		INSERT INTO uploads (data_id, project_id, id, expires_at) SELECT @data, @project, @id, now() + make_interval(secs => @life)
		WHERE (SELECT count(*) FROM uploads WHERE project_id = @project) < @count::bigint`,
		pgtx.Args{"data": data, "project": project, "id": id, "life": life.Seconds(), "count": count})
	if err == nil && n == 0 {
		err = core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "the project has %d uploads already; delete one, or wait until one has expired", count)
	}
	return err
}

// AppendUpload counts under a lock.
func (t *Tx) AppendUpload(ctx context.Context, project core.ProjectID, data string, index int, part []byte, most int64, life time.Duration) error {
	t.LockProject(project, "uploads")
	type counted struct {
		There bool  `db:"there"`
		Bytes int64 `db:"bytes"`
	}
	got, err := pgtx.One[counted](ctx, t, nil, `
		WITH u AS (
			UPDATE uploads SET bytes = bytes + @n::bigint, parts = @index::integer + 1, expires_at = now() + make_interval(secs => @life)
			WHERE data_id = @data AND sha256 IS NULL AND parts = @index::integer RETURNING data_id, project_id
		), p AS (
			INSERT INTO upload_parts (data_id, project_id, index, data) SELECT data_id, project_id, @index::integer, @part FROM u
		)
		SELECT EXISTS (SELECT FROM u) AS there, coalesce((SELECT sum(bytes) FROM uploads WHERE project_id = @project), 0)::bigint + @n::bigint AS bytes`,
		pgtx.Args{"data": data, "index": index, "part": part, "n": len(part), "life": life.Seconds(), "project": project})
	switch {
	case err != nil:
		return err
	case !got.There:
		return absent(data)
	case got.Bytes > most:
		return core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "the uploads of the project would have more than %d MiB; delete one, or wait until one has expired", most>>20)
	}
	return nil
}

// FinishUpload replaces.
func (t *Tx) FinishUpload(ctx context.Context, project core.ProjectID, data, sum string, life time.Duration) (uploads.Upload, error) {
	t.LockProject(project, "uploads")
	if _, err := t.Exec(ctx, `DELETE FROM uploads o USING uploads n
		WHERE n.data_id = @data AND n.sha256 IS NULL AND o.project_id = n.project_id AND o.id = n.id AND o.sha256 IS NOT NULL`, pgtx.Args{"data": data}); err != nil {
		return uploads.Upload{}, err
	}
	row, err := pgtx.One[uploadRow](ctx, t, absent(data), `UPDATE uploads u SET sha256 = @sum, created_at = now(), expires_at = now() + make_interval(secs => @life)
		WHERE u.data_id = @data AND u.sha256 IS NULL RETURNING `+uploadColumns, pgtx.Args{"data": data, "sum": sum, "life": life.Seconds()})
	return uploads.Upload(row), err
}

// Upload reads.
func (t *Tx) Upload(ctx context.Context, project core.ProjectID, id string) (uploads.Upload, error) {
	row, err := pgtx.One[uploadRow](ctx, t, absent(id), `SELECT `+uploadColumns+` FROM uploads u
		WHERE u.project_id = @project AND u.id = @id AND u.sha256 IS NOT NULL AND u.expires_at > now()`, pgtx.Args{"project": project, "id": id})
	return uploads.Upload(row), err
}

// UploadPart reads.
func (t *Tx) UploadPart(ctx context.Context, data string, index int) ([]byte, error) {
	return pgtx.One[[]byte](ctx, t, absent(data), `SELECT p.data FROM upload_parts p WHERE p.data_id = @data AND p.index = @index`, pgtx.Args{"data": data, "index": index})
}

// DeleteUpload deletes.
func (t *Tx) DeleteUpload(ctx context.Context, project core.ProjectID, id string) error {
	n, err := t.Exec(ctx, `DELETE FROM uploads WHERE project_id = @project AND id = @id AND sha256 IS NOT NULL`, pgtx.Args{"project": project, "id": id})
	if err == nil && n == 0 {
		err = absent(id)
	}
	return err
}

// DropTransfer deletes.
func (t *Tx) DropTransfer(ctx context.Context, data string) error {
	_, err := t.Exec(ctx, `DELETE FROM uploads WHERE data_id = @data AND sha256 IS NULL`, pgtx.Args{"data": data})
	return err
}

// SweepUploads deletes.
func (t *Tx) SweepUploads(ctx context.Context, limit int) (int, error) {
	n, err := t.Exec(ctx, `DELETE FROM uploads WHERE data_id IN (SELECT data_id FROM uploads WHERE expires_at < now() ORDER BY expires_at LIMIT @limit)`, pgtx.Args{"limit": limit})
	return int(n), err
}

func absent(id string) error {
	return core.Errorf(core.NotFound, core.CodeUploadNotFound, "the project has no upload %s; uploads are kept for a day", core.Clip(id))
}
