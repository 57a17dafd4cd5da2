package postgres

import (
	"context"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// SetEncryption changes what holds for what is stored from now on.
func (t *tx) SetEncryption(ctx context.Context, id core.ProjectID, e controller.Encryption) error {
	n, err := t.exec(ctx, `UPDATE projects SET encryption = @encryption WHERE id = @id AND deleted_at IS NULL`, args{"id": id, "encryption": e})
	if err == nil && n == 0 {
		err = noProject(id)
	}
	return err
}

// InsertProjectKey adds a version.
func (t *tx) InsertProjectKey(ctx context.Context, k controller.ProjectKey) error {
	n, err := t.exec(ctx, `
		INSERT INTO project_keys (project_id, version, master_id, sealed_key) VALUES (@project, @version, @master, @key) ON CONFLICT DO NOTHING`,
		args{"project": k.ProjectID, "version": k.Version, "master": k.Master, "key": k.Wrapped})
	if err == nil && n == 0 {
		err = core.Errorf(core.Conflict, core.CodeStateConflict, "project %s was given key %d by another request; read it again", k.ProjectID, k.Version)
	}
	return err
}

type projectKeyRow struct {
	ProjectID core.ProjectID `db:"project_id"`
	Version   int64          `db:"version"`
	Master    string         `db:"master_id"`
	Wrapped   []byte         `db:"sealed_key"`
}

func (t *tx) projectKeys(ctx context.Context, sql string, a args) ([]controller.ProjectKey, error) {
	rows, err := many[projectKeyRow](ctx, t, `SELECT project_id, version, master_id, sealed_key FROM project_keys WHERE `+sql+` ORDER BY project_id, version`, a)
	list := make([]controller.ProjectKey, len(rows))
	for i, r := range rows {
		list[i] = controller.ProjectKey(r)
	}
	return list, err
}

// ProjectKeys returns all of some projects.
func (t *tx) ProjectKeys(ctx context.Context, projects []core.ProjectID) ([]controller.ProjectKey, error) {
	return t.projectKeys(ctx, `project_id = ANY(@ids::text[])`, args{"ids": texts(projects)})
}

// OtherProjectKeys returns those that another master key has wrapped.
func (t *tx) OtherProjectKeys(ctx context.Context, master string) ([]controller.ProjectKey, error) {
	return t.projectKeys(ctx, `master_id <> @master`, args{"master": master})
}

// RewrapProjectKey leaves alone what another controller has wrapped meanwhile.
func (t *tx) RewrapProjectKey(ctx context.Context, k controller.ProjectKey, old string) error {
	_, err := t.exec(ctx, `UPDATE project_keys SET master_id = @master, sealed_key = @key WHERE project_id = @project AND version = @version AND master_id = @old`,
		args{"project": k.ProjectID, "version": k.Version, "master": k.Master, "key": k.Wrapped, "old": old})
	return err
}

// EncryptedNeeds knows objects by their names, see snapshotstore/envelope.
func (t *tx) EncryptedNeeds(ctx context.Context, ids []core.CheckpointID) ([]string, error) {
	rows, err := many[needRow](ctx, t, `
		SELECT min(key) AS key FROM checkpoint_objects WHERE checkpoint_id = ANY(@ids::text[]) AND key ~ '\.k[1-9][0-9]*$'
		GROUP BY regexp_replace(key, '[^/]*$', '')`, args{"ids": texts(ids)})
	list := make([]string, len(rows))
	for i, r := range rows {
		list[i] = r.Key
	}
	return list, err
}
