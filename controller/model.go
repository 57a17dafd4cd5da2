package controller

import (
	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// SystemProject owns what the operator publishes to all projects: templates, images, runners.
const SystemProject = core.SystemProject

// The rows that packages below the controller share. Package model has them.
type (
	Scope           = model.Scope
	Page            = model.Page
	Project         = model.Project
	Quotas          = model.Quotas
	AllowAll        = model.AllowAll
	Encryption      = model.Encryption
	Key             = model.Key
	ImageRef        = model.ImageRef
	Image           = model.Image
	Failure         = model.Failure
	Stall           = model.Stall
	IdleAction      = model.IdleAction
	IdlePolicy      = model.IdlePolicy
	Workspace       = model.Workspace
	EndedWorkspace  = model.EndedWorkspace
	WorkspaceFilter = model.WorkspaceFilter
	ReadyWorkspace  = model.ReadyWorkspace
	Sandbox         = model.Sandbox
	CheckpointKind  = model.CheckpointKind
	Checkpoint      = model.Checkpoint
	Imported        = model.Imported
	Ancestor        = model.Ancestor
	TreeNode        = model.TreeNode
	ResealRecord    = model.ResealRecord
	Seal            = model.Seal
	SealState       = model.SealState
	Runner          = model.Runner
	Session         = model.Session
	AttachToken     = model.AttachToken
	Port            = model.Port
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
