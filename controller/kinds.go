package controller

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/coppice-dev/coppice/core"
)

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
	OpStepCheckpoint     OperationKind = "step_checkpoint"
	OpStepWorkspace      OperationKind = "step_workspace"
	OpBuildImage         OperationKind = "build_image"
)

// kind is one kind of operation. A value of it is the input of an operation, and its row keeps the
// exported fields as JSON. The admission sets the other fields, which are empty in an operation
// that is resumed.
type kind interface {
	// work is operations.Work.Do.
	work(ctx context.Context, c *Controller, t *task) error
	// made is what the admission has inserted.
	made() made
	// takeBack returns the workspace that an abandoned operation acted on to its old state. A STATE_CONFLICT says that the workspace has
	// changed to another state meanwhile, which is no fault.
	takeBack(ctx context.Context, tx Tx, op Operation) error
}

// kinds are all kinds of operations.
var kinds = map[OperationKind]func() kind{
	OpCreateWorkspace:    func() kind { return new(createWorkspace) },
	OpCreateTemplate:     func() kind { return new(createTemplate) },
	OpCreateCheckpoint:   func() kind { return new(createCheckpoint) },
	OpForkCheckpoint:     func() kind { return new(forkCheckpoint) },
	OpRestoreCheckpoint:  func() kind { return new(restoreCheckpoint) },
	OpForkWorkspace:      func() kind { return new(forkWorkspace) },
	OpRestoreWorkspace:   func() kind { return new(restoreWorkspace) },
	OpTerminateWorkspace: func() kind { return new(terminateWorkspace) },
	OpSuspendWorkspace:   func() kind { return new(suspendWorkspace) },
	OpResumeWorkspace:    func() kind { return new(resumeWorkspace) },
	OpPruneCheckpoints:   func() kind { return new(pruneCheckpoints) },
	OpStepCheckpoint:     func() kind { return new(stepCheckpoint) },
	OpStepWorkspace:      func() kind { return new(stepCheckpoint) },
	OpBuildImage:         func() kind { return new(buildImage) },
}

// kindOf reads the input of an operation from its row.
func kindOf(op Operation) (kind, error) {
	fresh, ok := kinds[op.Kind]
	if !ok {
		return nil, fmt.Errorf("operation %s is of kind %q, which this program does not know", op.ID, op.Kind)
	}
	k := fresh()
	if err := json.Unmarshal(op.Input, k); err != nil {
		return nil, fmt.Errorf("read input of operation %s: %w", op.ID, err)
	}
	return k, nil
}

// work is the operations.Work of a kind.
type work struct {
	c    *Controller
	kind kind
}

// MarshalJSON makes the input that the row keeps.
func (w work) MarshalJSON() ([]byte, error) { return json.Marshal(w.kind) }

// Admit implements operations.Work.
func (w work) Admit(ctx context.Context, tx Tx, project core.ProjectID) error {
	return tx.Admit(ctx, project, w.kind.made().demand(project))
}

// Do implements operations.Work.
func (w work) Do(ctx context.Context, t *task) error { return w.kind.work(ctx, w.c, t) }

// TakeBack implements operations.Work: workspaces that the operation should make are failed, a capture is failed, and the workspace that it
// acted on gets its old state. Runners drop what they may have of the operation.
func (w work) TakeBack(ctx context.Context, t *task, problem error) error {
	if k, ok := w.kind.(interface {
		undo(ctx context.Context, c *Controller, t *task, why error) error
	}); ok {
		if err := k.undo(ctx, w.c, t, problem); err != nil {
			return err
		}
	}
	return w.kind.made().takeBack(ctx, w.c, t, problem, func(ctx context.Context, tx Tx) error {
		err := w.kind.takeBack(ctx, tx, t.Op())
		if core.CodeOf(err) == core.CodeStateConflict {
			return nil
		}
		return err
	})
}

// made is what the admission of an operation has inserted. An operation that fails takes it back.
type made struct {
	children []childInput      // workspaces with their sandboxes
	capture  core.CheckpointID // a checkpoint, which is being captured
	next     core.SandboxID    // the next sandbox of a workspace
}

// childInput is a workspace that an operation makes.
type childInput struct {
	Workspace core.WorkspaceID `json:"workspace_id"`
	Sandbox   core.SandboxID   `json:"sandbox_id"`
}

// demand is what the admission of an operation adds to its project.
func (m made) demand(project core.ProjectID) Demand {
	if project == SystemProject {
		return Demand{}
	}
	d := Demand{Workspaces: len(m.children), ForksInFlight: len(m.children), Checkpoint: m.capture}
	if m.next != "" {
		d.ForksInFlight++
	}
	return d
}

// takeBack ends an operation as failed and takes back what its admission has inserted. settle writes the new state of the workspace that the
// operation acted on.
func (m made) takeBack(ctx context.Context, c *Controller, t *task, problem error, settle func(ctx context.Context, tx Tx) error) error {
	ids := make([]core.SandboxID, 0, len(m.children)+1)
	ended := make([]EndedWorkspace, len(m.children))
	for i, child := range m.children {
		ended[i] = EndedWorkspace{ID: child.Workspace, To: core.WorkspaceFailed, Failure: failureOf(problem)}
		ids = append(ids, child.Sandbox)
	}
	if m.next != "" {
		ids = append(ids, m.next)
	}
	err := t.Fail(ctx, problem, func(ctx context.Context, tx Tx) error {
		if len(ended) > 0 {
			if _, err := tx.EndWorkspaces(ctx, ended); err != nil {
				return err
			}
		}
		if m.capture != "" {
			if err := tx.FailCheckpoint(ctx, m.capture, *failureOf(problem)); err != nil {
				return err
			}
		}
		return settle(ctx, tx)
	})
	if err == nil {
		c.fleet.Drop(ctx, ids...)
	}
	return err
}

func failureOf(err error) *Failure {
	return &Failure{Code: core.CodeOf(err), Message: core.MessageOf(err)}
}

// WorkspacesOf returns the workspaces that an operation makes.
func WorkspacesOf(op Operation) []core.WorkspaceID {
	k, err := kindOf(op)
	if err != nil {
		return nil
	}
	children := k.made().children
	ids := make([]core.WorkspaceID, len(children))
	for i, c := range children {
		ids[i] = c.Workspace
	}
	return ids
}

// madeNothing is embedded in kinds that insert nothing and change nothing that must be taken back.
type madeNothing struct{}

func (madeNothing) made() made { return made{} }

func (madeNothing) takeBack(context.Context, Tx, Operation) error { return nil }
