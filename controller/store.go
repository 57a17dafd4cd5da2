package controller

import (
	"context"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/identity"
	"github.com/coppice-dev/coppice/controller/idle"
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/controller/tenancy"
	"github.com/coppice-dev/coppice/core"
)

// ErrTemplateExists says that another request makes or has made the template.
var ErrTemplateExists = core.Errorf(core.AlreadyExists, "TEMPLATE_EXISTS", "the template exists already")

// VersionConflictError refuses a compare-and-set whose version is not the present one.
type VersionConflictError = model.VersionConflictError

// Store is the database. All of its errors are core errors: an unreachable database is Unavailable,
// DATABASE_UNAVAILABLE. It is safe for concurrent use.
type Store interface {
	// InTx runs fn in a transaction of the scope and commits when it returns nil. fn must not call the network, and may
	// run again after a deadlock. A cancelled context rolls back. When the connection breaks during the commit the
	// outcome is unknown: callers repeat only what a compare-and-set protects.
	InTx(ctx context.Context, scope Scope, fn func(AllTx) error) error
	// Ping reports whether the database answers.
	Ping(ctx context.Context) error
	// Notify says to the listeners of all controllers that these operations have ended. It is a hint and may be lost.
	Notify(ctx context.Context, ended []core.OperationID) error
	// Listen calls ended for every operation that Notify names, and revoked for every key that a committed transaction has
	// revoked. It returns when the context ends or the connection breaks.
	Listen(ctx context.Context, ended func(core.OperationID), revoked func(core.KeyID)) error
	// RunPeriodicJobs makes each job run at its interval on one of all controllers that call it, until ctx ends or the database
	// cannot be reached.
	RunPeriodicJobs(ctx context.Context, list []PeriodicJob, log *slog.Logger) error
}

// PeriodicJob is periodic work that one controller does for all. After an election, Do may run on two controllers at the same time, or twice in
// a row. So it is idempotent: compare-and-set decides what it changes.
type PeriodicJob struct {
	Name  string
	Every time.Duration // at least a second
	Do    func(ctx context.Context) error
}

// Tx is a transaction with the methods that the use cases of this package need. Reads of absent or foreign rows are NotFound errors that name the object. It is for one goroutine.
type Tx interface {
	tenancy.AdmitTx
	WorkspaceTx
	TTLTx
	RulesTx
	grants.RulesTx
	grants.HoldersTx
	SandboxTx
	CheckpointTx
	operations.Tx
	identity.Tx
	idle.CheckTx
	previews.InheritTx
	SessionTx
	FleetTx
	steps.AdmitTx
	builds.AdmitTx
	prepare.AskTx
}

// WorkspaceTx keeps workspaces. A write that finds the workspace in a state that does not lead to the wanted one, or in
// another epoch, changes nothing and returns a STATE_CONFLICT (single) or leaves it out of its answer (batches).
type WorkspaceTx interface {
	Workspace(ctx context.Context, id core.WorkspaceID) (Workspace, error)
	Workspaces(ctx context.Context, f WorkspaceFilter) ([]Workspace, error)
	WorkspacesByID(ctx context.Context, ids []core.WorkspaceID) ([]Workspace, error)
	// HeadWorkspaces returns the living workspaces whose head is one of the checkpoints, oldest first.
	HeadWorkspaces(ctx context.Context, heads []core.CheckpointID) ([]Workspace, error)
	// ExpiredWorkspaces returns living workspaces whose time is up, and OrphanedTerminations those whose termination nobody
	// works on, of all projects.
	ExpiredWorkspaces(ctx context.Context, limit int) ([]Workspace, error)
	OrphanedTerminations(ctx context.Context, limit int) ([]Workspace, error)
	InsertWorkspaces(ctx context.Context, list []Workspace, ttl time.Duration) ([]Workspace, error)
	// MoveWorkspace changes only the state of one workspace. It makes no workspace ready: the methods that do so look at the runner.
	MoveWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64, to core.WorkspaceState) (Workspace, error)
	// ReturnWorkspace makes a restoring workspace ready again in its present sandbox, or lost if the runner of that sandbox was given up.
	ReturnWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64) (Workspace, error)
	// ForkWorkspaceFrom moves a creating workspace to restoring, when its template is known. It may replace an earlier template.
	ForkWorkspaceFrom(ctx context.Context, id core.WorkspaceID, from Checkpoint) (Workspace, error)
	// ReadyWorkspaces also leaves out workspaces on a runner that was given up.
	ReadyWorkspaces(ctx context.Context, list []ReadyWorkspace) ([]Workspace, error)
	// SwitchWorkspace makes a restored workspace ready in its next epoch and sandbox, and ends the old sandbox. It records what the runner of
	// the new sandbox was sent. It fails with RUNNER_LOST if that runner was given up.
	SwitchWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64, sandbox core.SandboxID, head Checkpoint, given grants.Given) (Workspace, error)
	// CapturedWorkspace makes a workspace ready after a capture, or lost if its runner was given up. head is nil if the capture failed.
	CapturedWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64, head *Checkpoint) (Workspace, error)
	// SuspendWorkspace makes a workspace that was captured and stopped suspended, and ends its sandbox.
	SuspendWorkspace(ctx context.Context, id core.WorkspaceID, epoch int64, head Checkpoint) (Workspace, error)
	// EndWorkspaces ends workspaces and all their sandboxes. Its answer does not name the checkpoints from which lost ones can be recovered.
	EndWorkspaces(ctx context.Context, list []EndedWorkspace) ([]Workspace, error)
}

// SandboxTx keeps the VM instances and the reports of their reseals.
type SandboxTx interface {
	// InsertSandboxes may make the transaction fail with ErrIdentityTaken. Like all methods here without an error, its statement is sent to the
	// database with the next one, or before the commit.
	InsertSandboxes(list []Sandbox)
	// Sandboxes returns sandboxes by id, living or not.
	Sandboxes(ctx context.Context, ids []core.SandboxID) ([]Sandbox, error)
	// WorkspaceSandboxes returns the living sandboxes of a workspace.
	WorkspaceSandboxes(ctx context.Context, id core.WorkspaceID) ([]Sandbox, error)
	EndSandboxes(ctx context.Context, ids []core.SandboxID) error
	// InsertReseals appends reports, with their attestations. It leaves out reports of a runner that was removed.
	InsertReseals(list []ResealRecord)
	// Reseals returns the newest reports of a workspace first; ResealsByOperation those of an operation.
	Reseals(ctx context.Context, id core.WorkspaceID, p Page) ([]ResealRecord, error)
	ResealsByOperation(ctx context.Context, op core.OperationID, workspaces []core.WorkspaceID) ([]ResealRecord, error)
}

// CheckpointTx keeps the tree.
type CheckpointTx interface {
	// LockCheckpoint makes DeleteCheckpoint of a checkpoint wait until this transaction ends. Call it before reading the checkpoint.
	LockCheckpoint(id core.CheckpointID)
	// Checkpoint does not find pruned checkpoints.
	Checkpoint(ctx context.Context, id core.CheckpointID) (Checkpoint, error)
	// LiveTemplate returns a template of the image and shape. It prefers one on the runner, then a sealed one, unless the template must be
	// local, then one that is being made on the runner. It fails with NotFound if there is none.
	LiveTemplate(ctx context.Context, runner Runner, image core.Digest, r core.Resources, local bool) (Checkpoint, error)
	// Sources returns the places in the store of a sealed checkpoint and then of its sealed ancestors: the nearest ones, and last the root.
	Sources(ctx context.Context, id core.CheckpointID) ([]runnerapi.Stored, error)
	// Peers returns the runners with a lease that hold a checkpoint, its parent or its root, nearest first, at most runnerapi.MaxPeers.
	Peers(ctx context.Context, cp Checkpoint) ([]runnerapi.Peer, error)
	// Near ranks runners that need to fetch less of a checkpoint than others, a few for each distance. Distance 0 means that the runner has it.
	Near(ctx context.Context, cp Checkpoint) (map[core.RunnerID]int, error)
	// InsertCheckpoint may fail with ErrTemplateExists or NAME_TAKEN.
	InsertCheckpoint(ctx context.Context, cp Checkpoint) error
	CaptureCheckpoint(ctx context.Context, id core.CheckpointID, runner core.RunnerID, got runnerapi.Checkpoint) (Checkpoint, error)
	FailCheckpoint(ctx context.Context, id core.CheckpointID, why Failure) error
	// DropTemplate gives up a template whose bytes its runner no longer has.
	DropTemplate(ctx context.Context, id core.CheckpointID) error
	// DeleteCheckpoint marks a checkpoint deleted. It fails with CHECKPOINT_PINNED, and with CHECKPOINT_IN_USE while a fork of it
	// starts or it is the checkpoint of a suspended workspace. With spare it also fails if it is the source or head of a living
	// workspace. It is no error if the checkpoint is deleted or failed already.
	DeleteCheckpoint(ctx context.Context, id core.CheckpointID, spare bool) (Checkpoint, error)
	// DeleteCheckpoints is DeleteCheckpoint for many. It returns the outcome for each existing one; a refusal of one is no error.
	DeleteCheckpoints(ctx context.Context, ids []core.CheckpointID, spare bool) ([]Deletion, error)
}

// SessionTx is the part of a resume that concerns sessions.
type SessionTx interface {
	// MoveSessions moves the sessions of a suspended epoch of a workspace to the sandbox in which it was resumed.
	MoveSessions(ctx context.Context, id core.WorkspaceID, epoch int64, to core.SandboxID) error
}

// FleetTx is the part of the fleet that operations and periodic jobs need. All of its rows belong to the system.
type FleetTx interface {
	fleet.PlaceTx
	Runner(ctx context.Context, id core.RunnerID) (Runner, error)
	// Reachable reports whether there is a runner with a lease.
	Reachable(ctx context.Context) (bool, error)
}
