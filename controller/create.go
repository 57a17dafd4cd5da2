package controller

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/forkcall"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/core"
)

// DefaultImage is the image of a workspace whose request names none.
const DefaultImage = "base"

// CreateRequest asks for a workspace.
type CreateRequest struct {
	Name       string // empty: made up
	Image      string // name or digest; empty: DefaultImage
	Resources  core.Resources
	Shaped     bool              // the request names some of the resources
	Egress     core.EgressPolicy // empty: deny-all
	Allow      []string          // in the only form of its entries
	Env        map[string]string
	Labels     map[string]string
	TTL        time.Duration // 0: none
	IdlePolicy IdlePolicy

	admitted steps.Note // runs in the transaction that begins the operation; nil: nothing does
}

// createWorkspace is the kind create_workspace: it finds or makes the template of the image, and forks it.
type createWorkspace struct {
	forkInput

	Built bool `json:"built,omitempty"` // from an image of the project, which has a checkpoint
}

// CreateWorkspace makes a workspace from an image, as a fork of the image's template. If there is no template, it is made first.
func (c *Controller) CreateWorkspace(ctx context.Context, project core.ProjectID, req CreateRequest, wait time.Duration) (Answer, error) {
	if req.Image != "" {
		image, err := c.Builds.Image(ctx, project, req.Image)
		if err == nil {
			return c.fromProject(ctx, project, image, req, wait)
		}
		if core.CodeOf(err) != core.CodeImageNotFound {
			return Answer{}, err
		}
	}
	t, err := c.beginCreate(ctx, project, req, wait)
	if err != nil {
		return Answer{}, err
	}
	return t.Await(ctx, wait)
}

// beginCreate begins a workspace from an image of the runners.
func (c *Controller) beginCreate(ctx context.Context, project core.ProjectID, req CreateRequest, wait time.Duration) (*task, error) {
	if req.Image == "" {
		req.Image = DefaultImage
	}
	if req.Egress == "" {
		req.Egress = core.EgressDenyAll
	}
	if err := req.Resources.Validate(); err != nil {
		return nil, err
	}
	if err := grants.CheckMode(req.Egress, req.Allow); err != nil {
		return nil, err
	}
	image, err := c.fleet.FindImage(ctx, req.Image)
	if err != nil {
		return c.operations.Earlier(ctx, project, err)
	}
	op := Operation{ProjectID: project, Kind: OpCreateWorkspace, Step: "template"}
	admit := func(ctx context.Context, tx Tx, op *Operation, attempt int) (kind, error) {
		runner, err := c.place(ctx, tx, placement.Request{Count: 1, Resources: req.Resources, Image: image.Digest})
		if err != nil {
			return nil, err
		}
		like := Workspace{
			State: core.WorkspaceCreating, Image: ImageRef{Name: image.Name, Digest: image.Digest}, Resources: req.Resources,
			Egress: req.Egress, Rules: grants.Rules{Allow: req.Allow}, Env: req.Env, Labels: req.Labels, IdlePolicy: req.IdlePolicy,
		}
		template, err := tx.LiveTemplate(ctx, runner, image.Digest, req.Resources, false)
		if err == nil {
			err = findSources(ctx, tx, &template)
		}
		switch {
		case err == nil && template.State.Forkable():
			like.State, like.Parent, op.Step = core.WorkspaceRestoring, template.ID, "fork"
		case err != nil && core.CategoryOf(err) != core.NotFound:
			return nil, err
		}
		list, err := c.insertWorkspaces(ctx, tx, insertion{project: project, runners: []Runner{runner}, names: []string{req.Name}, like: like, attempt: attempt, ttl: req.TTL})
		if err != nil {
			return nil, err
		}
		op.WorkspaceID = list[0].ID
		if req.admitted != nil {
			if err := req.admitted(ctx, tx, steps.Begun{Operation: op.ID, Workspace: list[0].ID}); err != nil {
				return nil, err
			}
		}
		k := &createWorkspace{forkInput: forkInput{Children: childInputs(list), plan: &forkcall.Plan{Children: list}}}
		if op.Step == "fork" {
			k.plan.Source, k.Source, op.CheckpointID = template, template.ID, template.ID
		}
		return k, nil
	}
	return c.operations.Queue(ctx, project, wait, func(ctx context.Context) (*task, error) { return c.begin(ctx, op, admit) })
}

func (k *createWorkspace) work(ctx context.Context, c *Controller, t *task) error {
	plan, err := k.load(ctx, c, t)
	if err != nil {
		return err
	}
	if k.Built {
		return c.runFork(ctx, t, plan, forkOptions{one: true})
	}
	if parent := plan.Children[0].Parent; t.Op().Step == "fork" && plan.Source.ID == "" && parent != "" {
		err := t.Load(ctx, func(tx Tx) error {
			var err error
			plan.Source, err = c.source(ctx, tx, parent)
			return err
		})
		if err != nil {
			return err
		}
	}
	for attempt := 0; ; attempt++ {
		if t.Op().Step != "fork" {
			if err := c.fromTemplate(ctx, t, plan, attempt > 0); err != nil {
				return err
			}
			t.Lap("template")
		}
		got, err := c.forks.Fork(ctx, plan)
		t.Lap("fork")
		if err == nil && got[0].Problem != nil {
			err = got[0].Problem.Err()
		}
		if attempt == 0 && err != nil {
			again, dropErr := c.withoutTemplate(ctx, plan, err)
			if dropErr != nil {
				return dropErr
			}
			if again {
				t.Back("template")
				continue
			}
		}
		switch {
		case got == nil:
			return err
		case err != nil:
			return c.failFork(ctx, t, plan, got, forkOptions{one: true})
		}
		return c.finishFork(ctx, t, plan, got, forkOptions{one: true})
	}
}

// withoutTemplate reports whether a workspace that could not be made from the plan's template should be made from another one.
func (c *Controller) withoutTemplate(ctx context.Context, plan *forkcall.Plan, problem error) (bool, error) {
	template := plan.Source
	elsewhere := template.RunnerID != plan.Children[0].Sandbox.RunnerID
	switch core.CodeOf(problem) {
	case core.CodeIncompatibleHost: // the runner was restarted with another VMM after the template was chosen: the template is valid, but not on this runner
		return true, nil
	case core.CodeCheckpointNotFound, core.CodeCheckpointCorrupt:
		if elsewhere {
			break
		}
		// The runner has lost a template that is still in the rows: its data directory was made again.
		c.log.WarnContext(ctx, "template given up", "checkpoint_id", template.ID, "runner_id", template.RunnerID, "err", problem)
		return true, c.store.InTx(ctx, System(), func(tx Tx) error { return tx.DropTemplate(ctx, template.ID) })
	case core.CodeCheckpointIncomplete, core.CodeManifestInvalid, core.CodeStoreUnavailable, core.CodeStoreAuth:
	default:
		return false, nil
	}
	// If the template cannot be fetched, the image can still be booted.
	if elsewhere {
		c.log.WarnContext(ctx, "template could not be fetched by another runner", "checkpoint_id", template.ID, "runner_id", plan.Children[0].Sandbox.RunnerID, "err", problem)
	}
	return elsewhere, nil
}

// fromTemplate gives the workspace the template that it is forked from. A local template is one of its own runner.
func (c *Controller) fromTemplate(ctx context.Context, t *task, plan *forkcall.Plan, local bool) error {
	w := plan.Children[0]
	template, err := c.template(ctx, w, local)
	if err != nil {
		return err
	}
	return t.Load(ctx, func(tx Tx) error { // to write it twice changes nothing
		sandbox := w.Sandbox
		moved, err := tx.ForkWorkspaceFrom(ctx, w.ID, template)
		if err != nil {
			return err
		}
		moved.Sandbox = sandbox
		plan.Children[0], plan.Source = moved, template
		return t.Step(ctx, tx, "fork")
	})
}
