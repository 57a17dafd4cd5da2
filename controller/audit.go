package controller

import (
	"context"
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// AuditOutcome is the outcome of an audited change.
type AuditOutcome string

// The outcomes. An accepted change gets another record, of the same operation or request, when it has ended or failed.
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

// AuditFilter selects records, newest first, beginning before the id After (0: at the newest). Zero fields do not filter.
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

// AuditCheck is the result of a check of the seals.
type AuditCheck struct {
	Seals    int64
	Records  int64  // that are sealed
	Unsealed int64  // younger than the last seal
	Broken   int64  // the first seal that does not fit its records or the seal before it; 0: none
	Head     string // hash of the last seal, in hex: kept elsewhere, it proves that nothing before was changed
}

// AuditTx keeps the audit log. There is no way to change or remove a record.
type AuditTx interface {
	// InsertAudit records an action that changes no row. The database adds the transaction's origin.
	InsertAudit(ctx context.Context, r AuditRecord) error
	// InsertDataWrites records writes to files by a runner's data plane. It leaves out writes to sandboxes of other runners, and
	// writes whose numbers in the runner's log were recorded before.
	InsertDataWrites(ctx context.Context, runner core.RunnerID, log string, list []runnerapi.DataWrite) error
	AuditRecords(ctx context.Context, f AuditFilter) ([]AuditRecord, error)
	// SealAudit seals the records of transactions that have ended and returns how many.
	SealAudit(ctx context.Context) (int64, error)
	CheckAudit(ctx context.Context, project core.ProjectID) (AuditCheck, error)
}

// Audit records an action that a request is about to do and that no row shows. If this fails, the action must not be done.
func (c *Controller) Audit(ctx context.Context, r AuditRecord) error {
	return c.store.InTx(ctx, InProject(r.ProjectID), func(tx Tx) error { return tx.InsertAudit(ctx, r) })
}

// AuditRecords lists the records of a project, newest first.
func (c *Controller) AuditRecords(ctx context.Context, actor Key, project core.ProjectID, f AuditFilter) ([]AuditRecord, error) {
	return audited(ctx, c, actor, project, func(tx Tx) ([]AuditRecord, error) { return tx.AuditRecords(ctx, f) })
}

// CheckAudit compares a project's records with their seals.
func (c *Controller) CheckAudit(ctx context.Context, actor Key, project core.ProjectID) (AuditCheck, error) {
	return audited(ctx, c, actor, project, func(tx Tx) (AuditCheck, error) { return tx.CheckAudit(ctx, project) })
}

// audited reads in the scope of a project that the key may see. This is the key's own project, or for an operator any project, including the
// system's, which has the records of runners and projects.
func audited[T any](ctx context.Context, c *Controller, actor Key, project core.ProjectID, fn func(tx Tx) (T, error)) (T, error) {
	operators := project == SystemProject && reachOf(actor) == System() // that project is not in any list
	if project != actor.ProjectID && !operators {
		if _, err := read(ctx, c, reachOf(actor), func(tx Tx) (Project, error) { return tx.Project(ctx, project) }); err != nil {
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
