package grantrows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
)

type grantRow struct {
	ID          core.GrantID     `db:"id"`
	ProjectID   core.ProjectID   `db:"project_id"`
	Owner       core.WorkspaceID `db:"owner"`
	Name        string           `db:"name"`
	Provider    string           `db:"provider"`
	Mode        grant.Mode       `db:"mode"`
	VaultRef    string           `db:"vault_ref"`
	SecretID    string           `db:"secret_id"`
	Hosts       []string         `db:"hosts"`
	Header      string           `db:"header"`
	Methods     []string         `db:"methods"`
	Paths       []string         `db:"paths"`
	Env         string           `db:"env"`
	BaseEnv     string           `db:"base_env"`
	BasePath    string           `db:"base_path"`
	MaxBytes    int64            `db:"max_bytes"`
	PerMinute   int              `db:"per_minute"`
	Reserved    int              `db:"secret_bytes"`
	Size        int              `db:"bundle_bytes"`
	Version     int64            `db:"version"`
	ExpiresAt   *time.Time       `db:"expires_at"`
	CreatedAt   time.Time        `db:"created_at"`
	UpdatedAt   time.Time        `db:"updated_at"`
	Workspace   core.WorkspaceID `db:"workspace_id"`
	Placeholder string           `db:"placeholder"`
}

func (r grantRow) held() grants.Held {
	return grants.Held{
		Grant: grants.Grant{
			ID: r.ID, ProjectID: r.ProjectID, Owner: r.Owner, Name: r.Name, Provider: r.Provider, Mode: r.Mode, VaultRef: r.VaultRef, SecretID: r.SecretID,
			Hosts: r.Hosts, Header: r.Header, Methods: r.Methods, Paths: r.Paths, Env: r.Env, BaseEnv: r.BaseEnv, BasePath: r.BasePath,
			MaxBytes: r.MaxBytes, PerMinute: r.PerMinute, Reserved: r.Reserved, Size: r.Size, Version: r.Version, ExpiresAt: pgtx.TimeOf(r.ExpiresAt), CreatedAt: r.CreatedAt, UpdatedAt: r.UpdatedAt,
		},
		Workspace: r.Workspace, Placeholder: r.Placeholder,
	}
}

// grantColumns need the relations g (a grant) and h (its holder).
const grantColumns = ` g.id, g.project_id, g.workspace_id AS owner, g.name, g.provider, g.mode, g.vault_ref, coalesce(g.secret_id, '') AS secret_id, g.hosts, g.header,
	g.methods, g.paths, g.env, g.base_env, g.base_path, g.max_bytes, g.per_minute, g.secret_bytes, g.bundle_bytes, g.version, g.expires_at, g.created_at, g.updated_at, h.workspace_id, h.placeholder`

// HeldGrants lists by workspace and name.
func (t *Tx) HeldGrants(ctx context.Context, of []core.WorkspaceID) ([]grants.Held, error) {
	rows, err := pgtx.Many[grantRow](ctx, t, `
		SELECT`+grantColumns+` FROM grant_holders h JOIN grants g ON g.id = h.grant_id
		WHERE h.workspace_id = ANY(@of::text[]) ORDER BY h.workspace_id, h.name`, pgtx.Args{"of": pgtx.Texts(of)})
	return pgtx.Map(rows, grantRow.held), err
}

// PutGrant keeps the id of a grant that is there, and with it those who have it by forks.
func (t *Tx) PutGrant(ctx context.Context, g grants.Grant, ttl time.Duration, placeholder string) (grants.Held, error) {
	row, err := pgtx.One[grantRow](ctx, t, nil, `
		WITH g AS (
			INSERT INTO grants (id, project_id, workspace_id, name, provider, mode, vault_ref, secret_id, hosts, header, methods, paths, env, base_env, base_path, max_bytes, per_minute,
				secret_bytes, bundle_bytes, expires_at)
			VALUES (@id, @project, @owner, @name, @provider, @mode, @ref, @secret, @hosts, @header, @methods, @paths, @env, @base_env, @base_path, @max_bytes, @per_minute, @secret_bytes, @bundle_bytes,
				CASE WHEN @ttl::float8 > 0 THEN now() + make_interval(secs => @ttl) END)
			ON CONFLICT ON CONSTRAINT grants_name_key DO UPDATE SET provider = excluded.provider, mode = excluded.mode, vault_ref = excluded.vault_ref,
				secret_id = excluded.secret_id, hosts = excluded.hosts, header = excluded.header, methods = excluded.methods, paths = excluded.paths,
				env = excluded.env, base_env = excluded.base_env, base_path = excluded.base_path, max_bytes = excluded.max_bytes,
				per_minute = excluded.per_minute, secret_bytes = excluded.secret_bytes, bundle_bytes = excluded.bundle_bytes, expires_at = excluded.expires_at, version = grants.version + 1, updated_at = now()
			RETURNING *
		), h AS (
			INSERT INTO grant_holders (workspace_id, name, project_id, grant_id, placeholder) SELECT g.workspace_id, g.name, g.project_id, g.id, @placeholder FROM g
			ON CONFLICT ON CONSTRAINT grant_holders_pkey DO UPDATE SET grant_id = excluded.grant_id,
				placeholder = CASE WHEN grant_holders.grant_id = excluded.grant_id THEN grant_holders.placeholder ELSE excluded.placeholder END
			RETURNING *
		)
		SELECT`+grantColumns+` FROM g CROSS JOIN h`,
		pgtx.Args{
			"id": g.ID, "project": g.ProjectID, "owner": g.Owner, "name": g.Name, "provider": g.Provider, "mode": g.Mode, "ref": g.VaultRef, "secret": pgtx.OrNull(g.SecretID),
			"hosts": pgtx.OrNone(g.Hosts), "header": g.Header, "methods": pgtx.OrNone(g.Methods), "paths": pgtx.OrNone(g.Paths), "env": g.Env, "base_env": g.BaseEnv, "base_path": g.BasePath,
			"max_bytes": g.MaxBytes, "per_minute": g.PerMinute, "secret_bytes": g.Reserved, "bundle_bytes": g.Size, "ttl": ttl.Seconds(), "placeholder": placeholder,
		})
	return row.held(), err
}

// CountGrants counts those of a project that a workspace has which has not ended.
func (t *Tx) CountGrants(ctx context.Context, project core.ProjectID) (int, error) {
	return pgtx.One[int](ctx, t, nil, `
		SELECT count(*) AS n FROM grants g
		WHERE g.project_id = @project AND EXISTS (
			SELECT 1 FROM grant_holders h JOIN workspaces w ON w.id = h.workspace_id WHERE h.grant_id = g.id AND w.ended_at IS NULL)`, pgtx.Args{"project": project})
}

type holderRow struct {
	ID   core.WorkspaceID `db:"workspace_id"`
	Size int              `db:"size"`
}

// LargestHolder adds up what each of those has that have the grant.
func (t *Tx) LargestHolder(ctx context.Context, id core.GrantID) (core.WorkspaceID, int, error) {
	row, err := pgtx.One[holderRow](ctx, t, core.Errorf(core.NotFound, core.CodeGrantNotFound, "nobody has grant %s", id), `
		SELECT x.workspace_id, sum(g.bundle_bytes)::bigint AS size
		FROM grant_holders x JOIN grant_holders h ON h.workspace_id = x.workspace_id JOIN grants g ON g.id = h.grant_id
		WHERE x.grant_id = @id GROUP BY x.workspace_id ORDER BY size DESC, x.workspace_id LIMIT 1`, pgtx.Args{"id": id})
	return row.ID, row.Size, err
}

// DropGrant takes its holders with it.
func (t *Tx) DropGrant(ctx context.Context, id core.GrantID) error {
	_, err := t.Exec(ctx, `DELETE FROM grants WHERE id = @id`, pgtx.Args{"id": id})
	return err
}

// DropHolders is one statement for all.
func (t *Tx) DropHolders(ctx context.Context, id core.GrantID, from []core.WorkspaceID) error {
	_, err := t.Exec(ctx, `DELETE FROM grant_holders WHERE grant_id = @id AND workspace_id = ANY(@from::text[])`, pgtx.Args{"id": id, "from": pgtx.Texts(from)})
	return err
}

// GrantHolders lists them.
func (t *Tx) GrantHolders(ctx context.Context, id core.GrantID) ([]core.WorkspaceID, error) {
	return pgtx.Many[core.WorkspaceID](ctx, t, `SELECT workspace_id AS id FROM grant_holders WHERE grant_id = @id ORDER BY workspace_id`, pgtx.Args{"id": id})
}

// neverSealed is what a workspace with grants has until its runner was given them.
const neverSealed = `grants_key = '', grants_until = to_timestamp(0)`

// InsertHolders is one statement for all, and one for their workspaces.
func (t *Tx) InsertHolders(ctx context.Context, list []grants.Holder) error {
	workspaces, grantIDs, placeholders := make([]string, len(list)), make([]string, len(list)), make([]string, len(list))
	for i, h := range list {
		workspaces[i], grantIDs[i], placeholders[i] = string(h.Workspace), string(h.Grant), h.Placeholder
	}
	if _, err := t.Exec(ctx, `
		INSERT INTO grant_holders (workspace_id, name, project_id, grant_id, placeholder)
		SELECT v.workspace_id, g.name, g.project_id, g.id, v.placeholder
		FROM unnest(@workspaces::text[], @grants::text[], @placeholders::text[]) AS v (workspace_id, grant_id, placeholder) JOIN grants g ON g.id = v.grant_id`,
		pgtx.Args{"workspaces": workspaces, "grants": grantIDs, "placeholders": placeholders}); err != nil {
		return err
	}
	_, err := t.Exec(ctx, `UPDATE workspaces SET `+neverSealed+` WHERE id = ANY(@ids::text[])`, pgtx.Args{"ids": workspaces})
	return err
}

// ChangedGrants locks rows in the order of their ids.
func (t *Tx) ChangedGrants(ctx context.Context, ids []core.WorkspaceID) error {
	if _, err := t.Exec(ctx, `SELECT FROM workspaces WHERE id = ANY(@ids::text[]) ORDER BY id FOR NO KEY UPDATE`, pgtx.Args{"ids": pgtx.Texts(ids)}); err != nil {
		return err
	}
	_, err := t.Exec(ctx, `
		UPDATE workspaces w SET egress_version = egress_version + 1,
			grants_key = CASE WHEN x.has THEN coalesce(w.grants_key, '') END, grants_until = CASE WHEN x.has THEN coalesce(w.grants_until, to_timestamp(0)) END
		FROM (SELECT i.id, EXISTS (SELECT 1 FROM grant_holders h WHERE h.workspace_id = i.id) AS has FROM unnest(@ids::text[]) AS i (id)) x
		WHERE w.id = x.id`, pgtx.Args{"ids": pgtx.Texts(ids)})
	return err
}
