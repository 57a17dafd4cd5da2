package postgres

import (
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/postgres/tenantrows"
	"github.com/coppice-dev/coppice/core"
)

const sessionColumns = ` id, project_id, workspace_id, sandbox_id, guest_id, created_at`

// Session returns one.
func (t *tx) Session(ctx context.Context, id core.SessionID) (controller.Session, error) {
	absent := core.Errorf(core.NotFound, core.CodeSessionNotFound, "there is no session %s", id)
	return pgtx.One[controller.Session](ctx, t, absent, `SELECT`+sessionColumns+` FROM sessions WHERE id = @id`, pgtx.Args{"id": id})
}

// InsertSession inserts the row of a session that is about to start. The bound of a project leaves room for all the workspaces that it may have:
// what living ones keep does not stop the others.
func (t *tx) InsertSession(ctx context.Context, s controller.Session, quota controller.SessionQuota) error {
	n, err := t.Exec(ctx, `
		INSERT INTO sessions (id, project_id, workspace_id, sandbox_id, guest_id)
		SELECT @id, @project, @workspace, @sandbox, @guest
		WHERE (SELECT count(*) FROM (SELECT FROM sessions o WHERE o.workspace_id = @workspace LIMIT @most::bigint) AS few) < @most::bigint
			AND coalesce((SELECT c.rows FROM session_counts c WHERE c.project_id = @project), 0)
				< greatest(@most_in_project::bigint, @most::bigint * coalesce((SELECT q.max_workspaces FROM quotas q WHERE q.project_id = @project), 0))`,
		pgtx.Args{
			"id": s.ID, "project": s.ProjectID, "workspace": s.WorkspaceID, "sandbox": s.SandboxID, "guest": s.GuestID,
			"most": quota.Workspace, "most_in_project": quota.Project,
		})
	if err == nil && n == 0 {
		err = core.Errorf(core.Exhausted, core.CodeQuotaExceeded,
			"workspace %s has %d sessions, or its project has its maximum of at least %d; delete ended sessions, or wait a minute", s.WorkspaceID, quota.Workspace, quota.Project)
	}
	return err
}

// MapSessions gives sessions that a guest inherited public ids of their own. Each is as old as the one it has in the guest, so that
// lists, which go by ids, have them in the order in which they were started, before what was started since.
func (t *tx) MapSessions(
	ctx context.Context, sandbox controller.Sandbox, guestIDs []core.SessionID, most int, quota controller.SessionQuota,
) ([]controller.Session, error) {
	list, err := t.guestSessions(ctx, sandbox, guestIDs)
	if err != nil || len(list) == len(guestIDs) {
		return list, err
	}
	// Several requests may map the sessions of one guest at once. One at a time counts and inserts, or the bound would not hold.
	if _, err := t.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtextextended('sessions of ' || @sandbox, 0))`, pgtx.Args{"sandbox": sandbox.ID}); err != nil {
		return nil, err
	}
	guestIDs = slices.Sorted(slices.Values(guestIDs))
	fresh := make([]string, len(guestIDs))
	for i, old := range guestIDs {
		id, err := core.NewIDOfAge(old)
		if err != nil {
			return nil, err
		}
		fresh[i] = string(id)
	}
	slices.Sort(fresh) // for those of one millisecond
	if _, err := t.Exec(ctx, `
		INSERT INTO sessions (id, project_id, workspace_id, sandbox_id, guest_id)
		SELECT v.id, @project, @workspace, @sandbox, v.guest_id FROM unnest(@ids::text[], @guest::text[]) AS v (id, guest_id)
		WHERE NOT EXISTS (SELECT 1 FROM sessions s WHERE s.sandbox_id = @sandbox AND s.guest_id = v.guest_id)
		ORDER BY v.guest_id DESC
		LIMIT greatest(0, least(
			@most - (SELECT count(*) FROM sessions s WHERE s.sandbox_id = @sandbox AND s.id <> s.guest_id),
			@quota - (SELECT count(*) FROM (SELECT FROM sessions s WHERE s.workspace_id = @workspace LIMIT @quota) AS few)))
		ON CONFLICT ON CONSTRAINT sessions_guest_key DO NOTHING`,
		pgtx.Args{
			"project": sandbox.ProjectID, "workspace": sandbox.WorkspaceID, "sandbox": sandbox.ID, "ids": fresh, "guest": pgtx.Texts(guestIDs),
			"most": most, "quota": quota.Workspace,
		}); err != nil {
		return nil, err
	}
	return t.guestSessions(ctx, sandbox, guestIDs)
}

func (t *tx) guestSessions(ctx context.Context, sandbox controller.Sandbox, guestIDs []core.SessionID) ([]controller.Session, error) {
	return pgtx.Many[controller.Session](ctx, t, `SELECT`+sessionColumns+` FROM sessions WHERE sandbox_id = @sandbox AND guest_id = ANY(@guest::text[])`,
		pgtx.Args{"sandbox": sandbox.ID, "guest": pgtx.Texts(guestIDs)})
}

// ForgetSessions removes the settled rows of a workspace whose sessions are not in its sandbox any more.
func (t *tx) ForgetSessions(ctx context.Context, sandbox controller.Sandbox, there []core.SessionID, settled time.Duration) (int, error) {
	n, err := t.Exec(ctx, `
		DELETE FROM sessions s USING sandboxes b
		WHERE s.workspace_id = @workspace AND b.id = s.sandbox_id AND b.epoch <= @epoch AND s.created_at < now() - make_interval(secs => @settled)
			AND (b.id <> @sandbox OR NOT s.guest_id = ANY(@there::text[]))`,
		pgtx.Args{"workspace": sandbox.WorkspaceID, "sandbox": sandbox.ID, "epoch": sandbox.Epoch, "there": pgtx.Texts(there), "settled": settled.Seconds()})
	return int(n), err
}

// MoveSessions lets the sessions of a suspended machine be found in the one that it was resumed as: the programs go on, under
// their names. Attach tokens do not move.
func (t *tx) MoveSessions(ctx context.Context, id core.WorkspaceID, epoch int64, to core.SandboxID) error {
	_, err := t.Exec(ctx, `
		UPDATE sessions SET sandbox_id = @to
		WHERE workspace_id = @id AND sandbox_id IN (SELECT b.id FROM sandboxes b WHERE b.workspace_id = @id AND b.epoch = @epoch)`,
		pgtx.Args{"id": id, "epoch": epoch, "to": to})
	return err
}

const tokenColumns = ` hash, project_id, coalesce(key_id, '') AS key_id, session_id, sandbox_id, expires_at`

type tokenRow struct {
	Hash      []byte         `db:"hash"`
	ProjectID core.ProjectID `db:"project_id"`
	KeyID     core.KeyID     `db:"key_id"`
	SessionID core.SessionID `db:"session_id"`
	SandboxID core.SandboxID `db:"sandbox_id"`
	ExpiresAt time.Time      `db:"expires_at"`
}

func (r tokenRow) token() controller.AttachToken {
	if len(r.Hash) != 32 {
		return controller.AttachToken{}
	}
	return controller.AttachToken{Hash: [32]byte(r.Hash), ProjectID: r.ProjectID, KeyID: r.KeyID, SessionID: r.SessionID, SandboxID: r.SandboxID, ExpiresAt: r.ExpiresAt}
}

// InsertAttachToken stores the hash of a token. The database's clock says when it ends.
func (t *tx) InsertAttachToken(ctx context.Context, token controller.AttachToken, ttl time.Duration) (controller.AttachToken, error) {
	row, err := pgtx.One[tokenRow](ctx, t, nil, `
		INSERT INTO attach_tokens (hash, project_id, key_id, session_id, sandbox_id, expires_at)
		VALUES (@hash, @project, @key, @session, @sandbox, now() + make_interval(secs => @ttl)) RETURNING`+tokenColumns,
		pgtx.Args{"hash": token.Hash[:], "project": token.ProjectID, "key": pgtx.OrNull(token.KeyID), "session": token.SessionID, "sandbox": token.SandboxID, "ttl": ttl.Seconds()})
	return row.token(), err
}

// UseAttachToken spends a token once, also if several requests use it at the same time, and not when its key has ended.
func (t *tx) UseAttachToken(ctx context.Context, hash [32]byte, session core.SessionID) (controller.AttachToken, error) {
	absent := core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "the attach token is not known, was used, has expired or is for another session; ask for a new one")
	row, err := pgtx.One[tokenRow](ctx, t, absent, `
		UPDATE attach_tokens SET used_at = now() WHERE hash = @hash AND session_id = @session AND used_at IS NULL AND expires_at > now()
			AND sandbox_id = (SELECT s.sandbox_id FROM sessions s WHERE s.id = @session)
			AND NOT EXISTS (SELECT 1 FROM api_keys k WHERE k.id = key_id AND (k.revoked_at IS NOT NULL OR k.expires_at <= now()))
		RETURNING`+tokenColumns, pgtx.Args{"hash": hash[:], "session": session})
	return row.token(), err
}

const portColumns = ` id, project_id, workspace_id, guest_port, listen, visibility, coalesce(key_id, '') AS key_id, expires_at, created_at, false AS closed`

type portsRow struct {
	Max  int64 `db:"max_ports"`
	Used int64 `db:"used"`
	Own  int64 `db:"own"`
}

// lockPorts keeps the number of a project's ports until the transaction ends, and removes previews that have expired.
func (t *tx) lockPorts(ctx context.Context, project core.ProjectID) error {
	if _, err := t.Exec(ctx, `SELECT FROM quotas WHERE project_id = @project FOR UPDATE`, pgtx.Args{"project": project}); err != nil {
		return err
	}
	_, err := t.Exec(ctx, `DELETE FROM ports WHERE project_id = @project AND expires_at <= now()`, pgtx.Args{"project": project})
	return err
}

// InsertPort inserts the row of a port that is about to be forwarded. It locks the workspace, which must not end meanwhile, and then the
// quotas, so that no two ports take the last place.
func (t *tx) InsertPort(ctx context.Context, p controller.Port) (controller.Port, error) {
	n, err := t.Exec(ctx, `SELECT FROM workspaces WHERE id = @id AND ended_at IS NULL FOR SHARE`, pgtx.Args{"id": p.WorkspaceID})
	if err == nil && n == 0 {
		err = core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "workspace %s has ended", p.WorkspaceID)
	}
	if err != nil {
		return p, err
	}
	if p.KeyID != "" { // it is locked, so that it cannot be revoked past its new preview
		n, err := t.Exec(ctx, `
			SELECT FROM api_keys WHERE id = @id AND revoked_at IS NULL AND (expires_at IS NULL OR expires_at > now()) FOR SHARE`, pgtx.Args{"id": p.KeyID})
		if err == nil && n == 0 {
			err = controller.ErrKeyEnded
		}
		if err != nil {
			return p, err
		}
	}
	if err := t.lockPorts(ctx, p.ProjectID); err != nil {
		return p, err
	}
	have, err := pgtx.One[portsRow](ctx, t, tenantrows.NoProject(p.ProjectID), `
		SELECT q.max_ports, (SELECT count(*) FROM ports WHERE project_id = @project) AS used, (SELECT count(*) FROM ports WHERE workspace_id = @workspace) AS own
		FROM quotas q WHERE q.project_id = @project`, pgtx.Args{"project": p.ProjectID, "workspace": p.WorkspaceID})
	if err != nil {
		return p, err
	}
	if have.Own >= controller.MaxWorkspacePorts {
		return p, core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "workspace %s has %d forwarded ports, the maximum; close one first", p.WorkspaceID, have.Own)
	}
	if err := tenantrows.Exceeded("ports", have.Used, 1, have.Max); err != nil {
		return p, err
	}
	return pgtx.One[controller.Port](ctx, t, nil, `
		INSERT INTO ports (id, project_id, workspace_id, guest_port, listen, visibility, key_id, expires_at)
		VALUES (@id, @project, @workspace, @guest, @listen, @visibility, nullif(@key, ''), @expires) RETURNING`+portColumns, pgtx.Args{
		"key": p.KeyID, "id": p.ID, "project": p.ProjectID, "workspace": p.WorkspaceID, "guest": p.GuestPort, "listen": p.Listen, "visibility": p.Visibility, "expires": p.ExpiresAt,
	})
}

// UpdatePort records where a port really listens.
func (t *tx) UpdatePort(ctx context.Context, id core.PortID, listen string) (controller.Port, error) {
	return pgtx.One[controller.Port](ctx, t, noPort(id), `UPDATE ports SET listen = @listen WHERE id = @id RETURNING`+portColumns, pgtx.Args{"id": id, "listen": listen})
}

func noPort(id core.PortID) error {
	return core.Errorf(core.NotFound, core.CodePortNotFound, "there is no forwarded port %s", id)
}

// Ports lists a workspace's ports and previews, oldest first, without those that have expired.
func (t *tx) Ports(ctx context.Context, id core.WorkspaceID) ([]controller.Port, error) {
	return pgtx.Many[controller.Port](ctx, t, `SELECT`+portColumns+` FROM ports WHERE workspace_id = @id AND (expires_at IS NULL OR expires_at > now()) ORDER BY id`, pgtx.Args{"id": id})
}

// DeletePort removes a row.
func (t *tx) DeletePort(ctx context.Context, workspace core.WorkspaceID, id core.PortID) error {
	n, err := t.Exec(ctx, `DELETE FROM ports WHERE id = @id AND workspace_id = @workspace`, pgtx.Args{"id": id, "workspace": workspace})
	if err == nil && n == 0 {
		err = noPort(id)
	}
	return err
}
