package controller

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/grants"
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
	Rest         Rest
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

// forkPlan has what a fork needs from the rows.
type forkPlan struct {
	children []Workspace // in the requested order, each with its sandbox and the runner of the sandbox
	source   Checkpoint
	loaded   bool // the plan is from rows: children may have been grown before, with other rules

	// mu guards given.
	mu    sync.Mutex
	given map[core.WorkspaceID]grants.Given // what runners were told
}

// sent is what a child's runner is known to have of its rules and grants after it has grown the child.
func (p *forkPlan) sent(child Workspace) grants.Given {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.loaded {
		return grants.Given{}
	}
	return p.given[child.ID]
}

func (p *forkPlan) tell(child Workspace, given grants.Given) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.given == nil {
		p.given = map[core.WorkspaceID]grants.Given{}
	}
	p.given[child.ID] = given
}

// ForkCheckpoint grows workspaces from a checkpoint.
func (c *Controller) ForkCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID, req ForkRequest, wait time.Duration) (Answer, error) {
	return c.fork(ctx, project, OpForkCheckpoint, id, req, wait)
}

// RestoreCheckpoint grows one workspace, with a name, from a checkpoint.
func (c *Controller) RestoreCheckpoint(ctx context.Context, project core.ProjectID, id core.CheckpointID, req ForkRequest, wait time.Duration) (Answer, error) {
	req.Count = 1
	return c.fork(ctx, project, OpRestoreCheckpoint, id, req, wait)
}

func (c *Controller) fork(ctx context.Context, project core.ProjectID, kind OperationKind, id core.CheckpointID, req ForkRequest, wait time.Duration) (Answer, error) {
	names, err := req.names()
	if err != nil {
		return Answer{}, err
	}
	op := Operation{ProjectID: project, Kind: kind, Step: "fork", CheckpointID: id}
	admit := func(ctx context.Context, tx Tx, _ *Operation, in *opInput, attempt int) (any, error) {
		tx.HoldCheckpoint(id)
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
		children, err := c.plant(ctx, tx, planting{project: project, runners: runners, names: names, source: &source, attempt: attempt, ttl: req.TTL, like: like})
		if err != nil {
			return nil, err
		}
		if err := inherit(ctx, tx, source, req.Grants, children); err != nil {
			return nil, err
		}
		in.Source, in.AllOrNothing, in.Children = id, req.AllOrNothing, childInputs(children)
		return &forkPlan{children: children, source: source}, nil
	}
	t, err := c.admit(ctx, project, wait, func(ctx context.Context) (*Task, error) { return c.begin(ctx, InProject(project), op, admit) })
	if err != nil {
		return Answer{}, err
	}
	return t.await(ctx, wait)
}

func notForkable(cp Checkpoint) error {
	return core.Errorf(core.FailedPrecondition, core.CodeCheckpointNotReady, "checkpoint %s is %s and cannot be forked", cp.ID, cp.State)
}

// childOf has the fields that all children of a checkpoint have in common.
func childOf(source Checkpoint, req ForkRequest) (Workspace, error) {
	w := Workspace{
		State: core.WorkspaceRestoring, Image: source.Image, Resources: source.Resources, Egress: req.Egress, Env: req.Env, Labels: req.Labels,
		Parent: source.ID, Rest: req.Rest,
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

func childInputs(children []Workspace) []childInput {
	list := make([]childInput, len(children))
	for i, w := range children {
		list[i] = childInput{Workspace: w.ID, Sandbox: w.Sandbox.ID}
	}
	return list
}

// planting says which workspaces to insert.
type planting struct {
	project core.ProjectID
	runners []Runner    // one for each name
	names   []string    // empty ones are made up
	like    Workspace   // what they have in common
	source  *Checkpoint // the checkpoint that they grow from; nil: they are made from an image and begin a tree
	attempt int         // 0: hostnames are the names of the workspaces
	ttl     time.Duration
}

// plant inserts workspaces with their sandboxes, in the order of the names.
func (c *Controller) plant(ctx context.Context, tx Tx, p planting) ([]Workspace, error) {
	if err := c.mayReachAll(ctx, tx, p.project, p.like.Egress); err != nil {
		return nil, err
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
	addresses, err := addressesFor(ctx, tx, tree, p.runners, captured)
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
		identity, err := newIdentity(hostnameOf(w.Name, p.attempt == 0), addresses[i])
		if err != nil {
			return nil, err
		}
		w.Sandbox = Sandbox{
			ID: core.NewID[core.SandboxID](), ProjectID: p.project, WorkspaceID: w.ID, Epoch: 1, RunnerID: p.runners[i].Info.RunnerID,
			Endpoint: p.runners[i].Endpoint, Resources: w.Resources, Identity: identity,
			EgressKey: p.runners[i].Info.EgressKey, EgressURL: p.runners[i].Info.EgressURL, Tree: tree,
		}
		list[i], sandboxes[i] = w, w.Sandbox
	}
	inserted, err := tx.InsertWorkspaces(ctx, list, p.ttl)
	if err != nil {
		return nil, err
	}
	tx.InsertSandboxes(sandboxes)
	if err := c.occupy(ctx, tx, p.runners...); err != nil {
		return nil, err
	}
	for i := range inserted { // both are sorted by id
		inserted[i].Sandbox = sandboxes[i]
	}
	return inserted, nil
}

// loadFork makes the plan of a resumed fork from its rows.
func (c *Controller) loadFork(ctx context.Context, t *Task) (*forkPlan, error) {
	if plan, ok := t.plan.(*forkPlan); ok {
		return plan, nil
	}
	plan := &forkPlan{loaded: true}
	err := t.load(ctx, func(tx Tx) error {
		ids, sandboxIDs := make([]core.WorkspaceID, len(t.in.Children)), make([]core.SandboxID, len(t.in.Children))
		for i, child := range t.in.Children {
			ids[i], sandboxIDs[i] = child.Workspace, child.Sandbox
		}
		var err error
		if plan.children, err = tx.WorkspacesByID(ctx, ids); err != nil {
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
		for i := range plan.children {
			plan.children[i].Sandbox = byWorkspace[plan.children[i].ID]
		}
		source := t.in.Source
		if source == "" {
			source = t.in.Capture
		}
		if source != "" { // a workspace that is being created has none yet
			plan.source, err = c.source(ctx, tx, source)
		}
		return err
	})
	return plan, err
}

// workFork is the work of fork_checkpoint and restore_checkpoint.
func (c *Controller) workFork(ctx context.Context, t *Task) error {
	plan, err := c.loadFork(ctx, t)
	if err != nil {
		return err
	}
	return c.grow(ctx, t, plan)
}

// grow asks the runner for the children and ends the operation.
func (c *Controller) grow(ctx context.Context, t *Task, plan *forkPlan) error {
	got, err := c.callFork(ctx, plan)
	t.watch.Lap("fork")
	if err != nil {
		return c.abandon(ctx, t, err)
	}
	return c.endGrown(ctx, t, plan, got)
}

// endGrown ends the operation according to the runner's answer.
func (c *Controller) endGrown(ctx context.Context, t *Task, plan *forkPlan, got []runnerapi.ChildResult) error {
	ready := 0
	for i := range got {
		if got[i].Problem == nil {
			ready++
		}
	}
	if ready == 0 || t.in.AllOrNothing && ready < len(got) {
		return c.failGrown(ctx, t, plan, got)
	}
	return c.finishGrown(ctx, t, plan, got)
}

// finishGrown writes the outcome of the children, in one transaction with a few statements, whatever their number.
func (c *Controller) finishGrown(ctx context.Context, t *Task, plan *forkPlan, got []runnerapi.ChildResult) error {
	err := t.finish(ctx, func(ctx context.Context, tx Tx) (Outcome, Result, error) {
		var ready []ReadyWorkspace
		var failed []EndedWorkspace
		for i, w := range plan.children {
			if p := got[i].Problem; p != nil {
				failed = append(failed, EndedWorkspace{ID: w.ID, To: core.WorkspaceFailed, Failure: &Failure{Code: p.Code, Message: p.Message}})
			} else {
				ready = append(ready, ReadyWorkspace{ID: w.ID, Epoch: w.Sandbox.Epoch, Sandbox: w.Sandbox.ID, Given: plan.sent(w)})
			}
		}
		moved, err := tx.ReadyWorkspaces(ctx, ready)
		if err != nil {
			return Outcome{}, Result{}, err
		}
		failed = append(failed, unready(ready, moved)...)
		if len(failed) > 0 {
			if _, err := tx.EndWorkspaces(ctx, failed); err != nil {
				return Outcome{}, Result{}, err
			}
		}
		tx.InsertReseals(reseals(t, plan, got))
		now, err := unmoved(ctx, tx, plan, moved)
		if err != nil {
			return Outcome{}, Result{}, err
		}
		out, result := gather(plan, got, moved, now)
		if t.op.Kind == OpCreateWorkspace || t.op.Kind == OpRestoreCheckpoint {
			if p := result.Children[0].Problem; p != nil {
				return Outcome{}, Result{}, p
			}
			out.Workspace, result.Workspace, result.Reseal = plan.children[0].ID, result.Children[0].Workspace, result.Children[0].Reseal
		}
		return out, result, nil
	})
	if err != nil {
		return err
	}
	var gone []core.SandboxID // of workspaces that were terminated while they were grown, and what a runner may have grown that could not say so
	for i, child := range t.result.Children {
		if child.Workspace != nil && child.Workspace.RulesPending() {
			c.grants.Wake()
		}
		if p := got[i].Problem; child.Problem != nil && (p == nil || p.Code == core.CodeRunnerUnreachable || got[i].Sandbox != nil) {
			gone = append(gone, plan.children[i].Sandbox.ID)
		}
	}
	c.drop(ctx, gone...)
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
func unmoved(ctx context.Context, tx Tx, plan *forkPlan, moved []Workspace) (map[core.WorkspaceID]Workspace, error) {
	if len(moved) == len(plan.children) {
		return nil, nil
	}
	ids := make([]core.WorkspaceID, len(plan.children))
	for i, w := range plan.children {
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
func gather(plan *forkPlan, got []runnerapi.ChildResult, moved []Workspace, now map[core.WorkspaceID]Workspace) (Outcome, Result) {
	byID := make(map[core.WorkspaceID]*Workspace, len(moved))
	for i := range moved {
		byID[moved[i].ID] = &moved[i]
	}
	var out Outcome
	var result Result
	for i, w := range plan.children {
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
	out.Checkpoint = plan.source.ID
	if plan.source.ID != "" {
		source := plan.source
		result.Checkpoint = &source
	}
	return out, result
}

func reseals(t *Task, plan *forkPlan, got []runnerapi.ChildResult) []ResealRecord {
	var list []ResealRecord
	for i, w := range plan.children {
		if got[i].Reseal == nil {
			continue
		}
		list = append(list, ResealRecord{
			ProjectID: w.ProjectID, WorkspaceID: w.ID, SandboxID: w.Sandbox.ID, OperationID: t.op.ID, CheckpointID: plan.source.ID, Report: *got[i].Reseal,
			Epoch: w.Sandbox.Epoch, RunnerID: w.Sandbox.RunnerID, Attestation: got[i].Attestation,
		})
	}
	return list
}

// failGrown ends a fork of which no child, or under all_or_nothing not every child, became ready.
func (c *Controller) failGrown(ctx context.Context, t *Task, plan *forkPlan, got []runnerapi.ChildResult) error {
	var first *runnerapi.Problem
	var grown []core.SandboxID
	failed := 0
	for i := range got {
		if p := got[i].Problem; p != nil {
			failed++
			if first == nil {
				first = p
			}
		}
		if got[i].Sandbox != nil {
			grown = append(grown, plan.children[i].Sandbox.ID)
		}
	}
	problem := first.Err()
	if t.op.Kind == OpForkCheckpoint || t.op.Kind == OpForkWorkspace {
		problem = core.Errorf(core.Unavailable, core.CodeForkFailed, "%d of %d children failed; the first: %s (%s)", failed, len(got), first.Message, first.Code)
	}
	err := t.fail(ctx, problem, func(ctx context.Context, tx Tx) (Outcome, Result, error) {
		ended := make([]EndedWorkspace, len(plan.children))
		for i, w := range plan.children {
			why := failureOf(problem)
			if p := got[i].Problem; p != nil {
				why = &Failure{Code: p.Code, Message: p.Message}
			}
			ended[i] = EndedWorkspace{ID: w.ID, To: core.WorkspaceFailed, Failure: why}
		}
		if _, err := tx.EndWorkspaces(ctx, ended); err != nil {
			return Outcome{}, Result{}, err
		}
		tx.InsertReseals(reseals(t, plan, got))
		return Outcome{}, Result{}, nil
	})
	if err == nil {
		c.drop(ctx, grown...)
	}
	return err
}
