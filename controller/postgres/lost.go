package postgres

import (
	"context"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

// running selects from the sandboxes s of a runner those that are the present ones of workspaces w that run.
const running = ` s.ended_at IS NULL AND w.sandbox_id = s.id AND w.state IN ('ready', 'checkpointing')`

// FencedRunners lists runners that were given up although the rows say that workspaces run there. One that holds no sandbox
// costs one probe.
func (t *tx) FencedRunners(ctx context.Context, limit int) ([]core.RunnerID, error) {
	return pgtx.Many[core.RunnerID](ctx, t, `
		SELECT r.id FROM runners r JOIN runner_loads l ON l.runner_id = r.id AND l.sandboxes > 0 WHERE r.fenced_at IS NOT NULL
			AND EXISTS (SELECT 1 FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id WHERE s.runner_id = r.id AND`+running+` OFFSET 0)
		ORDER BY r.id LIMIT @limit`, pgtx.Args{"limit": limit})
}

type runningRow struct {
	ID          core.SandboxID   `db:"id"`
	WorkspaceID core.WorkspaceID `db:"workspace_id"`
}

// LoseWorkspaces ends workspaces that run on a runner that was given up. The runner's row is locked, so that it does not register
// meanwhile. Rows that somebody else has locked are left out.
func (t *tx) LoseWorkspaces(ctx context.Context, runner core.RunnerID, why controller.Failure, limit int) ([]core.WorkspaceID, error) {
	n, err := t.Exec(ctx, `SELECT FROM runners WHERE id = @runner AND fenced_at IS NOT NULL FOR NO KEY UPDATE SKIP LOCKED`, pgtx.Args{"runner": runner})
	if err != nil || n == 0 {
		return nil, err
	}
	rows, err := pgtx.Many[runningRow](ctx, t, `
		SELECT s.id, w.id AS workspace_id
		FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id WHERE s.runner_id = @runner AND`+running+`
		ORDER BY w.id LIMIT @limit FOR NO KEY UPDATE OF w SKIP LOCKED`, pgtx.Args{"runner": runner, "limit": limit})
	if err != nil || len(rows) == 0 {
		return nil, err
	}
	ended := make([]controller.EndedWorkspace, len(rows))
	for i, r := range rows {
		ended[i] = controller.EndedWorkspace{ID: r.WorkspaceID, To: core.WorkspaceLost, Sandbox: r.ID, Failure: &why}
	}
	list, err := t.EndWorkspaces(ctx, ended)
	ids := make([]core.WorkspaceID, len(list))
	for i, w := range list {
		ids[i] = w.ID
	}
	return ids, err
}
