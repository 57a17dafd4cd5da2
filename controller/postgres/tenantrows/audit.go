package tenantrows

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/postgres/pgtx"
	"github.com/coppice-dev/coppice/core"
)

type auditRow struct {
	ID          int64                   `db:"id"`
	ProjectID   core.ProjectID          `db:"project_id"`
	CreatedAt   time.Time               `db:"created_at"`
	RequestID   string                  `db:"request_id"`
	Actor       string                  `db:"actor"`
	Source      string                  `db:"source"`
	Action      string                  `db:"action"`
	Object      string                  `db:"object_id"`
	Before      string                  `db:"before"`
	After       string                  `db:"after"`
	Outcome     controller.AuditOutcome `db:"outcome"`
	OperationID core.OperationID        `db:"operation_id"`
	Detail      []byte                  `db:"detail"`
}

func (r auditRow) record() controller.AuditRecord {
	return controller.AuditRecord{
		ID: r.ID, ProjectID: r.ProjectID, RequestID: r.RequestID, Actor: r.Actor, Source: r.Source, Action: r.Action, Object: r.Object,
		Before: r.Before, After: r.After, Outcome: r.Outcome, OperationID: r.OperationID, Detail: r.Detail, CreatedAt: r.CreatedAt,
	}
}

// InsertAudit inserts a record with the transaction's origin.
func (t *Tx) InsertAudit(ctx context.Context, r controller.AuditRecord) error {
	detail := any(nil)
	if r.Detail != nil {
		detail = r.Detail
	}
	_, err := t.Exec(ctx, `
		INSERT INTO audit_records (project_id, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail)
		VALUES (@project, coppice_origin(4), coppice_origin(1), coppice_origin(2), coppice_origin(3), @object, @before, @after, @outcome, @operation, @detail)`,
		pgtx.Args{"project": r.ProjectID, "object": r.Object, "before": r.Before, "after": r.After, "outcome": r.Outcome, "operation": r.OperationID, "detail": detail})
	return err
}

// AuditRecords lists.
func (t *Tx) AuditRecords(ctx context.Context, f controller.AuditFilter) ([]controller.AuditRecord, error) {
	q := &pgtx.Filter{Relation: "a", Args: pgtx.Args{"limit": f.Limit}}
	if f.After != 0 {
		q.Add("a.id < @after", "after", f.After)
	}
	q.Equal("actor", f.Actor)
	q.Equal("action", f.Action)
	q.Equal("object_id", f.Object)
	q.Equal("request_id", f.RequestID)
	q.Equal("operation_id", string(f.Operation))
	q.Equal("outcome", string(f.Outcome))
	if !f.Since.IsZero() {
		q.Add("a.created_at >= @since", "since", f.Since)
	}
	if !f.Until.IsZero() {
		q.Add("a.created_at < @until", "until", f.Until)
	}
	rows, err := pgtx.Many[auditRow](ctx, t, `
		SELECT id, project_id, created_at, request_id, actor, source, action, object_id, before, after, outcome, operation_id, detail FROM audit_records a`+q.Where()+q.Tail(), q.Args)
	return pgtx.Map(rows, auditRow.record), err
}

// SealAudit is a function of the schema: what a seal covers is defined there, once.
func (t *Tx) SealAudit(ctx context.Context) (int64, error) {
	return pgtx.One[int64](ctx, t, nil, `SELECT coppice_seal_audit() AS count`, pgtx.Args{})
}

// CheckAudit computes every seal again.
func (t *Tx) CheckAudit(ctx context.Context, project core.ProjectID) (controller.AuditCheck, error) {
	return pgtx.One[controller.AuditCheck](ctx, t, nil, `
		WITH chain AS (
			SELECT s.seq, s.records, s.upper, s.hash, h.records = s.records AND h.hash = s.hash AND s.seq = row_number() OVER w
				AND s.previous = coalesce(lag(s.hash) OVER w, '\x') AND s.lower >= coalesce(lag(s.upper) OVER w, '0') AS good
			FROM audit_seals s CROSS JOIN LATERAL coppice_audit_hash(s.project_id, s.lower, s.upper, s.previous) h
			WHERE s.project_id = @project WINDOW w AS (ORDER BY s.seq)
		), stray AS ( -- rows that were put between what is sealed
			SELECT count(*) AS count FROM audit_records r WHERE r.project_id = @project AND r.xid < (SELECT max(upper) FROM chain)
		)
		SELECT count(*) AS seals, coalesce(sum(records), 0)::bigint AS records,
			(SELECT count(*) FROM audit_records r WHERE r.project_id = @project AND r.xid >= coalesce((SELECT max(upper) FROM chain), '0')) AS unsealed,
			coalesce(min(seq) FILTER (WHERE NOT good), CASE WHEN coalesce(sum(records), 0) <> (SELECT count FROM stray) THEN max(seq) END, 0)::bigint AS broken,
			coalesce((SELECT encode(hash, 'hex') FROM chain ORDER BY seq DESC LIMIT 1), '') AS head
		FROM chain`, pgtx.Args{"project": project})
}
