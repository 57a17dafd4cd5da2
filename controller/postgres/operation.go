package postgres

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

const operationColumns = `
	o.id, o.project_id, o.kind, o.state, o.step, o.input, o.result, coalesce(o.problem_category, '') AS problem_category,
	coalesce(o.problem_code, '') AS problem_code, coalesce(o.problem_message, '') AS problem_message, o.timings,
	coalesce(o.workspace_id, '') AS workspace_id, coalesce(o.checkpoint_id, '') AS checkpoint_id, o.request_id,
	o.actor, o.source, o.action, coalesce(o.lease_owner, '') AS lease_owner, o.lease_epoch, o.cancel_requested_at, o.created_at, o.started_at, o.ended_at`

type operationRow struct {
	ID              core.OperationID         `db:"id"`
	ProjectID       core.ProjectID           `db:"project_id"`
	Kind            controller.OperationKind `db:"kind"`
	State           core.OperationState      `db:"state"`
	Step            string                   `db:"step"`
	Input           []byte                   `db:"input"`
	Result          []byte                   `db:"result"`
	ProblemCategory core.Category            `db:"problem_category"`
	ProblemCode     core.Code                `db:"problem_code"`
	ProblemMessage  string                   `db:"problem_message"`
	Timings         []core.Timing            `db:"timings"`
	WorkspaceID     core.WorkspaceID         `db:"workspace_id"`
	CheckpointID    core.CheckpointID        `db:"checkpoint_id"`
	RequestID       string                   `db:"request_id"`
	Actor           string                   `db:"actor"`
	Source          string                   `db:"source"`
	Action          string                   `db:"action"`
	LeaseOwner      string                   `db:"lease_owner"`
	LeaseEpoch      int64                    `db:"lease_epoch"`
	CancelAt        *time.Time               `db:"cancel_requested_at"`
	CreatedAt       time.Time                `db:"created_at"`
	StartedAt       *time.Time               `db:"started_at"`
	EndedAt         *time.Time               `db:"ended_at"`
}

func (r operationRow) operation() controller.Operation {
	o := controller.Operation{
		ID: r.ID, ProjectID: r.ProjectID, Kind: r.Kind, State: r.State, Step: r.Step, Input: r.Input, Result: r.Result, Timings: r.Timings,
		WorkspaceID: r.WorkspaceID, CheckpointID: r.CheckpointID, RequestID: r.RequestID, LeaseOwner: r.LeaseOwner, LeaseEpoch: r.LeaseEpoch,
		CancelAt: pgtx.TimeOf(r.CancelAt), CreatedAt: r.CreatedAt, StartedAt: pgtx.TimeOf(r.StartedAt), EndedAt: pgtx.TimeOf(r.EndedAt),
		Origin: controller.Origin{Actor: r.Actor, Source: r.Source, Action: r.Action},
	}
	if r.ProblemCode != "" {
		o.Problem = &core.Error{Category: r.ProblemCategory, Code: r.ProblemCode, Msg: r.ProblemMessage}
	}
	return o
}

// Operation returns one.
func (t *tx) Operation(ctx context.Context, id core.OperationID) (controller.Operation, error) {
	absent := core.Errorf(core.NotFound, core.CodeOperationNotFound, "there is no operation %s", id)
	row, err := pgtx.One[operationRow](ctx, t, absent, `SELECT`+operationColumns+` FROM operations o WHERE o.id = @id`, pgtx.Args{"id": id})
	return row.operation(), err
}

// Operations lists operations. The capture of a workspace is not interrupted, so a fork of a workspace that captures is not one to cancel yet.
func (t *tx) Operations(ctx context.Context, f controller.OperationFilter) ([]controller.Operation, error) {
	q := pgtx.NewFilter("o", f.Page, false)
	q.AnyOf("kind", pgtx.Texts(f.Kinds))
	q.AnyOf("state", pgtx.Texts(f.States))
	q.Equal("workspace_id", string(f.WorkspaceID))
	q.Equal("checkpoint_id", string(f.Checkpoint))
	if f.ClaimedBy != "" {
		// The condition is not about o, so that it is evaluated once, and not for each operation.
		q.Add(`o.id = (SELECT k.object_id FROM idempotency_keys k WHERE k.project_id = (SELECT current_setting('coppice.project_id'))
			AND k.key = @claim AND k.expires_at > now())`, "claim", f.ClaimedBy)
	}
	if f.CanceledOf != "" {
		q.Add("o.cancel_requested_at IS NOT NULL AND o.state = 'running' AND o.lease_owner = @owner AND (o.kind <> 'fork_workspace' OR o.step = 'fork')", "owner", f.CanceledOf)
	}
	rows, err := pgtx.Many[operationRow](ctx, t, `SELECT`+operationColumns+` FROM operations o`+q.Where()+q.Tail(), q.Args)
	return pgtx.Map(rows, operationRow.operation), err
}

// CancelOperation keeps the time of the first request.
func (t *tx) CancelOperation(ctx context.Context, id core.OperationID) error {
	_, err := t.Exec(ctx, `UPDATE operations SET cancel_requested_at = now() WHERE id = @id AND cancel_requested_at IS NULL AND state IN ('pending', 'running')`, pgtx.Args{"id": id})
	return err
}

// InsertOperation inserts an operation that its inserter works on.
func (t *tx) InsertOperation(ctx context.Context, op controller.Operation, lease time.Duration) (controller.Operation, error) {
	row, err := pgtx.One[operationRow](ctx, t, nil, `
		WITH o AS (
			INSERT INTO operations (id, project_id, kind, state, step, input, workspace_id, checkpoint_id, request_id, lease_owner, lease_epoch, lease_expires_at, started_at)
			VALUES (@id, @project, @kind, @state, @step, @input, @workspace, @checkpoint, @request, @owner, 1, now() + make_interval(secs => @lease), now())
			RETURNING *
		)
		SELECT`+operationColumns+` FROM o`,
		pgtx.Args{
			"id": op.ID, "project": op.ProjectID, "kind": op.Kind, "state": core.OperationRunning, "step": op.Step, "input": op.Input,
			"workspace": pgtx.OrNull(op.WorkspaceID), "checkpoint": pgtx.OrNull(op.CheckpointID), "request": op.RequestID, "owner": op.LeaseOwner, "lease": lease.Seconds(),
		})
	return row.operation(), err
}

// StepOperation records how far an operation has come.
func (t *tx) StepOperation(ctx context.Context, op controller.Operation, step string) error {
	n, err := t.Exec(ctx, `UPDATE operations SET step = @step WHERE id = @id AND lease_epoch = @epoch AND state = 'running'`,
		pgtx.Args{"id": op.ID, "epoch": op.LeaseEpoch, "step": step})
	if err == nil && n == 0 {
		err = controller.ErrLeaseLost
	}
	return err
}

// FinishOperation writes State, Step, Result, Problem and Timings of op.
func (t *tx) FinishOperation(ctx context.Context, op controller.Operation) (controller.Operation, error) {
	a := pgtx.Args{
		"id": op.ID, "epoch": op.LeaseEpoch, "to": op.State, "step": op.Step, "from": pgtx.Texts(op.State.Sources()), "timings": pgtx.OrNone(op.Timings),
		"result": nil, "category": nil, "code": nil, "message": nil,
	}
	if op.Problem != nil {
		a["category"], a["code"], a["message"] = op.Problem.Category, op.Problem.Code, op.Problem.Msg
	} else {
		a["result"] = op.Result
	}
	row, err := pgtx.One[operationRow](ctx, t, controller.ErrLeaseLost, `
		WITH o AS (
			UPDATE operations SET state = @to, step = @step, result = @result, problem_category = @category, problem_code = @code, problem_message = @message,
				timings = @timings, ended_at = now(), lease_expires_at = NULL
			WHERE id = @id AND lease_epoch = @epoch AND state = ANY(@from::text[]) RETURNING *
		)
		SELECT`+operationColumns+` FROM o`, a)
	return row.operation(), err
}

type leaseRow struct {
	ID    core.OperationID `db:"id"`
	Epoch int64            `db:"lease_epoch"`
}

// RenewOperations extends what the owner still has. One that ran out and that nobody claimed is still the owner's. One that
// the owner does not work on, because it never heard that its insertion succeeded, is left to run out.
func (t *tx) RenewOperations(ctx context.Context, owner string, ids []core.OperationID, lease time.Duration) (map[core.OperationID]int64, error) {
	rows, err := pgtx.Many[leaseRow](ctx, t, `
		UPDATE operations SET lease_expires_at = now() + make_interval(secs => @lease)
		WHERE id = ANY(@ids::text[]) AND lease_owner = @owner AND state = 'running' RETURNING id, lease_epoch`,
		pgtx.Args{"owner": owner, "ids": pgtx.Texts(ids), "lease": lease.Seconds()})
	held := make(map[core.OperationID]int64, len(rows))
	for _, r := range rows {
		held[r.ID] = r.Epoch
	}
	return held, err
}

// ClaimOperations takes what nobody works on. Claimants skip each other's rows.
func (t *tx) ClaimOperations(ctx context.Context, owner string, except []core.OperationID, lease time.Duration, limit int) ([]controller.Operation, error) {
	rows, err := pgtx.Many[operationRow](ctx, t, `
		WITH free AS (
			SELECT id FROM operations WHERE (state = 'pending' OR (state = 'running' AND lease_expires_at < now())) AND id <> ALL(@except::text[])
			ORDER BY lease_expires_at NULLS FIRST LIMIT @limit FOR UPDATE SKIP LOCKED
		), o AS (
			UPDATE operations SET state = 'running', lease_owner = @owner, lease_epoch = lease_epoch + 1,
				lease_expires_at = now() + make_interval(secs => @lease), started_at = coalesce(started_at, now())
			WHERE id IN (SELECT id FROM free) RETURNING *
		)
		SELECT`+operationColumns+` FROM o ORDER BY o.id`, pgtx.Args{"owner": owner, "except": pgtx.Texts(except), "lease": lease.Seconds(), "limit": limit})
	return pgtx.Map(rows, operationRow.operation), err
}

// ReleaseOthers lets the leases of everybody but the owner run out now.
func (t *tx) ReleaseOthers(ctx context.Context, owner string) error {
	_, err := t.Exec(ctx, `UPDATE operations SET lease_expires_at = now() WHERE lease_owner <> @owner AND state = 'running'`, pgtx.Args{"owner": owner})
	return err
}

// ReleaseOperations lets the owner's leases run out now.
func (t *tx) ReleaseOperations(ctx context.Context, owner string) error {
	_, err := t.Exec(ctx, `UPDATE operations SET lease_expires_at = now() WHERE lease_owner = @owner AND state = 'running'`, pgtx.Args{"owner": owner})
	return err
}
