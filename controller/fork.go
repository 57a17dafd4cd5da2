package controller

import (
	"context"
	"fmt"
	"time"

	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// MaxFork is how many children one fork may ask for.
const MaxFork = 256

// ForkRequest asks for children of a checkpoint, or of a workspace, which is then captured first.
type ForkRequest struct {
	Count        int
	Name         string // of the only child, or the start of "<name>-1" and up; empty: made up
	AllOrNothing bool
	Spread       bool              // evenly over the runners, instead of where the checkpoint is
	Egress       core.EgressPolicy // empty: as the captured workspace has it
	Allow        *[]string         // nil: likewise
	Env          map[string]string // nil: as the captured workspace has it
	Grants       grants.Choice     // the zero value: all that the captured workspace has now
	Labels       map[string]string
	TTL          time.Duration // 0: none
	IdlePolicy   IdlePolicy

	admitted steps.Note // runs in the transaction that begins a fork of one workspace; nil: nothing does
}

func (r ForkRequest) names() ([]string, error) {
	if r.Count < 1 || r.Count > MaxFork {
		return nil, core.Errorf(core.Invalid, core.CodeInvalidField, "count is %d; it must be between 1 and %d", r.Count, MaxFork)
	}
	names := make([]string, r.Count)
	for i := range names {
		switch {
		case r.Name == "":
		case r.Count == 1:
			names[i] = r.Name
		default:
			names[i] = fmt.Sprintf("%s-%d", r.Name, i+1)
		}
		if names[i] == "" {
			continue
		}
		if err := core.ValidateName("branch_name", names[i]); err != nil {
			return nil, err
		}
	}
	return names, nil
}

// forkCheckpoint is the kind fork_checkpoint: it forks workspaces from a checkpoint.
type forkCheckpoint struct{ forkInput }

// restoreCheckpoint is the kind restore_checkpoint: it restores one workspace from a checkpoint.
type restoreCheckpoint struct{ forkInput }

// ForkCheckpoint forks workspaces from a checkpoint.
func (c *Controller) ForkCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID, req ForkRequest, wait time.Duration) (Answer, error) {
	return c.fork(ctx, project, OpForkCheckpoint, asFork, id, req, wait)
}

func asFork(in forkInput) kind { return &forkCheckpoint{in} }

// RestoreCheckpoint restores one workspace, with a name, from a checkpoint.
func (c *Controller) RestoreCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID, req ForkRequest, wait time.Duration) (Answer, error) {
	req.Count = 1
	return c.fork(ctx, project, OpRestoreCheckpoint, func(in forkInput) kind { return &restoreCheckpoint{in} }, id, req, wait)
}

// fork forks or restores a checkpoint, and waits for the end.
func (c *Controller) fork(ctx context.Context, project core.ProjectID, of OperationKind, as func(forkInput) kind, id core.CheckpointID, req ForkRequest, wait time.Duration) (Answer, error) {
	t, err := c.beginFork(ctx, project, of, as, id, req, wait)
	if err != nil {
		return Answer{}, err
	}
	return t.Await(ctx, wait)
}

// beginFork begins an operation that forks or restores a checkpoint. as makes its kind.
func (c *Controller) beginFork(ctx context.Context, project core.ProjectID, of OperationKind, as func(forkInput) kind, id core.CheckpointID, req ForkRequest, wait time.Duration) (*task, error) {
	names, err := req.names()
	if err != nil {
		return nil, err
	}
	op := Operation{ProjectID: project, Kind: of, Step: "fork", CheckpointID: id}
	admit := func(ctx context.Context, tx Tx, op *Operation, attempt int) (kind, error) {
		tx.LockCheckpoint(id)
		tx.HoldRules(project)
		source, err := c.source(ctx, tx, id)
		if err != nil {
			return nil, err
		}
		if !source.State.Forkable() {
			return nil, notForkable(source)
		}
		like, err := childOf(source, req)
		if err != nil {
			return nil, err
		}
		runners, err := c.placeFrom(ctx, tx, source, req.Count, req.Spread)
		if err != nil {
			return nil, err
		}
		children, err := c.insertWorkspaces(ctx, tx, insertion{project: project, runners: runners, names: names, source: &source, attempt: attempt, ttl: req.TTL, like: like})
		if err != nil {
			return nil, err
		}
		if err := inherit(ctx, tx, source, req.Grants, children); err != nil {
			return nil, err
		}
		if err := inheritPreviews(ctx, tx, source, children); err != nil {
			return nil, err
		}
		if req.admitted != nil {
			if err := req.admitted(ctx, tx, steps.Begun{Operation: op.ID, Workspace: children[0].ID}); err != nil {
				return nil, err
			}
		}
		return as(forkInput{
			Children: childInputs(children), AllOrNothing: req.AllOrNothing, Source: id, plan: &forkcall.Plan{Children: children, Source: source},
		}), nil
	}
	return c.operations.Queue(ctx, project, wait, func(ctx context.Context) (*task, error) { return c.begin(ctx, op, admit) })
}

func notForkable(cp Checkpoint) error {
	return core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady, "checkpoint %s is %s and cannot be forked", cp.ID, cp.State)
}

// childOf has the fields that all children of a checkpoint have in common.
func childOf(source Checkpoint, req ForkRequest) (Workspace, error) {
	w := Workspace{
		State: core.WorkspaceRestoring, Image: source.Image, Resources: source.Resources, Egress: req.Egress, Env: req.Env, Labels: req.Labels,
		Parent: source.ID, IdlePolicy: req.IdlePolicy,
	}
	if w.Egress == "" {
		w.Egress = source.Egress
	}
	if w.Env == nil {
		w.Env = source.Env
	}
	switch {
	case req.Allow != nil:
		w.Rules.Allow = *req.Allow
	case w.Egress == core.EgressDenyAll:
		w.Rules.Allow = source.Allow
	}
	if err := grants.CheckMode(w.Egress, w.Rules.Allow); err != nil {
		return w, err
	}
	if parent := source.Origin(); parent != nil {
		return w, grants.CheckWithin(w.Egress, w.Rules.Allow, *parent)
	}
	return w, nil
}

func (k *forkCheckpoint) work(ctx context.Context, c *Controller, t *task) error {
	plan, err := k.load(ctx, c, t)
	if err != nil {
		return err
	}
	return c.runFork(ctx, t, plan, forkOptions{allOrNothing: k.AllOrNothing})
}

func (k *restoreCheckpoint) work(ctx context.Context, c *Controller, t *task) error {
	plan, err := k.load(ctx, c, t)
	if err != nil {
		return err
	}
	return c.runFork(ctx, t, plan, forkOptions{one: true})
}
