package controller

import (
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// SystemProject owns what the operator publishes to all projects: templates, images, runners.
const SystemProject = core.SystemProject

// The rows that packages below the controller share. Package model has them.
type (
	Scope          = model.Scope
	Page           = model.Page
	Project        = model.Project
	Quotas         = model.Quotas
	AllowAll       = model.AllowAll
	Encryption     = model.Encryption
	Key            = model.Key
	ImageRef       = model.ImageRef
	Image          = model.Image
	Failure        = model.Failure
	Stall          = model.Stall
	IdleAction     = model.IdleAction
	Rest           = model.Rest
	Workspace      = model.Workspace
	EndedWorkspace = model.EndedWorkspace
	Sandbox        = model.Sandbox
	CheckpointKind = model.CheckpointKind
	Checkpoint     = model.Checkpoint
	Imported       = model.Imported
	Ancestor       = model.Ancestor
	TreeNode       = model.TreeNode
	ResealRecord   = model.ResealRecord
	Seal           = model.Seal
	SealState      = model.SealState
	Runner         = model.Runner
	Session        = model.Session
	AttachToken    = model.AttachToken
	Port           = model.Port
)

// The values of these types.
const (
	EncryptionNone     = model.EncryptionNone
	EncryptionEnvelope = model.EncryptionEnvelope
	AllowAllDefault    = model.AllowAllDefault
	AllowAllAllowed    = model.AllowAllAllowed
	AllowAllDenied     = model.AllowAllDenied
	IdleSuspend        = model.IdleSuspend
	IdleTerminate      = model.IdleTerminate
	KindTemplate       = model.KindTemplate
	KindUser           = model.KindUser
	SealQueued         = model.SealQueued
	SealUploading      = model.SealUploading
	SealFailed         = model.SealFailed
)

// InProject is the scope of one tenant.
func InProject(id core.ProjectID) Scope { return model.InProject(id) }

// System is the scope of the controller's own work, which sees every project.
func System() Scope { return model.System() }

// OperationKind names what an operation does.
type OperationKind string

// The kinds of operations.
const (
	OpCreateWorkspace    OperationKind = "create_workspace"
	OpCreateTemplate     OperationKind = "create_template" // of the system project; creators wait for it
	OpCreateCheckpoint   OperationKind = "create_checkpoint"
	OpForkCheckpoint     OperationKind = "fork_checkpoint"
	OpForkWorkspace      OperationKind = "fork_workspace"
	OpRestoreWorkspace   OperationKind = "restore_workspace"
	OpRestoreCheckpoint  OperationKind = "restore_checkpoint"
	OpTerminateWorkspace OperationKind = "terminate_workspace"
	OpSuspendWorkspace   OperationKind = "suspend_workspace"
	OpResumeWorkspace    OperationKind = "resume_workspace"
	OpPruneCheckpoints   OperationKind = "prune_checkpoints"
)

// Operation is a durable, resumable unit of work.
type Operation struct {
	ID           core.OperationID
	ProjectID    core.ProjectID
	Kind         OperationKind
	State        core.OperationState
	Step         string // the named step to resume at; empty is the first
	Input        json.RawMessage
	Result       json.RawMessage // an Outcome, when it succeeded
	Problem      *core.Error     // when it failed
	Timings      []core.Timing
	WorkspaceID  core.WorkspaceID
	CheckpointID core.CheckpointID
	RequestID    string
	Origin       Origin // who asked for it; set by its insertion
	LeaseOwner   string
	LeaseEpoch   int64
	CancelAt     time.Time // when somebody asked for its end; zero: nobody did
	CreatedAt    time.Time
	StartedAt    time.Time
	EndedAt      time.Time
}
