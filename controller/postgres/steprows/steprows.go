// Package steprows keeps the actions of steps in PostgreSQL.
package steprows

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// Tx has the statements of this package in a transaction.
type Tx struct {
	*pgtx.Tx
}

type actionRow struct {
	Index      int               `db:"index"`
	Phase      steps.Phase       `db:"phase"`
	Request    []byte            `db:"request"`
	Fork       core.OperationID  `db:"fork_id"`
	Workspace  core.WorkspaceID  `db:"workspace_id"`
	Checkpoint core.CheckpointID `db:"checkpoint_id"`
	Result     []byte            `db:"result"`
}

func (r actionRow) row() (steps.Row, error) {
	out := steps.Row{Index: r.Index, Phase: r.Phase, Fork: r.Fork, Workspace: r.Workspace, Checkpoint: r.Checkpoint}
	if r.Request != nil {
		if err := json.Unmarshal(r.Request, &out.Action); err != nil {
			return out, fmt.Errorf("read action %d of a step: %w", r.Index, err)
		}
	}
	if r.Result != nil {
		if err := json.Unmarshal(r.Result, &out.Result); err != nil {
			return out, fmt.Errorf("read result of action %d of a step: %w", r.Index, err)
		}
	}
	return out, nil
}

// InsertStepActions takes a lock that the admissions of a project's steps have in common. Texts in requests may have characters that jsonb does
// not allow, so they are kept as bytes.
func (t *Tx) InsertStepActions(ctx context.Context, project core.ProjectID, kind operations.Kind, step core.OperationID, list []steps.Action, running int) error {
	requests := make([][]byte, len(list))
	for i, a := range list {
		b, err := json.Marshal(a)
		if err != nil {
			return fmt.Errorf("encode action %d of a step: %w", i, err)
		}
		requests[i] = b
	}
	t.LockProject(project, "steps")
	n, err := t.Exec(ctx, `
		INSERT INTO step_actions (operation_id, project_id, index, request)
		SELECT @step, @project, r.at - 1, r.request FROM unnest(@requests::bytea[]) WITH ORDINALITY AS r (request, at)
		WHERE (SELECT count(*) FROM operations WHERE project_id = @project AND kind = @kind AND state IN ('pending', 'running')) < @running::bigint`,
		pgtx.Args{"step": step, "kind": kind, "project": project, "requests": requests, "running": running})
	if err == nil && n == 0 {
		err = core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "%d operations of the kind %s have not ended in the project; wait for one of them", running, kind)
	}
	return err
}

// InsertStepAction is fenced as MoveStepAction is.
func (t *Tx) InsertStepAction(ctx context.Context, ref steps.Ref, index int, a steps.Action) error {
	b, err := json.Marshal(a)
	if err != nil {
		return fmt.Errorf("encode action %d: %w", index, err)
	}
	leased, err := pgtx.One[bool](ctx, t, nil, `
		WITH o AS (
			SELECT id, project_id FROM operations WHERE id = @step AND lease_epoch = @epoch AND state = 'running' FOR KEY SHARE
		), a AS (
			INSERT INTO step_actions (operation_id, project_id, index, request) SELECT id, project_id, @index::integer, @request::bytea FROM o
			ON CONFLICT ON CONSTRAINT step_actions_pkey DO NOTHING
		)
		SELECT EXISTS (SELECT FROM o) AS leased`, pgtx.Args{"step": ref.ID, "epoch": ref.Epoch, "index": index, "request": b})
	if err == nil && !leased {
		err = operations.ErrLeaseLost
	}
	return err
}

const actionStates = `a.index, a.phase, coalesce(a.fork_id, '') AS fork_id, coalesce(a.workspace_id, '') AS workspace_id, coalesce(a.checkpoint_id, '') AS checkpoint_id`

// StepActions reads.
func (t *Tx) StepActions(ctx context.Context, step core.OperationID) ([]steps.Row, error) {
	rows, err := pgtx.Many[actionRow](ctx, t, `SELECT `+actionStates+`, NULL::bytea AS request, NULL::bytea AS result FROM step_actions a
		WHERE a.operation_id = @step ORDER BY a.index`, pgtx.Args{"step": step})
	if err != nil {
		return nil, err
	}
	list := make([]steps.Row, len(rows))
	for i, r := range rows {
		if list[i], err = r.row(); err != nil {
			return nil, err
		}
	}
	return list, nil
}

// StepAction reads.
func (t *Tx) StepAction(ctx context.Context, step core.OperationID, index int) (steps.Row, error) {
	absent := core.Errorf(core.NotFound, core.CodeOperationNotFound, "step %s has no action %d", step, index)
	row, err := pgtx.One[actionRow](ctx, t, absent, `SELECT `+actionStates+`, a.request, a.result FROM step_actions a WHERE a.operation_id = @step AND a.index = @index`,
		pgtx.Args{"step": step, "index": index})
	if err != nil {
		return steps.Row{}, err
	}
	return row.row()
}

// StepResults reads.
func (t *Tx) StepResults(ctx context.Context, step core.OperationID, except []int) ([]steps.Result, error) {
	rows, err := pgtx.Many[actionRow](ctx, t, `SELECT `+actionStates+`, NULL::bytea AS request, a.result FROM step_actions a
		WHERE a.operation_id = @step AND a.phase = 'ended' AND a.index <> ALL(@except::integer[]) ORDER BY a.ended_at, a.index`,
		pgtx.Args{"step": step, "except": pgtx.OrNone(except)})
	if err != nil {
		return nil, err
	}
	list := make([]steps.Result, len(rows))
	for i, r := range rows {
		row, err := r.row()
		if err != nil {
			return nil, err
		}
		list[i] = row.Result
	}
	return list, nil
}

// MoveStepAction fails if the step has another lease epoch. The epoch can still change before the transaction ends. A lock that prevented
// this would also block the renewal of all leases of the controller; FOR KEY SHARE blocks neither a claim nor a renewal. If another controller claims the step meanwhile, the
// row of the action decides. Phases only advance, and whoever moves the action second finds that it is not in the phase any more.
func (t *Tx) MoveStepAction(ctx context.Context, ref steps.Ref, m steps.Move) error {
	var result []byte
	if m.Result != nil {
		var err error
		if result, err = json.Marshal(m.Result); err != nil {
			return fmt.Errorf("encode result of action %d of a step: %w", m.Index, err)
		}
	}
	type moved struct {
		Leased bool `db:"leased"`
		Moved  bool `db:"moved"`
	}
	got, err := pgtx.One[moved](ctx, t, nil, `
		WITH o AS (
			SELECT id FROM operations WHERE id = @step AND lease_epoch = @epoch AND state = 'running' FOR KEY SHARE
		), a AS (
			UPDATE step_actions SET phase = @to, fork_id = coalesce(@fork, fork_id), workspace_id = coalesce(@workspace, workspace_id),
				checkpoint_id = coalesce(@checkpoint, checkpoint_id), result = coalesce(@result, result),
				request = CASE WHEN @to <> 'ended' THEN request END, ended_at = CASE WHEN @to = 'ended' THEN now() END
			WHERE operation_id IN (SELECT id FROM o) AND index = @index AND phase = @from RETURNING index
		)
		SELECT EXISTS (SELECT FROM o) AS leased, EXISTS (SELECT FROM a) AS moved`,
		pgtx.Args{
			"step": ref.ID, "epoch": ref.Epoch, "index": m.Index, "from": m.From, "to": m.To, "fork": pgtx.OrNull(m.Fork),
			"workspace": pgtx.OrNull(m.Workspace), "checkpoint": pgtx.OrNull(m.Checkpoint), "result": result,
		})
	switch {
	case err != nil:
		return err
	case !got.Leased:
		return operations.ErrLeaseLost
	case !got.Moved:
		return steps.ErrMoved
	}
	return nil
}

// SweepSteps finds steps by their first action.
func (t *Tx) SweepSteps(ctx context.Context, kept time.Duration, newest, limit int) (int, error) {
	n, err := t.Exec(ctx, `
		DELETE FROM step_actions WHERE operation_id IN (
			SELECT s.operation_id FROM (
				SELECT operation_id, row_number() OVER (PARTITION BY project_id ORDER BY operation_id DESC) AS place FROM step_actions WHERE index = 0
			) s JOIN operations o ON o.id = s.operation_id
			WHERE o.state IN ('succeeded', 'failed') AND (o.ended_at < now() - make_interval(secs => @kept) OR s.place > @newest)
			ORDER BY s.operation_id LIMIT @limit
		)`, pgtx.Args{"kept": kept.Seconds(), "newest": newest, "limit": limit})
	return int(n), err
}
