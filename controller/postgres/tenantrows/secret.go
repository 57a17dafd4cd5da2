package tenantrows

import (
	"context"

	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/secretstore"
	"github.com/coppice-dev/coppice/core"
)

// InsertSecret keeps a value.
func (t *Tx) InsertSecret(ctx context.Context, s secretstore.Secret) error {
	_, err := t.Exec(ctx, `INSERT INTO secrets (id, project_id, master_id, sealed_key, sealed) VALUES (@id, @project, @master, @key, @encrypted)`,
		pgtx.Args{"id": s.ID, "project": s.ProjectID, "master": s.Master, "key": s.Key, "encrypted": s.Encrypted})
	return err
}

// DeleteSecret forgets one.
func (t *Tx) DeleteSecret(ctx context.Context, id string) error {
	_, err := t.Exec(ctx, `DELETE FROM secrets WHERE id = @id`, pgtx.Args{"id": id})
	return err
}

func (t *Tx) secrets(ctx context.Context, where string, a pgtx.Args) ([]secretstore.Secret, error) {
	return pgtx.Many[secretstore.Secret](ctx, t, `SELECT id, project_id, master_id AS master, sealed_key AS key, sealed AS encrypted FROM secrets WHERE `+where+` ORDER BY id`, a)
}

// Secrets returns those that are there.
func (t *Tx) Secrets(ctx context.Context, ids []string) ([]secretstore.Secret, error) {
	return t.secrets(ctx, `id = ANY(@ids::text[])`, pgtx.Args{"ids": ids})
}

// OtherSecrets returns those that another master key has wrapped.
func (t *Tx) OtherSecrets(ctx context.Context, master string) ([]secretstore.Secret, error) {
	return t.secrets(ctx, `master_id <> @master`, pgtx.Args{"master": master})
}

// RewrapSecret leaves alone what another controller has wrapped meanwhile.
func (t *Tx) RewrapSecret(ctx context.Context, s secretstore.Secret, old string) error {
	_, err := t.Exec(ctx, `UPDATE secrets SET master_id = @master, sealed_key = @key WHERE id = @id AND master_id = @old`,
		pgtx.Args{"id": s.ID, "master": s.Master, "key": s.Key, "old": old})
	return err
}

const authorityColumns = ` project_id, certificate, secret_id`

// Authority returns that of a project.
func (t *Tx) Authority(ctx context.Context, project core.ProjectID) (secretstore.Authority, error) {
	return pgtx.One[secretstore.Authority](ctx, t, core.Errorf(core.NotFound, core.CodeProjectNotFound, "project %s has no authority yet", project),
		`SELECT`+authorityColumns+` FROM project_authorities WHERE project_id = @project`, pgtx.Args{"project": project})
}

// InsertAuthority returns the one that is there.
func (t *Tx) InsertAuthority(ctx context.Context, a secretstore.Authority) (secretstore.Authority, error) {
	if _, err := t.Exec(ctx, `INSERT INTO project_authorities (project_id, certificate, secret_id) VALUES (@project, @certificate, @secret) ON CONFLICT DO NOTHING`,
		pgtx.Args{"project": a.ProjectID, "certificate": a.Certificate, "secret": a.SecretID}); err != nil {
		return a, err
	}
	return t.Authority(ctx, a.ProjectID)
}
