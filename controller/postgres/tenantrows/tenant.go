package tenantrows

import (
	"context"
	"crypto/subtle"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// KeyChannel is the channel on which the ids of keys are sent that were revoked.
const KeyChannel = "coppice_keys"

// projectColumns need the relations p (a project) and q (its quotas).
const projectColumns = ` p.id, p.name, p.created_at, q.version, q.max_workspaces, q.max_forks_in_flight, q.max_checkpoints, q.max_checkpoint_bytes,
	q.max_depth, q.max_children, q.max_keys, q.max_ports, q.allow_all_egress, p.encryption, coalesce((SELECT max(k.version) FROM project_keys k WHERE k.project_id = p.id), 0) AS key_version`

// A project that its users and operators see. Deleted ones have no quotas.
const projectFrom = ` FROM projects p JOIN quotas q ON q.project_id = p.id WHERE p.id <> '` + string(controller.SystemProject) + `'`

type projectRow struct {
	ID              core.ProjectID `db:"id"`
	Name            string         `db:"name"`
	CreatedAt       time.Time      `db:"created_at"`
	Version         int64          `db:"version"`
	Workspaces      int64          `db:"max_workspaces"`
	ForksInFlight   int64          `db:"max_forks_in_flight"`
	Checkpoints     int64          `db:"max_checkpoints"`
	CheckpointBytes int64          `db:"max_checkpoint_bytes"`
	Depth           int64          `db:"max_depth"`
	Children        int64          `db:"max_children"`
	Keys            int64          `db:"max_keys"`
	Ports           int64          `db:"max_ports"`
	AllowAll        string         `db:"allow_all_egress"`
	KeyVersion      int64          `db:"key_version"`

	Encryption controller.Encryption `db:"encryption"`
}

func (r projectRow) project() controller.Project {
	return controller.Project{ID: r.ID, Name: r.Name, CreatedAt: r.CreatedAt, Encryption: r.Encryption, KeyVersion: r.KeyVersion, Quotas: controller.Quotas{
		Version: r.Version, Workspaces: r.Workspaces, ForksInFlight: r.ForksInFlight, Checkpoints: r.Checkpoints, CheckpointBytes: r.CheckpointBytes,
		Depth: r.Depth, Children: r.Children, Keys: r.Keys, Ports: r.Ports, AllowAll: controller.AllowAll(r.AllowAll),
	}}
}

// NoProject says that there is no such project.
func NoProject(id core.ProjectID) error {
	return core.Errorf(core.NotFound, core.CodeProjectNotFound, "there is no project %s", id)
}

// EnsureProject returns the project of that name, making it when it is missing.
func (t *Tx) EnsureProject(ctx context.Context, id core.ProjectID, name string) (controller.Project, error) {
	if _, err := t.Exec(ctx, `INSERT INTO projects (id, name) VALUES (@id, @name) ON CONFLICT (name) WHERE deleted_at IS NULL DO NOTHING`, pgtx.Args{"id": id, "name": name}); err != nil {
		return controller.Project{}, err
	}
	row, err := pgtx.One[projectRow](ctx, t, NoProject(id), `SELECT`+projectColumns+projectFrom+` AND p.name = @name AND p.deleted_at IS NULL`, pgtx.Args{"name": name})
	return row.project(), err
}

// InsertProject makes a project with the usual quotas.
func (t *Tx) InsertProject(ctx context.Context, id core.ProjectID, name string) (controller.Project, error) {
	if _, err := t.Exec(ctx, `INSERT INTO projects (id, name) VALUES (@id, @name)`, pgtx.Args{"id": id, "name": name}); err != nil {
		return controller.Project{}, err
	}
	return t.Project(ctx, id)
}

// Project returns one.
func (t *Tx) Project(ctx context.Context, id core.ProjectID) (controller.Project, error) {
	row, err := pgtx.One[projectRow](ctx, t, NoProject(id), `SELECT`+projectColumns+projectFrom+` AND p.id = @id`, pgtx.Args{"id": id})
	return row.project(), err
}

// Projects lists, newest first.
func (t *Tx) Projects(ctx context.Context, p controller.Page) ([]controller.Project, error) {
	rows, err := pgtx.Many[projectRow](ctx, t, `SELECT`+projectColumns+projectFrom+` AND (@after = '' OR p.id < @after) ORDER BY p.id DESC LIMIT @limit`,
		pgtx.Args{"after": p.After, "limit": p.Limit})
	return pgtx.Map(rows, projectRow.project), err
}

// DeleteProject destroys the project's keys. It takes the quotas away, which every admission needs, and then looks whether anything was admitted before.
func (t *Tx) DeleteProject(ctx context.Context, id core.ProjectID) error {
	if _, err := t.Project(ctx, id); err != nil {
		return err
	}
	n, err := t.Exec(ctx, `DELETE FROM quotas WHERE project_id = @id`, pgtx.Args{"id": id})
	if err == nil && n == 0 {
		err = NoProject(id)
	}
	if err != nil {
		return err
	}
	left, err := pgtx.One[struct {
		Workspaces  int64 `db:"workspaces"`
		Checkpoints int64 `db:"checkpoints"`
		Operations  int64 `db:"operations"`
	}](ctx, t, nil, `
		SELECT (SELECT count(*) FROM workspaces WHERE project_id = @id AND state NOT IN ('terminated', 'failed', 'lost')) AS workspaces,
			(SELECT count(*) FROM checkpoints WHERE project_id = @id AND state IN ('capturing', 'captured', 'sealed')) AS checkpoints,
			(SELECT count(*) FROM operations WHERE project_id = @id AND state IN ('pending', 'running')) AS operations`, pgtx.Args{"id": id})
	if err != nil {
		return err
	}
	if left.Workspaces+left.Checkpoints+left.Operations > 0 {
		return core.Errorf(core.FailedPrecondition, core.CodeProjectNotEmpty,
			"project %s has %d workspaces, %d checkpoints and %d operations under way; end and delete them first", id, left.Workspaces, left.Checkpoints, left.Operations)
	}
	if _, err := t.Exec(ctx, `UPDATE projects SET deleted_at = now() WHERE id = @id`, pgtx.Args{"id": id}); err != nil {
		return err
	}
	for _, table := range []string{"grants", "project_authorities", "secrets", "project_keys"} { // whatever is encrypted is not readable any more
		if _, err := t.Exec(ctx, `DELETE FROM `+table+` WHERE project_id = @id`, pgtx.Args{"id": id}); err != nil {
			return err
		}
	}
	_, err = t.Exec(ctx, `
		WITH ended AS (UPDATE api_keys SET revoked_at = now() WHERE project_id = @id AND revoked_at IS NULL RETURNING id)
		SELECT count(pg_notify(@channel, id)) FROM ended`, pgtx.Args{"id": id, "channel": KeyChannel})
	return err
}

const keyColumns = ` k.id, k.project_id, k.name, k.prefix, k.hash, k.scopes, coalesce(k.parent_id, '') AS parent_id, k.created_at, k.last_used_at, k.expires_at, k.revoked_at`

type keyRow struct {
	ID         core.KeyID      `db:"id"`
	ProjectID  core.ProjectID  `db:"project_id"`
	Name       string          `db:"name"`
	Prefix     string          `db:"prefix"`
	Hash       []byte          `db:"hash"`
	Scopes     []core.KeyScope `db:"scopes"`
	Parent     core.KeyID      `db:"parent_id"`
	CreatedAt  time.Time       `db:"created_at"`
	LastUsedAt *time.Time      `db:"last_used_at"`
	ExpiresAt  *time.Time      `db:"expires_at"`
	RevokedAt  *time.Time      `db:"revoked_at"`
}

func (r keyRow) key() controller.Key {
	k := controller.Key{
		ID: r.ID, ProjectID: r.ProjectID, Name: r.Name, Prefix: r.Prefix, Scopes: r.Scopes, Parent: r.Parent, CreatedAt: r.CreatedAt,
		LastUsedAt: pgtx.TimeOf(r.LastUsedAt), ExpiresAt: pgtx.TimeOf(r.ExpiresAt), RevokedAt: pgtx.TimeOf(r.RevokedAt),
	}
	copy(k.Hash[:], r.Hash)
	return k
}

// EnsureKey stores a key unless one of the same secret is there.
func (t *Tx) EnsureKey(ctx context.Context, key controller.Key) error {
	_, err := t.Exec(ctx, `
		INSERT INTO api_keys (id, project_id, name, prefix, hash, scopes)
		VALUES (@id, @project, @name, @prefix, @hash, @scopes) ON CONFLICT (hash) DO NOTHING`,
		pgtx.Args{"id": key.ID, "project": key.ProjectID, "name": key.Name, "prefix": key.Prefix, "hash": key.Hash[:], "scopes": pgtx.Texts(key.Scopes)})
	return err
}

// KeyByHash finds a valid key.
func (t *Tx) KeyByHash(ctx context.Context, hash [32]byte) (controller.Key, error) {
	row, err := pgtx.One[keyRow](ctx, t, controller.ErrKeyEnded, `
		SELECT`+keyColumns+` FROM api_keys k WHERE k.hash = @hash AND k.revoked_at IS NULL AND (k.expires_at IS NULL OR k.expires_at > now())`,
		pgtx.Args{"hash": hash[:]})
	if err != nil {
		return controller.Key{}, err
	}
	if subtle.ConstantTimeCompare(row.Hash, hash[:]) != 1 {
		return controller.Key{}, controller.ErrKeyEnded
	}
	return row.key(), nil
}

type maxKeysRow struct {
	Max  int64 `db:"max_keys"`
	Used int64 `db:"used"`
}

// InsertKey makes a key of another. That one is locked, so that it cannot be revoked past its new child; so are the quotas.
func (t *Tx) InsertKey(ctx context.Context, key controller.Key, ttl time.Duration) (controller.Key, error) {
	n, err := t.Exec(ctx, `
		SELECT FROM api_keys WHERE id = @parent AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now()) FOR SHARE`, pgtx.Args{"parent": key.Parent})
	if err == nil && n == 0 {
		err = controller.ErrKeyEnded
	}
	if err != nil {
		return controller.Key{}, err
	}
	if _, err := t.Exec(ctx, `SELECT FROM quotas WHERE project_id = @project FOR UPDATE`, pgtx.Args{"project": key.ProjectID}); err != nil {
		return controller.Key{}, err
	}
	have, err := pgtx.One[maxKeysRow](ctx, t, NoProject(key.ProjectID), `SELECT q.max_keys, (`+validKeys+`) AS used FROM quotas q WHERE q.project_id = @project`,
		pgtx.Args{"project": key.ProjectID})
	if err != nil {
		return controller.Key{}, err
	}
	if err := Exceeded("keys", have.Used, 1, have.Max); err != nil {
		return controller.Key{}, err
	}
	row, err := pgtx.One[keyRow](ctx, t, nil, `
		WITH k AS (
			INSERT INTO api_keys (id, project_id, name, prefix, hash, scopes, parent_id, expires_at)
			VALUES (@id, @project, @name, @prefix, @hash, @scopes, @parent,
				least(now() + make_interval(secs => @ttl), (SELECT expires_at FROM api_keys WHERE id = @parent)))
			RETURNING *
		)
		SELECT`+keyColumns+` FROM k`,
		pgtx.Args{
			"id": key.ID, "project": key.ProjectID, "name": key.Name, "prefix": key.Prefix, "hash": key.Hash[:], "scopes": pgtx.Texts(key.Scopes),
			"parent": key.Parent, "ttl": ttl.Seconds(),
		})
	return row.key(), err
}

const validKeys = `SELECT count(*) FROM api_keys WHERE project_id = @project AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now())`

// Key returns one, ended or not.
func (t *Tx) Key(ctx context.Context, id core.KeyID) (controller.Key, error) {
	absent := core.Errorf(core.NotFound, core.CodeKeyNotFound, "there is no key %s", id)
	row, err := pgtx.One[keyRow](ctx, t, absent, `SELECT`+keyColumns+` FROM api_keys k WHERE k.id = @id`, pgtx.Args{"id": id})
	return row.key(), err
}

// Keys lists those of a project, newest first.
func (t *Tx) Keys(ctx context.Context, project core.ProjectID, p controller.Page) ([]controller.Key, error) {
	rows, err := pgtx.Many[keyRow](ctx, t, `
		SELECT`+keyColumns+` FROM api_keys k WHERE k.project_id = @project AND (@after = '' OR k.id < @after) ORDER BY k.id DESC LIMIT @limit`,
		pgtx.Args{"project": project, "after": p.After, "limit": p.Limit})
	return pgtx.Map(rows, keyRow.key), err
}

// RevokeKey goes down from a key as often as it finds something to revoke: a child that was being made at the time holds
// its parent's row until it can be seen. So does a preview that was being opened. The signed previews of the keys end.
func (t *Tx) RevokeKey(ctx context.Context, id core.KeyID) error {
	const below = `WITH RECURSIVE below AS (
				SELECT id FROM api_keys WHERE id = @id
				UNION SELECT k.id FROM api_keys k JOIN below ON k.parent_id = below.id
			)`
	for {
		n, err := t.Exec(ctx, below+`, ended AS (
				UPDATE api_keys SET revoked_at = now() WHERE id IN (SELECT id FROM below) AND revoked_at IS NULL RETURNING id
			)
			SELECT pg_notify(@channel, id) FROM ended`, pgtx.Args{"id": id, "channel": KeyChannel})
		if err != nil {
			return err
		}
		if n == 0 {
			break
		}
	}
	_, err := t.Exec(ctx, below+` DELETE FROM ports WHERE visibility = 'signed' AND key_id IN (SELECT id FROM below)`, pgtx.Args{"id": id})
	return err
}

// EndedKeys says which of the keys are not valid any more.
func (t *Tx) EndedKeys(ctx context.Context, ids []core.KeyID) ([]core.KeyID, error) {
	if len(ids) == 0 {
		return nil, nil
	}
	return pgtx.Many[core.KeyID](ctx, t, `SELECT id FROM api_keys WHERE id = ANY(@ids::text[]) AND (revoked_at IS NOT NULL OR expires_at <= now())`,
		pgtx.Args{"ids": pgtx.Texts(ids)})
}

// UseKeys never moves a time back: another controller may have written a later one.
func (t *Tx) UseKeys(ctx context.Context, at map[core.KeyID]time.Time) error {
	ids, times := make([]string, 0, len(at)), make([]time.Time, 0, len(at))
	for id, when := range at {
		ids, times = append(ids, string(id)), append(times, when)
	}
	// In one order everywhere, so that controllers that write the same keys wait for each other and never both ways.
	_, err := t.Exec(ctx, `
		WITH v AS (
			SELECT k.id, a.at FROM unnest(@ids::text[], @times::timestamptz[]) AS a (id, at) JOIN api_keys k ON k.id = a.id
			WHERE k.last_used_at IS NULL OR k.last_used_at < a.at ORDER BY k.id FOR UPDATE OF k
		)
		UPDATE api_keys SET last_used_at = v.at FROM v WHERE api_keys.id = v.id`, pgtx.Args{"ids": ids, "times": times})
	return err
}
