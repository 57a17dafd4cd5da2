package tenantrows

import (
	"context"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// SetEncryption changes what holds for what is stored from now on.
func (t *Tx) SetEncryption(ctx context.Context, id core.ProjectID, e controller.Encryption) error {
	n, err := t.Exec(ctx, `UPDATE projects SET encryption = @encryption WHERE id = @id AND deleted_at IS NULL`, pgtx.Args{"id": id, "encryption": e})
	if err == nil && n == 0 {
		err = NoProject(id)
	}
	return err
}

// InsertProjectKey adds a version.
func (t *Tx) InsertProjectKey(ctx context.Context, k controller.ProjectKey) error {
	n, err := t.Exec(ctx, `
		INSERT INTO project_keys (project_id, version, master_id, sealed_key) VALUES (@project, @version, @master, @key) ON CONFLICT DO NOTHING`,
		pgtx.Args{"project": k.ProjectID, "version": k.Version, "master": k.Master, "key": k.Wrapped})
	if err == nil && n == 0 {
		err = core.Errorf(core.Conflict, core.CodeStateConflict, "project %s was given key %d by another request; read it again", k.ProjectID, k.Version)
	}
	return err
}

func (t *Tx) projectKeys(ctx context.Context, sql string, a pgtx.Args) ([]controller.ProjectKey, error) {
	return pgtx.Many[controller.ProjectKey](ctx, t, `SELECT project_id, version, master_id AS master, sealed_key AS wrapped FROM project_keys WHERE `+sql+` ORDER BY project_id, version`, a)
}

// ProjectKeys returns all of some projects.
func (t *Tx) ProjectKeys(ctx context.Context, projects []core.ProjectID) ([]controller.ProjectKey, error) {
	return t.projectKeys(ctx, `project_id = ANY(@ids::text[])`, pgtx.Args{"ids": pgtx.Texts(projects)})
}

// OtherProjectKeys returns those that another master key has wrapped.
func (t *Tx) OtherProjectKeys(ctx context.Context, master string) ([]controller.ProjectKey, error) {
	return t.projectKeys(ctx, `master_id <> @master`, pgtx.Args{"master": master})
}

// RewrapProjectKey leaves alone what another controller has wrapped meanwhile.
func (t *Tx) RewrapProjectKey(ctx context.Context, k controller.ProjectKey, old string) error {
	_, err := t.Exec(ctx, `UPDATE project_keys SET master_id = @master, sealed_key = @key WHERE project_id = @project AND version = @version AND master_id = @old`,
		pgtx.Args{"project": k.ProjectID, "version": k.Version, "master": k.Master, "key": k.Wrapped, "old": old})
	return err
}

// EncryptedNeeds knows objects by their names, see snapshotstore/envelope.
func (t *Tx) EncryptedNeeds(ctx context.Context, ids []core.CheckpointID) ([]string, error) {
	return pgtx.Many[string](ctx, t, `
		SELECT min(key) AS key FROM checkpoint_objects WHERE checkpoint_id = ANY(@ids::text[]) AND key ~ '\.k[1-9][0-9]*$'
		GROUP BY regexp_replace(key, '[^/]*$', '')`, pgtx.Args{"ids": pgtx.Texts(ids)})
}
