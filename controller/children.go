package controller

import (
	"context"
	"slices"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/fleet"
	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/identity"
	"github.com/coppice-dev/coppice/controller/settings"
	"github.com/coppice-dev/coppice/core"
)

// forkInput is the input of an operation that forks or restores a checkpoint.
type forkInput struct {
	Children     []childInput      `json:"children,omitempty"` // the workspaces
	AllOrNothing bool              `json:"all_or_nothing,omitempty"`
	Source       core.CheckpointID `json:"source,omitempty"` // empty: a template that is not known yet

	plan *forkcall.Plan
}

func (in *forkInput) made() made { return made{children: in.Children} }

// takeBack has nothing to do: the operation acts on no workspace that was there before.
func (in *forkInput) takeBack(context.Context, Tx, Operation) error { return nil }

func (in *forkInput) load(ctx context.Context, c *Controller, t *task) (*forkcall.Plan, error) {
	if in.plan != nil {
		return in.plan, nil
	}
	return c.loadChildren(ctx, t, in.Children, in.Source)
}

func childInputs(children []Workspace) []childInput {
	list := make([]childInput, len(children))
	for i, w := range children {
		list[i] = childInput{Workspace: w.ID, Sandbox: w.Sandbox.ID}
	}
	return list
}

// insertion says which workspaces to insert.
type insertion struct {
	project core.ProjectID
	runners []Runner    // one for each name
	names   []string    // empty ones are made up
	like    Workspace   // the fields that they have in common
	source  *Checkpoint // the checkpoint that they are forked from; nil: they are made from an image and begin a tree
	attempt int         // 0: hostnames are the names of the workspaces
	ttl     time.Duration
}

// insertWorkspaces inserts workspaces with their sandboxes, in the order of the names.
func (c *Controller) insertWorkspaces(ctx context.Context, tx Tx, p insertion) ([]Workspace, error) {
	if err := c.mayReachAll(ctx, tx, p.project, p.like.Egress); err != nil {
		return nil, err
	}
	if p.like.IdlePolicy.OnTTL == IdleSuspend {
		if err := settings.MaySuspendAtTTL(ctx); err != nil {
			return nil, err
		}
	}
	ids := make([]core.WorkspaceID, len(p.names))
	for i := range ids {
		ids[i] = core.NewID[core.WorkspaceID]()
	}
	slices.Sort(ids) // lists sort by id: children come in their order
	tree, captured := string(ids[0]), ""
	if p.source != nil {
		tree, captured = p.source.Tree, p.source.Address
	}
	addresses, err := identity.Addresses(ctx, tx, tree, p.runners, captured)
	if err != nil {
		return nil, err
	}
	list, sandboxes := make([]Workspace, len(p.names)), make([]Sandbox, len(p.names))
	for i, name := range p.names {
		w := p.like
		w.ID, w.ProjectID, w.Name = ids[i], p.project, name
		if name == "" {
			w.Name = "ws-" + core.Short(w.ID)
		}
		id, err := identity.New(identity.Hostname(w.Name, p.attempt == 0), addresses[i])
		if err != nil {
			return nil, err
		}
		w.Sandbox = Sandbox{
			ID: core.NewID[core.SandboxID](), ProjectID: p.project, WorkspaceID: w.ID, Epoch: 1, RunnerID: p.runners[i].Info.RunnerID,
			Endpoint: p.runners[i].Endpoint, Resources: w.Resources, Identity: id,
			EgressKey: p.runners[i].Info.EgressKey, EgressURL: p.runners[i].Info.EgressURL, Tree: tree,
		}
		list[i], sandboxes[i] = w, w.Sandbox
	}
	inserted, err := tx.InsertWorkspaces(ctx, list, p.ttl)
	if err != nil {
		return nil, err
	}
	tx.InsertSandboxes(sandboxes)
	if err := fleet.Occupy(ctx, tx, p.runners...); err != nil {
		return nil, err
	}
	for i := range inserted { // both are sorted by id
		inserted[i].Sandbox = sandboxes[i]
	}
	return inserted, nil
}

// loadChildren makes the plan of a resumed fork from its rows. source is empty for a workspace whose template is not known yet.
func (c *Controller) loadChildren(ctx context.Context, t *task, children []childInput, source core.CheckpointID) (*forkcall.Plan, error) {
	plan := &forkcall.Plan{Loaded: true}
	err := t.Load(ctx, func(tx Tx) error {
		ids, sandboxIDs := make([]core.WorkspaceID, len(children)), make([]core.SandboxID, len(children))
		for i, child := range children {
			ids[i], sandboxIDs[i] = child.Workspace, child.Sandbox
		}
		var err error
		if plan.Children, err = tx.WorkspacesByID(ctx, ids); err != nil {
			return err
		}
		sandboxes, err := tx.Sandboxes(ctx, sandboxIDs)
		if err != nil {
			return err
		}
		byWorkspace := map[core.WorkspaceID]Sandbox{}
		for _, s := range sandboxes {
			byWorkspace[s.WorkspaceID] = s
		}
		for i := range plan.Children {
			plan.Children[i].Sandbox = byWorkspace[plan.Children[i].ID]
		}
		if source != "" {
			plan.Source, err = c.source(ctx, tx, source)
		}
		return err
	})
	return plan, err
}

// forkOptions says when a fork has succeeded, and what its result is.
type forkOptions struct {
	one          bool // the operation is for one workspace, which is its result; the failure of the workspace is that of the operation
	allOrNothing bool // it has failed when one child has
}

// runFork asks the runner for the children and ends the operation.
func (c *Controller) runFork(ctx context.Context, t *task, plan *forkcall.Plan, of forkOptions) error {
	got, err := c.forks.Fork(ctx, plan)
	t.Lap("fork")
	if err != nil {
		return t.Abandon(ctx, err)
	}
	return c.endFork(ctx, t, plan, got, of)
}

// endFork ends the operation according to the runner's answer.
func (c *Controller) endFork(ctx context.Context, t *task, plan *forkcall.Plan, got []forkcall.Child, of forkOptions) error {
	ready := 0
	for i := range got {
		if got[i].Problem == nil {
			ready++
		}
	}
	if ready == 0 || of.allOrNothing && ready < len(got) {
		return c.failFork(ctx, t, plan, got, of)
	}
	return c.finishFork(ctx, t, plan, got, of)
}

// finishFork writes the outcome of the children, in one transaction with a few statements, whatever their number.
func (c *Controller) finishFork(ctx context.Context, t *task, plan *forkcall.Plan, got []forkcall.Child, of forkOptions) error {
	err := t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		var ready []ReadyWorkspace
		var failed []EndedWorkspace
		for i, w := range plan.Children {
			if p := got[i].Problem; p != nil {
				failed = append(failed, EndedWorkspace{ID: w.ID, To: core.WorkspaceFailed, Failure: &Failure{Code: p.Code, Message: p.Message}})
			} else {
				ready = append(ready, ReadyWorkspace{ID: w.ID, Epoch: w.Sandbox.Epoch, Sandbox: w.Sandbox.ID, Given: got[i].Given})
			}
		}
		moved, err := tx.ReadyWorkspaces(ctx, ready)
		if err != nil {
			return nil, Result{}, err
		}
		failed = append(failed, unready(ready, moved)...)
		if len(failed) > 0 {
			if _, err := tx.EndWorkspaces(ctx, failed); err != nil {
				return nil, Result{}, err
			}
		}
		tx.InsertReseals(reseals(t, plan, got))
		now, err := unmoved(ctx, tx, plan, moved)
		if err != nil {
			return nil, Result{}, err
		}
		out, result := gather(plan, got, moved, now)
		if of.one {
			if p := result.Children[0].Problem; p != nil {
				return nil, Result{}, p
			}
			out.Workspace, result.Workspace, result.Reseal = plan.Children[0].ID, result.Children[0].Workspace, result.Children[0].Reseal
		}
		return out, result, nil
	})
	if err != nil {
		return err
	}
	var gone []core.SandboxID // of workspaces that were terminated while they were forked; and those that a runner may have made without being able to report it
	for i, child := range t.Result().Children {
		if child.Workspace != nil && child.Workspace.RulesPending() {
			c.grants.Wake()
		}
		if p := got[i].Problem; child.Problem != nil && (p == nil || p.Code == core.CodeRunnerUnreachable || got[i].Sandbox != nil) {
			gone = append(gone, plan.Children[i].Sandbox.ID)
		}
	}
	c.fleet.Drop(ctx, gone...)
	return nil
}

// unready lists the workspaces that did not become ready, so that they fail. Only a workspace that
// still waits for its sandbox can fail: its runner was given up. The others were terminated
// meanwhile.
func unready(ready []ReadyWorkspace, moved []Workspace) []EndedWorkspace {
	done := make(map[core.WorkspaceID]bool, len(moved))
	for _, w := range moved {
		done[w.ID] = true
	}
	var list []EndedWorkspace
	for _, r := range ready {
		if !done[r.ID] {
			list = append(list, EndedWorkspace{ID: r.ID, To: core.WorkspaceFailed, Failure: &Failure{Code: core.CodeRunnerLost, Message: SilentRunner}})
		}
	}
	return list
}

// unmoved reads the rows of the children that did not become ready.
func unmoved(ctx context.Context, tx Tx, plan *forkcall.Plan, moved []Workspace) (map[core.WorkspaceID]Workspace, error) {
	if len(moved) == len(plan.Children) {
		return nil, nil
	}
	ids := make([]core.WorkspaceID, len(plan.Children))
	for i, w := range plan.Children {
		ids[i] = w.ID
	}
	list, err := tx.WorkspacesByID(ctx, ids)
	now := make(map[core.WorkspaceID]Workspace, len(list))
	for _, w := range list {
		now[w.ID] = w
	}
	return now, err
}

// whyUnready finds in its row why a new workspace did not become ready. A client may repeat the request if the runner was lost.
func whyUnready(id core.WorkspaceID, now Workspace) *core.Error {
	if now.Failure != nil && now.Failure.Code == core.CodeRunnerLost {
		return core.Errorf(core.Unavailable, core.CodeRunnerLost, "the runner of workspace %s was given up while the workspace was being made; repeat the request", id)
	}
	return core.Errorf(core.Conflict, core.CodeStateConflict, "workspace %s was terminated while it was being made", id)
}

// gather puts the outcome together, in the requested order. A child that did not become ready was terminated meanwhile, or its runner
// was given up.
func gather(plan *forkcall.Plan, got []forkcall.Child, moved []Workspace, now map[core.WorkspaceID]Workspace) (Outcome, Result) {
	byID := make(map[core.WorkspaceID]*Workspace, len(moved))
	for i := range moved {
		byID[moved[i].ID] = &moved[i]
	}
	var out Outcome
	var result Result
	for i, w := range plan.Children {
		child := Child{Workspace: byID[w.ID], Reseal: got[i].Reseal, Timings: got[i].Timings}
		switch {
		case got[i].Problem != nil:
			child.Problem = core.Errorf(got[i].Problem.Category, got[i].Problem.Code, "%s", got[i].Problem.Message)
		case child.Workspace == nil:
			child.Problem = whyUnready(w.ID, now[w.ID])
		}
		o := ChildOutcome{Workspace: w.ID, Timings: got[i].Timings}
		if child.Problem != nil {
			child.Workspace = nil
			o.Problem = runnerapi.ProblemOf(child.Problem)
		}
		out.Children, result.Children = append(out.Children, o), append(result.Children, child)
	}
	out.Checkpoint = plan.Source.ID
	if plan.Source.ID != "" {
		source := plan.Source
		result.Checkpoint = &source
	}
	return out, result
}

func reseals(t *task, plan *forkcall.Plan, got []forkcall.Child) []ResealRecord {
	var list []ResealRecord
	for i, w := range plan.Children {
		if got[i].Reseal == nil {
			continue
		}
		list = append(list, ResealRecord{
			ProjectID: w.ProjectID, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID, OperationID: t.Op().ID, CheckpointID: plan.Source.ID, Report: *got[i].Reseal,
			Epoch: w.Sandbox.Epoch, RunnerID: w.Sandbox.RunnerID, Attestation: got[i].Attestation,
		})
	}
	return list
}

// failFork ends a fork that failed: no child became ready, or not every child did under all_or_nothing.
func (c *Controller) failFork(ctx context.Context, t *task, plan *forkcall.Plan, got []forkcall.Child, of forkOptions) error {
	var first *runnerapi.Problem
	var sandboxes []core.SandboxID
	failed := 0
	for i := range got {
		if p := got[i].Problem; p != nil {
			failed++
			if first == nil {
				first = p
			}
		}
		if got[i].Sandbox != nil {
			sandboxes = append(sandboxes, plan.Children[i].Sandbox.ID)
		}
	}
	problem := first.Err()
	if !of.one {
		problem = core.Errorf(core.Unavailable, core.CodeForkFailed, "%d of %d children failed; the first: %s (%s)", failed, len(got), first.Message, first.Code)
	}
	err := t.Fail(ctx, problem, func(ctx context.Context, tx Tx) error {
		ended := make([]EndedWorkspace, len(plan.Children))
		for i, w := range plan.Children {
			why := failureOf(problem)
			if p := got[i].Problem; p != nil {
				why = &Failure{Code: p.Code, Message: p.Message}
			}
			ended[i] = EndedWorkspace{ID: w.ID, To: core.WorkspaceFailed, Failure: why}
		}
		if _, err := tx.EndWorkspaces(ctx, ended); err != nil {
			return err
		}
		tx.InsertReseals(reseals(t, plan, got))
		return nil
	})
	if err == nil {
		c.fleet.Drop(ctx, sandboxes...)
	}
	return err
}
