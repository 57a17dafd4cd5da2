package eventrows

import (
	"context"
	"fmt"
	"strconv"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

type eventRow struct {
	ID           int64             `db:"id"`
	ProjectID    core.ProjectID    `db:"project_id"`
	Type         string            `db:"type"`
	WorkspaceID  core.WorkspaceID  `db:"workspace_id"`
	CheckpointID core.CheckpointID `db:"checkpoint_id"`
	Root         core.CheckpointID `db:"root_id"`
	OperationID  core.OperationID  `db:"operation_id"`
	Data         []byte            `db:"data"`
	CreatedAt    time.Time         `db:"created_at"`
}

const eventColumns = `
	e.id, e.project_id, e.type, coalesce(e.workspace_id, '') AS workspace_id, coalesce(e.checkpoint_id, '') AS checkpoint_id,
	coalesce(e.root_id, '') AS root_id, coalesce(e.operation_id, '') AS operation_id, e.data, e.created_at`

func (r eventRow) event() controller.Event {
	return controller.Event{
		ID: r.ID, ProjectID: r.ProjectID, Type: r.Type, WorkspaceID: r.WorkspaceID, CheckpointID: r.CheckpointID, Root: r.Root,
		OperationID: r.OperationID, Data: r.Data, CreatedAt: r.CreatedAt,
	}
}

// Events reads by id.
func (t *Tx) Events(ctx context.Context, f events.Filter, after, until int64, limit int) ([]controller.Event, error) {
	where := pgtx.NewFilter("e", controller.Page{Limit: limit}, true)
	where.Add("e.id > @after_id", "after_id", after)
	where.Add("e.id <= @until_id", "until_id", until)
	where.Equal("project_id", string(f.Project))
	where.Equal("root_id", string(f.Root))
	where.Equal("workspace_id", string(f.WorkspaceID))
	if len(f.Types) > 0 {
		where.Add("(e.type = ANY(@types::text[]) OR split_part(e.type, '.', 1) = ANY(@types::text[]))", "types", f.Types)
	}
	rows, err := pgtx.Many[eventRow](ctx, t, `SELECT`+eventColumns+` FROM events e`+where.Where()+where.Tail(), where.Args)
	return pgtx.Map(rows, eventRow.event), err
}

type tailRow struct {
	eventRow
	Settled string `db:"settled"`
	Newest  int64  `db:"newest"`
	History int64  `db:"history"`
}

// newestEvent is the highest id that was handed out, or could have been by the server of the last history.
const newestEvent = ` CASE WHEN i.is_called THEN i.last_value ELSE 0 END + coppice_event_history()`

// TailEvents reads the newest events of all projects and, by the same snapshot, below which transaction everything has ended. The
// sequence is read with it: it is never behind a visible event.
func (t *Tx) TailEvents(ctx context.Context, after int64, limit int) (events.Tail, error) {
	rows, err := pgtx.Many[tailRow](ctx, t, `
		WITH tail AS (SELECT * FROM events WHERE id > @after ORDER BY id LIMIT @limit)
		SELECT coalesce(e.id, 0) AS id, coalesce(e.project_id, '') AS project_id, coalesce(e.type, '') AS type, coalesce(e.workspace_id, '') AS workspace_id,
			coalesce(e.checkpoint_id, '') AS checkpoint_id, coalesce(e.root_id, '') AS root_id, coalesce(e.operation_id, '') AS operation_id,
			coalesce(e.data, '{}') AS data, coalesce(e.created_at, now()) AS created_at, s.settled, s.newest, s.history
		FROM (SELECT pg_snapshot_xmin(pg_current_snapshot())::text AS settled,`+newestEvent+` AS newest, (coppice_event_history() >> 40) + 1 AS history
			FROM events_id_seq i) AS s LEFT JOIN tail e ON true ORDER BY e.id`,
		pgtx.Args{"after": after, "limit": limit})
	if err != nil {
		return events.Tail{}, err
	}
	out := events.Tail{Newest: rows[0].Newest, History: rows[0].History}
	if out.Settled, err = strconv.ParseUint(rows[0].Settled, 10, 64); err != nil {
		return events.Tail{}, fmt.Errorf("read a snapshot: %w", err)
	}
	for _, r := range rows {
		if r.ID != 0 { // the row that says that there is none
			out.Events = append(out.Events, r.event())
		}
	}
	return out, nil
}

// EventMarks reads the sequences, which no snapshot holds back.
func (t *Tx) EventMarks(ctx context.Context) (events.Marks, error) {
	return pgtx.One[events.Marks](ctx, t, nil, `
		SELECT f.last_value AS floor,`+newestEvent+` AS newest FROM events_floor f, events_id_seq i`, pgtx.Args{})
}

// Transaction returns the id of this transaction.
func (t *Tx) Transaction(ctx context.Context) (uint64, error) {
	text, err := pgtx.One[string](ctx, t, nil, `SELECT pg_current_xact_id()::text AS id`, pgtx.Args{})
	if err != nil {
		return 0, err
	}
	id, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		return 0, fmt.Errorf("read a transaction's id: %w", err)
	}
	return id, nil
}

// TidyEvents makes the partitions of the next days and drops old ones.
func (t *Tx) TidyEvents(ctx context.Context, keep time.Duration) error {
	_, err := t.Exec(ctx, `SELECT coppice_tidy_events(make_interval(secs => @keep))`, pgtx.Args{"keep": keep.Seconds()})
	return err
}
