package operations

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
)

// The errors on which the engine branches.
var (
	// ErrLeaseLost says that another controller has claimed the operation. This controller must stop its work on it, which changes nothing.
	ErrLeaseLost = core.Errorf(core.Conflict, "LEASE_LOST", "the operation is carried on by another controller")
	// ErrIdentityTaken says that a fresh identity collided with a living one: draw another.
	ErrIdentityTaken = core.Errorf(core.Conflict, "IDENTITY_TAKEN", "a fresh address collided with one in use")
)

// Kind names what an operation does.
type Kind string

// Operation is the row of an operation.
type Operation struct {
	ID           core.OperationID
	ProjectID    core.ProjectID
	Kind         Kind
	State        core.OperationState
	Step         string          // the named step to resume at; empty is the first
	Input        json.RawMessage // its Work
	Result       json.RawMessage // the outcome, when it succeeded
	Problem      *core.Error     // when it failed
	Timings      []core.Timing
	WorkspaceID  core.WorkspaceID
	CheckpointID core.CheckpointID
	RequestID    string
	Origin       request.Origin // who asked for it; set by its insertion
	LeaseOwner   string
	LeaseEpoch   int64
	CancelAt     time.Time // when somebody asked for its end; zero: nobody did
	CreatedAt    time.Time
	StartedAt    time.Time
	EndedAt      time.Time
}

// Filter selects operations; zero fields do not filter. Newest first.
type Filter struct {
	model.Page
	Kinds       []Kind
	States      []core.OperationState
	WorkspaceID core.WorkspaceID
	Checkpoint  core.CheckpointID
	ClaimedBy   string // the idempotency key of the request that began it
	// CanceledOf wants running operations that are to be canceled and can be at their present step, of one owner of leases.
	CanceledOf string
}

// Answer is the answer to a request that starts an operation: the operation in its present state and, if it has succeeded, its result.
type Answer[R any] struct {
	Operation Operation
	Done      bool
	Result    R
}

// Error is the failure of an operation that had been accepted.
type Error struct {
	Operation core.OperationID
	Err       error
}

func (e *Error) Error() string { return fmt.Sprintf("operation %s: %v", e.Operation, e.Err) }

// Unwrap returns the failure.
func (e *Error) Unwrap() error { return e.Err }

// Work is what an operation does, with its input. Its row keeps the input as JSON: what json.Marshal makes of the Work.
type Work[T Tx, R any] interface {
	// Admit counts what the admission has inserted against the quotas of the project. It is the last step of the admission's transaction.
	Admit(ctx context.Context, tx T, project core.ProjectID) error
	// Do carries out the operation, and ends it by Task.Finish or Task.Fail. An error means that the operation has not ended. Then the engine calls
	// TakeBack, unless another controller has the operation now or this one stops. The context of the work ends when the operation is to be
	// canceled; TakeBack gets one that goes on.
	Do(ctx context.Context, t *Task[T, R]) error
	// TakeBack ends the operation by Task.Fail, and undoes what its admission has begun.
	TakeBack(ctx context.Context, t *Task[T, R], problem error) error
}

// Admission makes the rows that an operation needs, in the transaction that inserts its row. It fills the operation's targets and
// first step and returns its Work. It runs again, with a higher attempt, when a fresh identity collided.
type Admission[T Tx, R any] func(ctx context.Context, tx T, op *Operation, attempt int) (Work[T, R], error)

// Tx has the rows of operations. Reads of absent or foreign rows are NotFound errors that name the object.
type Tx interface {
	request.Tx
	Operation(ctx context.Context, id core.OperationID) (Operation, error)
	Operations(ctx context.Context, f Filter) ([]Operation, error)
	// CancelOperation notes that an operation is to be canceled. It changes nothing about one that has ended.
	CancelOperation(ctx context.Context, id core.OperationID) error
	// InsertOperation inserts it as running under the lease of owner.
	InsertOperation(ctx context.Context, op Operation, lease time.Duration) (Operation, error)
	// StepOperation and FinishOperation are fenced by the lease epoch: ErrLeaseLost when another has claimed it.
	StepOperation(ctx context.Context, op Operation, step string) error
	FinishOperation(ctx context.Context, op Operation) (Operation, error)
	// RenewOperations extends the leases of an owner on these operations and returns those that it still has, with their epochs.
	RenewOperations(ctx context.Context, owner string, ids []core.OperationID, lease time.Duration) (map[core.OperationID]int64, error)
	// ClaimOperations takes over operations that no controller works on, except those that the claimant works on itself.
	ClaimOperations(ctx context.Context, owner string, except []core.OperationID, lease time.Duration, limit int) ([]Operation, error)
	// ReleaseOperations gives up the leases of an owner at once, so that others need not wait until they run out.
	ReleaseOperations(ctx context.Context, owner string) error
	// ReleaseOthers does so for all leases but the owner's.
	ReleaseOthers(ctx context.Context, owner string) error
}

// Store runs transactions. If the database cannot be reached, its errors have the code DATABASE_UNAVAILABLE.
type Store[T Tx] interface {
	// InTx runs fn in a transaction of the scope and commits when it returns nil. When the connection breaks during the commit, the outcome
	// is unknown.
	InTx(ctx context.Context, scope model.Scope, fn func(T) error) error
	// Notify tells the listeners of all controllers that these operations have ended. It is a hint and may be lost.
	Notify(ctx context.Context, ended []core.OperationID) error
}

// scopeOf is the scope of the transactions of a project's operations.
func scopeOf(project core.ProjectID) model.Scope {
	if project == core.SystemProject {
		return model.System()
	}
	return model.InProject(project)
}

// problemOf is the part of an error that the row and the caller may see.
func problemOf(err error) *core.Error {
	return &core.Error{Category: core.CategoryOf(err), Code: core.CodeOf(err), Msg: core.MessageOf(err)}
}
