package tenancy

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
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

// AuditCheck is the result of a check of the closed ranges of records. The API calls a closed range a seal.
type AuditCheck struct {
	Seals    int64
	Records  int64  // in closed ranges
	Unsealed int64  // newer than the last closed range
	Broken   int64  // the first range that does not fit its records or the range before it; 0: none
	Head     string // hash of the last range, in hex: kept elsewhere, it proves that nothing before was changed
}

// AuditTx keeps the audit log. There is no way to change or remove a record.
type AuditTx interface {
	// InsertAudit records an action that changes no row. The database adds the transaction's origin.
	InsertAudit(ctx context.Context, r AuditRecord) error
	AuditRecords(ctx context.Context, f AuditFilter) ([]AuditRecord, error)
	// SealAudit closes the range of records of transactions that have ended, and returns how many these are.
	SealAudit(ctx context.Context) (int64, error)
	CheckAudit(ctx context.Context, project core.ProjectID) (AuditCheck, error)
}

// Audit records an action that a request is about to do and that no row shows. If this fails, the action must not be done.
func (m *Manager) Audit(ctx context.Context, r AuditRecord) error {
	return m.store.InTx(ctx, model.InProject(r.ProjectID), func(tx Tx) error { return tx.InsertAudit(ctx, r) })
}

// AuditFile records, as a request to write a file does, that an operation is about to write one to a workspace. With a problem, it records that
// the file was not written.
func (m *Manager) AuditFile(ctx context.Context, project core.ProjectID, id core.WorkspaceID, path string, problem error) error {
	detail := map[string]string{"path": path}
	r := AuditRecord{ProjectID: project, Object: string(id), Outcome: AuditAccepted, OperationID: core.OperationIDOf(ctx)}
	if problem != nil {
		detail["code"], r.Outcome = string(core.CodeOf(problem)), AuditFailed
	}
	var err error
	if r.Detail, err = json.Marshal(detail); err != nil {
		return fmt.Errorf("encode the detail of an audit record: %w", err)
	}
	origin, _ := request.OriginOf(ctx)
	origin.Action = "putFile"
	return m.Audit(request.WithOrigin(ctx, origin), r)
}

// AuditRecords lists the records of a project, newest first.
func (m *Manager) AuditRecords(ctx context.Context, actor model.Key, project core.ProjectID, f AuditFilter) ([]AuditRecord, error) {
	return audited(ctx, m, actor, project, func(tx Tx) ([]AuditRecord, error) { return tx.AuditRecords(ctx, f) })
}

// CheckAudit compares a project's records with the hashes of their ranges.
func (m *Manager) CheckAudit(ctx context.Context, actor model.Key, project core.ProjectID) (AuditCheck, error) {
	return audited(ctx, m, actor, project, func(tx Tx) (AuditCheck, error) { return tx.CheckAudit(ctx, project) })
}

// audited reads in the scope of a project that the key may see. This is the key's own project, or for an operator any project, including the
// system's, which has the records of runners and projects.
func audited[T any](ctx context.Context, m *Manager, actor model.Key, project core.ProjectID, fn func(tx Tx) (T, error)) (T, error) {
	operators := project == core.SystemProject && reachOf(actor) == model.System() // that project is not in any list
	if project != actor.ProjectID && !operators {
		if _, err := query(ctx, m, reachOf(actor), func(tx Tx) (model.Project, error) { return tx.Project(ctx, project) }); err != nil {
			var none T
			return none, err
		}
	}
	return query(ctx, m, model.InProject(project), fn)
}

// AuditEvery is the time between two calls of CloseAudit.
const AuditEvery = 10 * time.Second

// CloseAudit closes the range of what was recorded since the last time: its hash covers the records and the hash of the range before.
func (m *Manager) CloseAudit(ctx context.Context) error {
	return m.store.InTx(ctx, model.System(), func(tx Tx) error {
		_, err := tx.SealAudit(ctx)
		return err
	})
}
