package fleetrows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

const clusterColumns = ` id, authority, authority_key, pass_key`

// Cluster returns the one that the database belongs to.
func (t *Tx) Cluster(ctx context.Context) (controller.Cluster, error) {
	absent := core.Errorf(core.NotFound, core.CodeInternal, "the database belongs to no cluster yet")
	return pgtx.One[controller.Cluster](ctx, t, absent, `SELECT`+clusterColumns+` FROM clusters`, pgtx.Args{})
}

// EnsureCluster lets the first of several controllers win.
func (t *Tx) EnsureCluster(ctx context.Context, c controller.Cluster) (controller.Cluster, error) {
	if _, err := t.Exec(ctx, `
		INSERT INTO clusters (id, authority, authority_key, pass_key) VALUES (@id, @authority, @authority_key, @pass_key)
		ON CONFLICT ON CONSTRAINT clusters_single_key DO NOTHING`,
		pgtx.Args{"id": c.ID, "authority": c.Authority, "authority_key": c.AuthorityKey, "pass_key": c.PassKey}); err != nil {
		return c, err
	}
	return t.Cluster(ctx)
}

type runnerTokenRow struct {
	Hash      []byte        `db:"hash"`
	RunnerID  core.RunnerID `db:"runner_id"`
	ExpiresAt time.Time     `db:"expires_at"`
}

func (r runnerTokenRow) token() controller.RunnerToken {
	out := controller.RunnerToken{RunnerID: r.RunnerID, ExpiresAt: r.ExpiresAt}
	copy(out.Hash[:], r.Hash)
	return out
}

// InsertRunnerToken stores the hash of a token. It forgets tokens that have expired, and those that were spent long ago.
func (t *Tx) InsertRunnerToken(ctx context.Context, token controller.RunnerToken, ttl time.Duration) (controller.RunnerToken, error) {
	if _, err := t.Exec(ctx, `
		DELETE FROM runner_tokens WHERE expires_at < now() - CASE WHEN used_at IS NULL THEN interval '0' ELSE interval '30 days' END`, pgtx.Args{}); err != nil {
		return token, err
	}
	if _, err := t.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtext('coppice_runner_tokens'))`, pgtx.Args{}); err != nil { // so that no two take the last place
		return token, err
	}
	open, err := pgtx.One[int64](ctx, t, nil, `SELECT count(*) AS tokens FROM runner_tokens WHERE used_at IS NULL AND expires_at > now() AND history = coppice_event_history()`, pgtx.Args{})
	if err != nil {
		return token, err
	}
	if open >= controller.MaxRunnerTokens {
		return token, core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "the cluster has %d open join tokens, which is the most; wait until some are spent or have expired", open)
	}
	row, err := pgtx.One[runnerTokenRow](ctx, t, nil, `
		INSERT INTO runner_tokens (hash, runner_id, expires_at) VALUES (@hash, @runner, now() + make_interval(secs => @ttl))
		RETURNING hash, runner_id, expires_at`, pgtx.Args{"hash": token.Hash[:], "runner": token.RunnerID, "ttl": ttl.Seconds()})
	return row.token(), err
}

// UseRunnerToken spends a token once, also if several runners use it at the same time. A token from before a failover is refused: the
// failover may have lost that it was spent, and a second host would get the same identity.
func (t *Tx) UseRunnerToken(ctx context.Context, hash [32]byte) (controller.RunnerToken, error) {
	absent := core.Errorf(core.Unauthenticated, core.CodeJoinTokenRefused,
		"the join token is not known, was used, has expired or was made before a failover of the database; make another with coppice runner-token create")
	row, err := pgtx.One[runnerTokenRow](ctx, t, absent, `
		UPDATE runner_tokens SET used_at = now() WHERE hash = @hash AND used_at IS NULL AND expires_at > now() AND history = coppice_event_history()
		RETURNING hash, runner_id, expires_at`, pgtx.Args{"hash": hash[:]})
	return row.token(), err
}

// InsertRunnerIdentity lets a runner in.
func (t *Tx) InsertRunnerIdentity(ctx context.Context, id core.RunnerID) error {
	if _, err := t.Exec(ctx, `
		INSERT INTO runner_identities (runner_id) VALUES (@id) ON CONFLICT ON CONSTRAINT runner_identities_pkey DO NOTHING`, pgtx.Args{"id": id}); err != nil {
		return err
	}
	return t.RunnerIdentity(ctx, id)
}

// RunnerHeard says how long ago a runner was last heard, or joined.
func (t *Tx) RunnerHeard(ctx context.Context, id core.RunnerID) (time.Duration, error) {
	seconds, err := pgtx.One[float64](ctx, t, noRunner(id), `
		SELECT extract(epoch FROM now() - greatest(i.joined_at, r.heartbeat_at))::float8 AS seconds
		FROM runner_identities i LEFT JOIN runners r ON r.id = i.runner_id WHERE i.runner_id = @id`, pgtx.Args{"id": id})
	return time.Duration(seconds * float64(time.Second)), err
}

// RunnerIdentity says whether a runner is in.
func (t *Tx) RunnerIdentity(ctx context.Context, id core.RunnerID) error {
	absent := core.Errorf(core.NotFound, core.CodeRunnerNotFound, "runner %s has not joined this cluster", id)
	revoked, err := pgtx.One[bool](ctx, t, absent, `SELECT revoked_at IS NOT NULL AS revoked FROM runner_identities WHERE runner_id = @id`, pgtx.Args{"id": id})
	if err == nil && revoked {
		err = core.Errorf(core.PermissionDenied, core.CodeRunnerRevoked, "runner %s was removed from this cluster; to take its host back, join it as a new runner", id)
	}
	return err
}

// RemoveRunner revokes an identity. Doing so again is no error. It leaves a revoked identity also for a runner that the database does not know: a
// failover may have lost that the runner joined, and its certificate would let it in again.
func (t *Tx) RemoveRunner(ctx context.Context, id core.RunnerID) (living []core.WorkspaceID, known bool, err error) {
	identities, err := t.Exec(ctx, `UPDATE runner_identities SET revoked_at = coalesce(revoked_at, now()) WHERE runner_id = @id`, pgtx.Args{"id": id})
	if err != nil {
		return nil, false, err
	}
	if identities == 0 { // or the runner is just being taken in again
		if _, err := t.Exec(ctx, `
			INSERT INTO runner_identities (runner_id, revoked_at) VALUES (@id, now())
			ON CONFLICT ON CONSTRAINT runner_identities_pkey DO UPDATE SET revoked_at = coalesce(runner_identities.revoked_at, now())`, pgtx.Args{"id": id}); err != nil {
			return nil, false, err
		}
	}
	runners, err := t.Exec(ctx, `
		UPDATE runners SET removed_at = coalesce(removed_at, now()), fenced_at = coalesce(fenced_at, now()), lease_epoch = lease_epoch + 1, lease_expires_at = least(lease_expires_at, now())
		WHERE id = @id`, pgtx.Args{"id": id})
	if err != nil {
		return nil, false, err
	}
	living, err = pgtx.Many[core.WorkspaceID](ctx, t, `
		SELECT DISTINCT w.id FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id
		WHERE s.runner_id = @id AND s.ended_at IS NULL AND w.ended_at IS NULL ORDER BY w.id`, pgtx.Args{"id": id})
	return living, identities+runners > 0, err
}
