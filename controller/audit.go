package controller

import (
	"context"
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// Origin says on whose behalf and by what a transaction works. The database writes it into the audit record of every change.
type Origin struct {
	Actor     string // id of a key or runner; empty: the controller itself
	Source    string // address that the request came from
	Action    string // the API's operationId, or the name of the controller's own work
	Operation core.OperationID
}

type originKey struct{}

// WithOrigin marks a context: what transactions under it change is recorded as the origin's.
func WithOrigin(ctx context.Context, o Origin) context.Context {
	return context.WithValue(ctx, originKey{}, o)
}

// OriginOf returns the origin of a context and the id of the request that it serves.
func OriginOf(ctx context.Context) (Origin, string) {
	o, _ := ctx.Value(originKey{}).(Origin)
	if o.Actor == "" {
		o.Actor = "controller"
	}
	if o.Action == "" {
		o.Action = "controller"
	}
	return o, requestID(ctx)
}

// AuditOutcome is what became of an audited change.
type AuditOutcome string

// The outcomes. What was accepted has another record, of the same operation or request, when it has ended or failed.
const (
	AuditAccepted  AuditOutcome = "accepted"
	AuditSucceeded AuditOutcome = "succeeded"
	AuditFailed    AuditOutcome = "failed"
)

// AuditRecord is one change: who, when, what, with which outcome. Most are written by the database itself.
type AuditRecord struct {
	ID          int64
	ProjectID   core.ProjectID
	RequestID   string
	Actor       string
	Source      string
	Action      string
	Object      string
	Before      string // state; empty where there is none
	After       string
	Outcome     AuditOutcome
	OperationID core.OperationID
	Detail      json.RawMessage
	CreatedAt   time.Time
}

// AuditFilter selects records; zero fields do not filter. Newest first, those before After (an id; 0: all).
type AuditFilter struct {
	After     int64
	Limit     int
	Actor     string
	Action    string
	Object    string
	RequestID string
	Operation core.OperationID
	Outcome   AuditOutcome
	Since     time.Time
	Until     time.Time
}

// AuditCheck is what a check of the seals found.
type AuditCheck struct {
	Seals    int64
	Records  int64  // that are sealed
	Unsealed int64  // younger than the last seal
	Broken   int64  // the first seal that does not fit its records or the seal before it; 0: none
	Head     string // hash of the last seal, in hex: kept elsewhere, it proves that nothing before was changed
}

// AuditTx keeps the audit log. There is no way to change or remove a record.
type AuditTx interface {
	// InsertAudit records what leaves no row of its own; the transaction's origin is added.
	InsertAudit(ctx context.Context, r AuditRecord) error
	// InsertDataWrites records writes to files by a runner's data plane; writes to sandboxes of other runners are left out, and
	// those whose numbers in the runner's log were recorded before.
	InsertDataWrites(ctx context.Context, runner core.RunnerID, log string, list []runnerapi.DataWrite) error
	AuditRecords(ctx context.Context, f AuditFilter) ([]AuditRecord, error)
	// SealAudit seals the records of transactions that have ended and returns how many.
	SealAudit(ctx context.Context) (int64, error)
	CheckAudit(ctx context.Context, project core.ProjectID) (AuditCheck, error)
}

// Audit records what a request is about to do where no row shows it. When it cannot be recorded it must not be done.
func (c *Controller) Audit(ctx context.Context, r AuditRecord) error {
	return c.store.InTx(ctx, InProject(r.ProjectID), func(tx Tx) error { return tx.InsertAudit(ctx, r) })
}

// AuditRecords lists those of a project, newest first.
func (c *Controller) AuditRecords(ctx context.Context, actor Key, project core.ProjectID, f AuditFilter) ([]AuditRecord, error) {
	return audited(ctx, c, actor, project, func(tx Tx) ([]AuditRecord, error) { return tx.AuditRecords(ctx, f) })
}

// CheckAudit compares a project's records with their seals.
func (c *Controller) CheckAudit(ctx context.Context, actor Key, project core.ProjectID) (AuditCheck, error) {
	return audited(ctx, c, actor, project, func(tx Tx) (AuditCheck, error) { return tx.CheckAudit(ctx, project) })
}

// audited reads in the scope of a project that the key may see: its own, or for an operator any there is, the system's too, which has
// the records of runners and projects.
func audited[T any](ctx context.Context, c *Controller, actor Key, project core.ProjectID, fn func(tx Tx) (T, error)) (T, error) {
	operators := project == SystemProject && actor.reach() == System() // that project is not in any list
	if project != actor.ProjectID && !operators {
		if _, err := read(ctx, c, actor.reach(), func(tx Tx) (Project, error) { return tx.Project(ctx, project) }); err != nil {
			var none T
			return none, err
		}
	}
	return read(ctx, c, InProject(project), fn)
}

const sealInterval = 10 * time.Second

// sealAudit seals what was recorded since the last time.
func (c *Controller) sealAudit(ctx context.Context) error {
	return c.store.InTx(ctx, System(), func(tx Tx) error {
		_, err := tx.SealAudit(ctx)
		return err
	})
}
