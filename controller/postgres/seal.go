package postgres

import (
	"context"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/postgres/tenantrows"
	"github.com/coppice-dev/coppice/core"
)

// HasLease compares a message's epoch with the runner's.
func (t *tx) HasLease(ctx context.Context, runner core.RunnerID, epoch int64) error {
	now, err := t.Runner(ctx, runner)
	if err != nil {
		return err
	}
	if now.Fenced || now.LeaseEpoch != epoch {
		return core.Errorf(core.Unavailable, core.CodeRunnerLost, "runner %s does not have the lease of epoch %d any more", runner, epoch)
	}
	return nil
}

// lockCheckpoint keeps a checkpoint's state until the transaction ends. Before a checkpoint's attempt or needs are changed it is
// locked: transactions that do so wait here for each other.
func (t *tx) lockCheckpoint(ctx context.Context, id core.CheckpointID) (controller.Checkpoint, error) {
	type idRow struct {
		ID string `db:"id"`
	}
	if _, err := pgtx.One[idRow](ctx, t, noCheckpoint(id), `SELECT id FROM checkpoints WHERE id = @id FOR NO KEY UPDATE`, pgtx.Args{"id": id}); err != nil {
		return controller.Checkpoint{}, err
	}
	cp, err := t.Checkpoint(ctx, id)
	if err == nil && (cp.State == core.CheckpointDeleted || cp.State == core.CheckpointFailed) {
		err = noCheckpoint(id)
	}
	return cp, err
}

type beginRow struct {
	Attempt int64  `db:"attempt"`
	Prefix  string `db:"prefix"`
}

type referenceRow struct {
	ID             core.CheckpointID `db:"id"`
	ManifestKey    string            `db:"manifest_key"`
	ManifestDigest core.Digest       `db:"manifest_digest"`
	ManifestBytes  int64             `db:"manifest_bytes"`
}

// BeginSeal begins an attempt.
func (t *tx) BeginSeal(ctx context.Context, runner core.RunnerID, in runnerapi.BeginSeal) (runnerapi.SealBegun, error) {
	cp, err := t.lockCheckpoint(ctx, in.CheckpointID)
	switch {
	case err != nil:
		return runnerapi.SealBegun{}, err
	case cp.State == core.CheckpointCapturing:
		return runnerapi.SealBegun{}, core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady, "checkpoint %s is still being captured; seal it later", cp.ID)
	case cp.State == core.CheckpointSealed:
		return runnerapi.SealBegun{}, core.Errorf(core.Conflict, core.CodeStateConflict, "checkpoint %s is sealed", cp.ID)
	case cp.RunnerID != runner:
		return runnerapi.SealBegun{}, core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "checkpoint %s was captured by another runner, which seals it", cp.ID)
	}
	if err := t.dropNeeds(ctx, cp.ID); err != nil {
		return runnerapi.SealBegun{}, err
	}
	// 0: the project does not encrypt; -1: it has lost its keys.
	version, err := pgtx.One[int64](ctx, t, tenantrows.NoProject(cp.ProjectID), `
		SELECT CASE encryption WHEN 'envelope' THEN (SELECT coalesce(max(version), -1) FROM project_keys WHERE project_id = @project) ELSE 0 END AS version
		FROM projects WHERE id = @project`, pgtx.Args{"project": cp.ProjectID})
	if err != nil {
		return runnerapi.SealBegun{}, err
	}
	// In a project that encrypts, no checkpoint builds on an unencrypted one, nor the other way round. Templates belong to no project.
	// Until this transaction ends the reference cannot be deleted, and from then on the attempt needs what it needs.
	references, err := pgtx.Many[referenceRow](ctx, t, `
		SELECT c.id, c.manifest_key, c.manifest_digest, c.manifest_bytes FROM unnest(@ids::text[]) WITH ORDINALITY AS a (id, n) JOIN checkpoints c ON c.id = a.id
		WHERE c.state = 'sealed' AND (c.shared OR c.project_id = @project AND (c.manifest_key ~ '\.k[1-9][0-9]*$') = @encrypted) ORDER BY a.n LIMIT 1 FOR SHARE OF c`,
		pgtx.Args{"ids": pgtx.Texts(in.Ancestors), "project": cp.ProjectID, "encrypted": version != 0})
	if err != nil {
		return runnerapi.SealBegun{}, err
	}
	var reference core.CheckpointID
	out := runnerapi.SealBegun{ProjectID: cp.ProjectID, KeyVersion: version}
	if len(references) > 0 {
		r := references[0]
		reference = r.ID
		out.Reference = &runnerapi.Stored{CheckpointID: r.ID, Manifest: r.ManifestKey, Digest: r.ManifestDigest, Bytes: r.ManifestBytes}
	}
	begun, err := pgtx.One[beginRow](ctx, t, nil, `
		INSERT INTO seals AS s (checkpoint_id, project_id, runner_id, lease_epoch, attempt, reference_id, state)
		VALUES (@id, @project, @runner, @epoch, 1, @reference, @uploading)
		ON CONFLICT (checkpoint_id) DO UPDATE SET runner_id = excluded.runner_id, lease_epoch = excluded.lease_epoch, attempt = s.attempt + 1,
			reference_id = excluded.reference_id, state = excluded.state, begun_at = now(), ended_at = NULL
		RETURNING attempt, coppice_seal_prefix(project_id, checkpoint_id, attempt) AS prefix`,
		pgtx.Args{"id": cp.ID, "project": cp.ProjectID, "runner": runner, "epoch": in.LeaseEpoch, "reference": pgtx.OrNull(reference), "uploading": controller.SealUploading})
	if err != nil || reference == "" {
		out.Attempt, out.Prefix = begun.Attempt, begun.Prefix
		return out, err
	}
	out.Attempt, out.Prefix = begun.Attempt, begun.Prefix
	_, err = t.Exec(ctx, `
		INSERT INTO checkpoint_objects (checkpoint_id, project_id, key) SELECT @id, @project, key FROM checkpoint_objects WHERE checkpoint_id = @reference`,
		pgtx.Args{"id": cp.ID, "project": cp.ProjectID, "reference": reference})
	return out, err
}

func (t *tx) dropNeeds(ctx context.Context, ids ...core.CheckpointID) error {
	_, err := t.Exec(ctx, `DELETE FROM checkpoint_objects WHERE checkpoint_id = ANY(@ids::text[])`, pgtx.Args{"ids": pgtx.Texts(ids)})
	return err
}

type attemptRow struct {
	Project    core.ProjectID       `db:"project_id"`
	RunnerID   core.RunnerID        `db:"runner_id"`
	LeaseEpoch int64                `db:"lease_epoch"`
	Attempt    int64                `db:"attempt"`
	State      controller.SealState `db:"state"`
	Prefix     string               `db:"prefix"`
}

// LockSeal returns the newest attempt.
func (t *tx) LockSeal(ctx context.Context, id core.CheckpointID) (controller.SealAttempt, controller.Checkpoint, error) {
	cp, err := t.lockCheckpoint(ctx, id)
	if err != nil {
		return controller.SealAttempt{}, cp, err
	}
	rows, err := pgtx.Many[attemptRow](ctx, t, `
		SELECT project_id, runner_id, lease_epoch, attempt, state, coppice_seal_prefix(project_id, checkpoint_id, attempt) AS prefix
		FROM seals WHERE checkpoint_id = @id FOR UPDATE`, pgtx.Args{"id": id})
	if err != nil || len(rows) == 0 {
		return controller.SealAttempt{}, cp, err
	}
	r := rows[0]
	return controller.SealAttempt{
		Checkpoint: id, Project: r.Project, RunnerID: r.RunnerID, LeaseEpoch: r.LeaseEpoch, Attempt: r.Attempt, State: r.State, Prefix: r.Prefix,
	}, cp, nil
}

// CommitSeal makes a checkpoint sealed. What is needed is compared here: the planner cannot know how long the lists are.
func (t *tx) CommitSeal(ctx context.Context, at controller.SealAttempt, in runnerapi.CommitSeal) error {
	needed := make(map[string]bool, len(in.Needs)+1) // true: by whatever is known
	for _, key := range append([]string{in.Stored.Manifest}, in.Needs...) {
		needed[key] = false
	}
	var keys, own, vain, drop []string
	sizes := make([]int64, len(in.Written))
	for i, o := range in.Written {
		keys, sizes[i] = append(keys, o.Key), o.Bytes
		if _, ok := needed[o.Key]; ok {
			needed[o.Key] = true
			own = append(own, o.Key)
		} else {
			vain = append(vain, o.Key)
		}
	}
	held, err := pgtx.Many[string](ctx, t, `SELECT key FROM checkpoint_objects WHERE checkpoint_id = @id`, pgtx.Args{"id": at.Checkpoint})
	if err != nil {
		return err
	}
	for _, h := range held {
		if _, ok := needed[h]; ok {
			needed[h] = true
		} else {
			drop = append(drop, h)
		}
	}
	for key, known := range needed {
		if !known {
			return core.Errorf(core.Invalid, core.CodeInvalidField,
				"seal of checkpoint %s: it needs object %s, which neither attempt %d has written nor its reference needed", at.Checkpoint, core.Clip(key), at.Attempt)
		}
	}
	for _, change := range []struct {
		sql string
		a   pgtx.Args
	}{
		{
			`INSERT INTO store_objects (key, project_id, checkpoint_id, attempt, bytes)
			SELECT o.key, @project, @id, @attempt, o.bytes FROM unnest(@keys::text[], @sizes::bigint[]) AS o (key, bytes)`,
			pgtx.Args{"project": at.Project, "id": at.Checkpoint, "attempt": at.Attempt, "keys": keys, "sizes": sizes},
		},
		{
			`INSERT INTO checkpoint_objects (checkpoint_id, project_id, key) SELECT @id, @project, n.key FROM unnest(@keys::text[]) AS n (key)`,
			pgtx.Args{"project": at.Project, "id": at.Checkpoint, "keys": own},
		},
		{`DELETE FROM checkpoint_objects WHERE checkpoint_id = @id AND key = ANY(@keys::text[])`, pgtx.Args{"id": at.Checkpoint, "keys": pgtx.OrNone(drop)}},
		// What was written in vain has no need that could be lost.
		{
			`INSERT INTO store_released (project_id, key) SELECT @project, w.key FROM unnest(@keys::text[]) AS w (key)`,
			pgtx.Args{"project": at.Project, "keys": pgtx.OrNone(vain)},
		},
	} {
		if _, err := t.Exec(ctx, change.sql, change.a); err != nil {
			return err
		}
	}
	n, err := t.Exec(ctx, `
		UPDATE checkpoints SET state = @to, sealed_at = now(), manifest_key = @manifest, manifest_digest = @digest, manifest_bytes = @bytes, stored_bytes = @stored
		WHERE id = @id AND state = ANY(@from::text[])`,
		pgtx.Args{
			"id": at.Checkpoint, "to": core.CheckpointSealed, "from": pgtx.Texts(core.CheckpointSealed.Sources()), "manifest": in.Stored.Manifest,
			"digest": in.Stored.Digest, "bytes": in.Stored.Bytes, "stored": in.StoredBytes,
		})
	if err != nil {
		return err
	}
	if n == 0 {
		return core.Errorf(core.Conflict, core.CodeStateConflict, "checkpoint %s cannot be sealed any more", at.Checkpoint)
	}
	_, err = t.Exec(ctx, `DELETE FROM seals WHERE checkpoint_id = @id`, pgtx.Args{"id": at.Checkpoint})
	return err
}

// FailSeal ends an attempt.
func (t *tx) FailSeal(ctx context.Context, at controller.SealAttempt, why *core.Error) error {
	if _, err := t.Exec(ctx, `
		UPDATE seals SET state = @failed, ended_at = now(), problem_category = @category, problem_code = @code, problem_message = @message
		WHERE checkpoint_id = @id AND attempt = @attempt AND state = @uploading`,
		pgtx.Args{
			"id": at.Checkpoint, "attempt": at.Attempt, "failed": controller.SealFailed, "uploading": controller.SealUploading,
			"category": why.Category, "code": why.Code, "message": why.Msg,
		}); err != nil {
		return err
	}
	return t.dropNeeds(ctx, at.Checkpoint)
}

// LeaveDebris looks at what came after the attempt: it must have ended, and not by the commit.
func (t *tx) LeaveDebris(ctx context.Context, runner core.RunnerID, id core.CheckpointID, attempt int64) error {
	_, err := t.Exec(ctx, `
		INSERT INTO store_debris (prefix, project_id)
		SELECT p.prefix, c.project_id FROM checkpoints c CROSS JOIN LATERAL (SELECT coppice_seal_prefix(c.project_id, c.id, @attempt) AS prefix) p
			LEFT JOIN seals s ON s.checkpoint_id = c.id
		WHERE c.id = @id AND c.runner_id = @runner AND @attempt::bigint >= 1 AND NOT starts_with(coalesce(c.manifest_key, ''), p.prefix)
			AND (c.state IN ('sealed', 'deleted') OR s.attempt > @attempt OR s.attempt = @attempt AND s.state = @failed)
		ON CONFLICT (prefix) DO UPDATE SET since = now()`,
		pgtx.Args{"id": id, "runner": runner, "attempt": attempt, "failed": controller.SealFailed})
	return err
}

// AbandonSeals ends the attempts that nobody can go on with. A runner that has registered again begins new ones.
func (t *tx) AbandonSeals(ctx context.Context) ([]core.CheckpointID, error) {
	ids, err := pgtx.Many[core.CheckpointID](ctx, t, `
		SELECT c.id FROM seals s JOIN runners r ON r.id = s.runner_id JOIN checkpoints c ON c.id = s.checkpoint_id
		WHERE s.state = @uploading AND r.lease_epoch <> s.lease_epoch ORDER BY c.id FOR NO KEY UPDATE OF c`, pgtx.Args{"uploading": controller.SealUploading})
	if err != nil || len(ids) == 0 {
		return nil, err
	}
	ended, err := pgtx.Many[core.CheckpointID](ctx, t, `
		UPDATE seals s SET state = @failed, ended_at = now(), problem_category = @category, problem_code = @code,
			problem_message = 'its runner was lost or started again before the upload had ended'
		FROM runners r WHERE s.checkpoint_id = ANY(@ids::text[]) AND r.id = s.runner_id AND s.state = @uploading AND r.lease_epoch <> s.lease_epoch
		RETURNING s.checkpoint_id AS id`,
		pgtx.Args{"ids": pgtx.Texts(ids), "failed": controller.SealFailed, "uploading": controller.SealUploading, "category": core.Unavailable, "code": core.CodeRunnerLost})
	if err != nil || len(ended) == 0 {
		return nil, err
	}
	return ended, t.dropNeeds(ctx, ended...)
}
