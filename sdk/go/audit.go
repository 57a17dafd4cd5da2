package coppice

import (
	"context"
	"iter"
	"net/url"
	"time"
)

// SystemProject has the audit records that belong to no single project: those of runners, and of projects themselves.
const SystemProject ProjectID = "prj_00000000000000000000000000"

// AuditFilter narrows the audit log. Its zero value lists all of it.
type AuditFilter struct {
	ProjectID   ProjectID // instead of the key's own; a key with the scope admin may ask for any
	Actor       string    // id of a key or runner
	Action      string
	ObjectID    string
	RequestID   string
	OperationID OperationID
	Outcome     AuditOutcome
	Since       time.Time
	Until       time.Time
}

func (f AuditFilter) query() url.Values {
	q := url.Values{}
	set(q, "project_id", f.ProjectID)
	set(q, "actor", f.Actor)
	set(q, "action", f.Action)
	set(q, "object_id", f.ObjectID)
	set(q, "request_id", f.RequestID)
	set(q, "operation_id", f.OperationID)
	set(q, "outcome", string(f.Outcome))
	if !f.Since.IsZero() {
		q.Set("since", f.Since.UTC().Format(time.RFC3339Nano))
	}
	if !f.Until.IsZero() {
		q.Set("until", f.Until.UTC().Format(time.RFC3339Nano))
	}
	return q
}

// Audit iterates over the records that match, newest first.
func (c *Client) Audit(ctx context.Context, f AuditFilter) iter.Seq2[AuditRecord, error] {
	return all[AuditRecord](ctx, c, get("v1", "audit").with(f.query()))
}

// CheckAudit compares the audit records of a project with their seals. An empty project means the key's own.
func (c *Client) CheckAudit(ctx context.Context, project ProjectID) (AuditCheck, error) {
	var out AuditCheck
	err := c.call(ctx, get("v1", "audit", "check").with(AuditFilter{ProjectID: project}.query()), &out)
	return out, err
}
