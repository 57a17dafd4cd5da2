package postgres

import (
	"context"

	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
)

// InsertSecret keeps a value.
func (t *tx) InsertSecret(ctx context.Context, s secretstore.Secret) error {
	_, err := t.exec(ctx, `INSERT INTO secrets (id, project_id, master_id, sealed_key, sealed) VALUES (@id, @project, @master, @key, @box)`,
		args{"id": s.ID, "project": s.ProjectID, "master": s.Master, "key": s.Key, "box": s.Box})
	return err
}

// DeleteSecret forgets one.
func (t *tx) DeleteSecret(ctx context.Context, id string) error {
	_, err := t.exec(ctx, `DELETE FROM secrets WHERE id = @id`, args{"id": id})
	return err
}

type secretRow struct {
	ID        string         `db:"id"`
	ProjectID core.ProjectID `db:"project_id"`
	Master    string         `db:"master_id"`
	Key       []byte         `db:"sealed_key"`
	Box       []byte         `db:"sealed"`
}

func (t *tx) secrets(ctx context.Context, where string, a args) ([]secretstore.Secret, error) {
	rows, err := many[secretRow](ctx, t, `SELECT id, project_id, master_id, sealed_key, sealed FROM secrets WHERE `+where+` ORDER BY id`, a)
	list := make([]secretstore.Secret, len(rows))
	for i, r := range rows {
		list[i] = secretstore.Secret(r)
	}
	return list, err
}

// Secrets returns those that are there.
func (t *tx) Secrets(ctx context.Context, ids []string) ([]secretstore.Secret, error) {
	return t.secrets(ctx, `id = ANY(@ids::text[])`, args{"ids": ids})
}

// OtherSecrets returns those that another master key has wrapped.
func (t *tx) OtherSecrets(ctx context.Context, master string) ([]secretstore.Secret, error) {
	return t.secrets(ctx, `master_id <> @master`, args{"master": master})
}

// RewrapSecret leaves alone what another controller has wrapped meanwhile.
func (t *tx) RewrapSecret(ctx context.Context, s secretstore.Secret, old string) error {
	_, err := t.exec(ctx, `UPDATE secrets SET master_id = @master, sealed_key = @key WHERE id = @id AND master_id = @old`,
		args{"id": s.ID, "master": s.Master, "key": s.Key, "old": old})
	return err
}

type authorityRow struct {
	ProjectID   core.ProjectID `db:"project_id"`
	Certificate []byte         `db:"certificate"`
	SecretID    string         `db:"secret_id"`
}

const authorityColumns = ` project_id, certificate, secret_id`

// Authority returns that of a project.
func (t *tx) Authority(ctx context.Context, project core.ProjectID) (secretstore.Authority, error) {
	row, err := one[authorityRow](ctx, t, core.Errorf(core.NotFound, core.CodeProjectNotFound, "project %s has no authority yet", project),
		`SELECT`+authorityColumns+` FROM project_authorities WHERE project_id = @project`, args{"project": project})
	return secretstore.Authority(row), err
}

// InsertAuthority returns the one that is there.
func (t *tx) InsertAuthority(ctx context.Context, a secretstore.Authority) (secretstore.Authority, error) {
	if _, err := t.exec(ctx, `INSERT INTO project_authorities (project_id, certificate, secret_id) VALUES (@project, @certificate, @secret) ON CONFLICT DO NOTHING`,
		args{"project": a.ProjectID, "certificate": a.Certificate, "secret": a.SecretID}); err != nil {
		return a, err
	}
	return t.Authority(ctx, a.ProjectID)
}
