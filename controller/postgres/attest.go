package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

type newAttestation struct {
	ProjectID   core.ProjectID   `json:"project_id"`
	WorkspaceID core.WorkspaceID `json:"workspace_id"`
	Epoch       int64            `json:"epoch"`
	SandboxID   core.SandboxID   `json:"sandbox_id"`
	RunnerID    core.RunnerID    `json:"runner_id"`
	Digest      core.Digest      `json:"digest"`
	Envelope    []byte           `json:"envelope"`
}

// insertAttestations appends what runners signed. A runner that was removed since it was asked makes nothing new: its workspaces were ended
// with it, and what it signed is left out.
func (t *tx) insertAttestations(list []controller.ResealRecord) {
	var rows []newAttestation
	for _, r := range list {
		if len(r.Attestation) > 0 {
			rows = append(rows, newAttestation{
				ProjectID: r.ProjectID, WorkspaceID: r.WorkspaceID, Epoch: r.Epoch, SandboxID: r.SandboxID, RunnerID: r.RunnerID,
				Digest: core.DigestOf(r.Attestation), Envelope: r.Attestation,
			})
		}
	}
	if len(rows) == 0 {
		return
	}
	t.Soon(`
		INSERT INTO attestations (project_id, workspace_id, epoch, sandbox_id, runner_id, digest, envelope)
		SELECT v.project_id, v.workspace_id, v.epoch, v.sandbox_id, v.runner_id, v.digest, decode(v.envelope, 'base64')
		FROM jsonb_to_recordset(@rows::jsonb) AS v (project_id text, workspace_id text, epoch bigint, sandbox_id text, runner_id text, digest text, envelope text)
		WHERE EXISTS (SELECT 1 FROM runners r WHERE r.id = v.runner_id AND r.removed_at IS NULL OFFSET 0)`, pgtx.Args{"rows": rows})
}

type attestationRow struct {
	Epoch    int64       `db:"epoch"`
	Digest   core.Digest `db:"digest"`
	Envelope []byte      `db:"envelope"`
}

// Attestation returns that of an epoch. A request that was repeated may have left two: either is good.
func (t *tx) Attestation(ctx context.Context, id core.WorkspaceID, epoch int64) (controller.Attestation, error) {
	absent := core.Errorf(core.NotFound, core.CodeAttestationNotFound,
		"workspace %s has no attestation of epoch %d: the epoch does not exist, its sandbox never became ready, or its attestation has expired", id, epoch)
	row, err := pgtx.One[attestationRow](ctx, t, absent, `
		SELECT epoch, digest, envelope FROM attestations WHERE workspace_id = @id AND epoch = @epoch ORDER BY created_at DESC LIMIT 1`, pgtx.Args{"id": id, "epoch": epoch})
	return controller.Attestation{Epoch: row.Epoch, Digest: row.Digest, Envelope: row.Envelope}, err
}

// TidyAttestations runs as the owner, who alone may do it.
func (t *tx) TidyAttestations(ctx context.Context, keep time.Duration) error {
	_, err := t.Exec(ctx, `SELECT coppice_tidy_attestations(make_interval(secs => @keep))`, pgtx.Args{"keep": keep.Seconds()})
	return err
}
