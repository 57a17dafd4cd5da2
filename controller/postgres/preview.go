package postgres

import (
	"context"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/core"
)

type previewRow struct {
	model.Port
	Epoch int64 `db:"epoch"`
}

// Preview finds the preview of a port of a workspace.
func (t *tx) Preview(ctx context.Context, workspace core.WorkspaceID, guestPort int) (previews.Preview, error) {
	r, err := pgtx.One[previewRow](ctx, t, previews.Absent(), `
		SELECT p.id, p.project_id, p.workspace_id, p.guest_port, p.listen, p.visibility, coalesce(p.key_id, '') AS key_id, p.expires_at, p.created_at, false AS closed, w.epoch
		FROM ports p JOIN workspaces w ON w.id = p.workspace_id
		WHERE p.workspace_id = @id AND p.guest_port = @port AND p.visibility <> '' AND (p.expires_at IS NULL OR p.expires_at > now()) AND w.ended_at IS NULL`,
		pgtx.Args{"id": workspace, "port": guestPort})
	return previews.Preview{Port: r.Port, Epoch: r.Epoch}, err
}

// inheritedPreview is the preview that a fork gets.
type inheritedPreview struct {
	ID        core.PortID      `json:"id"`
	Workspace core.WorkspaceID `json:"workspace_id"`
	From      core.PortID      `json:"from_id"`
}

// InheritPreviews gives forks their own copies of previews, as far as the quota allows.
func (t *tx) InheritPreviews(ctx context.Context, project core.ProjectID, list []previews.Inherited) error {
	if len(list) == 0 {
		return nil
	}
	rows := make([]inheritedPreview, len(list))
	for i, p := range list {
		rows[i] = inheritedPreview{p.ID, p.Workspace, p.From}
	}
	// Their keys are locked, so that none can be revoked past a new preview.
	if _, err := t.Exec(ctx, `
		SELECT FROM api_keys WHERE id IN (SELECT p.key_id FROM jsonb_to_recordset(@rows::jsonb) AS v (from_id text) JOIN ports p ON p.id = v.from_id)
		ORDER BY id FOR SHARE`, pgtx.Args{"rows": rows}); err != nil {
		return err
	}
	if err := t.lockPorts(ctx, project); err != nil {
		return err
	}
	_, err := t.Exec(ctx, `
		INSERT INTO ports (id, project_id, workspace_id, guest_port, listen, visibility, key_id, expires_at)
		SELECT v.id, p.project_id, v.workspace_id, p.guest_port, '', p.visibility, p.key_id, p.expires_at
		FROM jsonb_to_recordset(@rows::jsonb) AS v (id text, workspace_id text, from_id text) JOIN ports p ON p.id = v.from_id
		ORDER BY v.id
		LIMIT (SELECT greatest(0, q.max_ports - (SELECT count(*) FROM ports WHERE project_id = @project)) FROM quotas q WHERE q.project_id = @project)`,
		pgtx.Args{"rows": rows, "project": project})
	return err
}
