package controller

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// DefaultWait is how long a request waits for its operation by default.
const DefaultWait = 60 * time.Second

// The types of package operations, with the transactions and the results of this package.
type (
	Operation       = operations.Operation
	OperationKind   = operations.Kind
	OperationError  = operations.Error
	OperationFilter = operations.Filter
	Answer          = operations.Answer[Result]

	task   = operations.Task[Tx, Result]
	engine = operations.Engine[Tx, Result]
)

// The errors of a Store that the engine of operations branches on.
var (
	ErrLeaseLost     = operations.ErrLeaseLost
	ErrIdentityTaken = operations.ErrIdentityTaken
)

// Outcome is the result of an operation, with ids instead of objects, as its row keeps it.
type Outcome struct {
	Workspace  core.WorkspaceID  `json:"workspace_id,omitempty"`
	Checkpoint core.CheckpointID `json:"checkpoint_id,omitempty"`
	Children   []ChildOutcome    `json:"children,omitempty"`
	Prune      *PruneResult      `json:"prune,omitempty"`
	Image      *builds.Image     `json:"image,omitempty"`
}

// ChildOutcome is one child of a fork, in the order asked.
type ChildOutcome struct {
	Workspace core.WorkspaceID   `json:"workspace_id"`
	Timings   []core.Timing      `json:"timings,omitempty"`
	Problem   *runnerapi.Problem `json:"problem,omitempty"`
}

// Result is an Outcome with the objects.
type Result struct {
	Workspace  *Workspace
	Checkpoint *Checkpoint
	Reseal     *core.ResealReport // of Workspace
	Children   []Child
	Prune      *PruneResult
	Image      *builds.Image  // that was built
	Steps      []steps.Result // of the actions that have ended, by their order or their index
}

// Child is one child of a fork: either Workspace or Problem is set.
type Child struct {
	Workspace *Workspace
	Reseal    *core.ResealReport
	Timings   []core.Timing
	Problem   *core.Error
}

// newEngine makes the engine that runs the operations of this controller.
func newEngine(c *Controller) *engine {
	return operations.New(operations.Config[Tx, Result]{
		Lease: c.cfg.OperationLease, Clock: c.cfg.Clock, Interval: c.cfg.LoopInterval,
		QueueWait: c.cfg.AdmissionWait, QueueMost: c.cfg.AdmissionQueue,
		Read: func(op Operation) (operations.Work[Tx, Result], error) {
			k, err := kindOf(op)
			return work{c, k}, err
		},
		Result: c.result, Whole: whole, Cancelable: func(k OperationKind) bool { return cancelable[k] },
		Interruptible: func(op Operation) bool { return op.Kind != OpForkWorkspace || op.Step == "fork" },
		Ended: func(op Operation, result Result) {
			c.ShowQueued(result.Checkpoint)
			c.countEnded(op, result)
			c.Steps.Ended(op.ID)
		},
		Hint: c.Events.Hint, Log: c.log,
	}, c.store)
}

// begin begins an operation; see operations.Engine.Begin.
func (c *Controller) begin(ctx context.Context, op Operation, admit func(ctx context.Context, tx Tx, op *Operation, attempt int) (kind, error)) (*task, error) {
	return c.operations.Begin(ctx, op, func(ctx context.Context, tx Tx, op *Operation, attempt int) (operations.Work[Tx, Result], error) {
		k, err := admit(ctx, tx, op, attempt)
		return work{c, k}, err
	})
}

// queue begins an operation when there is room for it, and waits for its end.
func (c *Controller) queue(ctx context.Context, project core.ProjectID, wait time.Duration, try func(ctx context.Context) (*task, error)) (Answer, error) {
	t, err := c.operations.Queue(ctx, project, wait, try)
	if err != nil {
		return Answer{}, err
	}
	return t.Await(ctx, wait)
}

// Operation returns an operation of a project, waiting up to wait for its end. The result is there when it succeeded.
func (c *Controller) Operation(ctx context.Context, project core.ProjectID, id core.OperationID, wait time.Duration) (Answer, error) {
	return c.operations.Operation(ctx, project, id, wait)
}

// Waiting is how many requests wait for room.
func (c *Controller) Waiting() int { return c.operations.Waiting() }

// whole refuses an answer whose object no longer exists.
func whole(a Answer) error {
	if a.Operation.Kind == OpCreateCheckpoint && a.Result.Checkpoint == nil {
		return core.Errorf(core.NotFound, core.CodeCheckpointNotFound, "the checkpoint that the first request made was deleted since")
	}
	return nil
}

// result loads the objects of an operation that succeeded, as they are now.
func (c *Controller) result(ctx context.Context, tx Tx, op Operation) (Result, error) {
	var out Outcome
	if err := json.Unmarshal(op.Result, &out); err != nil {
		return Result{}, fmt.Errorf("read outcome of operation %s: %w", op.ID, err)
	}
	ids := make([]core.WorkspaceID, 0, len(out.Children)+1)
	for _, child := range out.Children {
		ids = append(ids, child.Workspace)
	}
	if out.Workspace != "" {
		ids = append(ids, out.Workspace)
	}
	list, err := tx.WorkspacesByID(ctx, ids)
	if err != nil {
		return Result{}, err
	}
	reseals, err := tx.ResealsByOperation(ctx, op.ID, ids)
	if err != nil {
		return Result{}, err
	}
	workspaces, reports := map[core.WorkspaceID]*Workspace{}, map[core.WorkspaceID]*core.ResealReport{}
	for i := range list {
		workspaces[list[i].ID] = &list[i]
	}
	for i := range reseals {
		reports[reseals[i].WorkspaceID] = &reseals[i].Report
	}
	result := Result{Prune: out.Prune, Image: out.Image, Workspace: workspaces[out.Workspace], Reseal: reports[out.Workspace]}
	for _, child := range out.Children {
		next := Child{Reseal: reports[child.Workspace], Timings: child.Timings}
		if child.Problem != nil {
			next.Problem = core.Errorf(child.Problem.Category, child.Problem.Code, "%s", child.Problem.Message)
		} else {
			next.Workspace = workspaces[child.Workspace]
		}
		result.Children = append(result.Children, next)
	}
	if op.Kind == OpStepCheckpoint || op.Kind == OpStepWorkspace {
		result.Steps, err = tx.StepResults(ctx, op.ID, nil)
	}
	if out.Checkpoint == "" {
		return result, err
	}
	cp, err := tx.Checkpoint(ctx, out.Checkpoint)
	switch {
	case err == nil:
		c.ShowQueued(&cp)
		result.Checkpoint = &cp
	case core.CodeOf(err) == core.CodeCheckpointNotFound: // deleted since
		err = nil
	}
	return result, err
}
