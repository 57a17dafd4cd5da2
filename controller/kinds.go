package controller

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/coppice-dev/coppice/core"
)

// kind is one kind of operation. A value of it is the input of an operation, and its row keeps the
// exported fields as JSON. The admission sets the other fields, which are empty in an operation
// that is resumed.
type kind interface {
	// work carries out the operation, and ends it by Task.finish or fail. An error means that it did not end it: then the operation is
	// abandoned, unless another controller has it now or this one stops.
	work(ctx context.Context, t *Task) error
	// made is what the admission has inserted.
	made() made
	// takeBack returns the workspace that an abandoned operation acted on to its old state. A STATE_CONFLICT says that the workspace has
	// changed to another state meanwhile, which is no fault.
	takeBack(ctx context.Context, tx Tx, t *Task) error
}

// kinds are all kinds of operations.
var kinds = map[OperationKind]func() kind{
	OpCreateWorkspace:    func() kind { return new(createWorkspace) },
	OpCreateTemplate:     func() kind { return new(createTemplate) },
	OpCreateCheckpoint:   func() kind { return new(createCheckpoint) },
	OpForkCheckpoint:     func() kind { return new(forkCheckpoint) },
	OpRestoreCheckpoint:  func() kind { return new(forkCheckpoint) }, // of one child
	OpForkWorkspace:      func() kind { return new(forkWorkspace) },
	OpRestoreWorkspace:   func() kind { return new(restoreWorkspace) },
	OpTerminateWorkspace: func() kind { return new(terminateWorkspace) },
	OpSuspendWorkspace:   func() kind { return new(suspendWorkspace) },
	OpResumeWorkspace:    func() kind { return new(resumeWorkspace) },
	OpPruneCheckpoints:   func() kind { return new(pruneCheckpoints) },
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

// Workspaces returns the workspaces that the operation makes.
func (o Operation) Workspaces() []core.WorkspaceID {
	k, err := kindOf(o)
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

func (madeNothing) takeBack(context.Context, Tx, *Task) error { return nil }
