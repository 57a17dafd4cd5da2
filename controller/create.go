package controller

import (
	"context"
	"errors"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// DefaultImage is what a workspace is made from when its request does not say.
const DefaultImage = "base"

// CreateRequest asks for a workspace.
type CreateRequest struct {
	Name      string // empty: made up
	Image     string // name or digest; empty: DefaultImage
	Resources core.Resources
	Egress    core.EgressPolicy // empty: deny-all
	Allow     []string          // in the only form of its entries
	Env       map[string]string
	Labels    map[string]string
	TTL       time.Duration // 0: none
	Rest      Rest
}

// CreateWorkspace makes a workspace from an image: a fork of the image's template, which is made first when there is none.
func (c *Controller) CreateWorkspace(ctx context.Context, project core.ProjectID, req CreateRequest, wait time.Duration) (Answer, error) {
	if req.Image == "" {
		req.Image = DefaultImage
	}
	if req.Egress == "" {
		req.Egress = core.EgressDenyAll
	}
	if err := req.Resources.Validate(); err != nil {
		return Answer{}, err
	}
	if err := ruled(req.Egress, req.Allow); err != nil {
		return Answer{}, err
	}
	image, err := c.findImage(ctx, req.Image)
	if err != nil {
		err = c.repeated(ctx, project, err)
		if again, ok := errors.AsType[*repeatError](err); ok {
			return c.repeatTask(project, again).await(ctx, wait)
		}
		return Answer{}, err
	}
	op := Operation{ProjectID: project, Kind: OpCreateWorkspace, Step: "template"}
	admit := func(ctx context.Context, tx Tx, op *Operation, in *opInput, attempt int) (any, error) {
		runner, err := c.place(ctx, tx, placement.Request{Count: 1, Resources: req.Resources, Image: image.Digest}, image.Runners...)
		if err != nil {
			return nil, err
		}
		like := Workspace{
			State: core.WorkspaceCreating, Image: ImageRef{Name: image.Name, Digest: image.Digest}, Resources: req.Resources,
			Egress: req.Egress, Rules: Rules{Allow: req.Allow}, Env: req.Env, Labels: req.Labels, Rest: req.Rest,
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
		list, err := c.plant(ctx, tx, planting{project: project, runners: []Runner{runner}, names: []string{req.Name}, like: like, attempt: attempt, ttl: req.TTL})
		if err != nil {
			return nil, err
		}
		op.WorkspaceID, in.Children = list[0].ID, childInputs(list)
		plan := &forkPlan{children: list}
		if op.Step == "fork" {
			plan.source, in.Source, op.CheckpointID = template, template.ID, template.ID
		}
		return plan, nil
	}
	t, err := c.admit(ctx, project, wait, func(ctx context.Context) (*Task, error) { return c.begin(ctx, InProject(project), op, admit) })
	if err != nil {
		return Answer{}, err
	}
	return t.await(ctx, wait)
}

// workCreate is the work of create_workspace: find or make the template, then fork it.
func (c *Controller) workCreate(ctx context.Context, t *Task) error {
	plan, err := c.loadFork(ctx, t)
	if err != nil {
		return err
	}
	if parent := plan.children[0].Parent; t.op.Step == "fork" && plan.source.ID == "" && parent != "" {
		err := t.load(ctx, func(tx Tx) error {
			var err error
			plan.source, err = c.source(ctx, tx, parent)
			return err
		})
		if err != nil {
			return err
		}
	}
	for attempt := 0; ; attempt++ {
		if t.op.Step != "fork" {
			if err := c.fromTemplate(ctx, t, plan, attempt > 0); err != nil {
				return err
			}
			t.watch.Lap("template")
		}
		got, err := c.callFork(ctx, plan)
		t.watch.Lap("fork")
		if err == nil && got[0].Problem != nil {
			err = got[0].Problem.Err()
		}
		if attempt == 0 && err != nil {
			again, dropErr := c.withoutTemplate(ctx, plan, err)
			if dropErr != nil {
				return dropErr
			}
			if again {
				t.op.Step = "template"
				continue
			}
		}
		switch {
		case got == nil:
			return err
		case err != nil:
			return c.failGrown(ctx, t, plan, got)
		}
		return c.finishGrown(ctx, t, plan, got)
	}
}

// withoutTemplate reports whether a workspace is to be made of another template after it could not be made of the one of the plan.
func (c *Controller) withoutTemplate(ctx context.Context, plan *forkPlan, problem error) (bool, error) {
	template := plan.source
	elsewhere := template.RunnerID != plan.children[0].Sandbox.RunnerID
	switch core.CodeOf(problem) {
	case core.CodeIncompatibleHost: // the runner was started with another VMM since the template was chosen: it is good, but not for it any more
		return true, nil
	case core.CodeCheckpointNotFound, core.CodeCheckpointCorrupt:
		if elsewhere {
			break
		}
		// The runner has lost a template that the rows still promise: its data directory was made anew.
		c.log.WarnContext(ctx, "template given up", "checkpoint_id", template.ID, "runner_id", template.RunnerID, "err", problem)
		return true, c.store.InTx(ctx, System(), func(tx Tx) error { return tx.DropTemplate(ctx, template.ID) })
	case core.CodeCheckpointIncomplete, core.CodeManifestInvalid, core.CodeStoreUnavailable, core.CodeStoreAuth:
	default:
		return false, nil
	}
	// What cannot be fetched can be booted.
	if elsewhere {
		c.log.WarnContext(ctx, "template could not be taken over", "checkpoint_id", template.ID, "runner_id", plan.children[0].Sandbox.RunnerID, "err", problem)
	}
	return elsewhere, nil
}

// fromTemplate gives the workspace the template that it is forked from; a local one is of its own runner.
func (c *Controller) fromTemplate(ctx context.Context, t *Task, plan *forkPlan, local bool) error {
	w := plan.children[0]
	template, err := c.template(ctx, w, local)
	if err != nil {
		return err
	}
	return t.load(ctx, func(tx Tx) error { // to write it twice changes nothing
		sandbox := w.Sandbox
		moved, err := tx.ForkWorkspaceFrom(ctx, w.ID, template)
		if err != nil {
			return err
		}
		moved.Sandbox = sandbox
		plan.children[0], plan.source = moved, template
		return t.step(ctx, tx, "fork")
	})
}

// imageCache remembers what each runner last said that it holds, so that rows are written only when that changes.
type imageCache struct {
	// mu guards byRunner.
	mu       sync.Mutex
	byRunner map[core.RunnerID][]runnerapi.Image
}

func (i *imageCache) swap(id core.RunnerID, list []runnerapi.Image) (changed bool) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.byRunner == nil {
		i.byRunner = map[core.RunnerID][]runnerapi.Image{}
	}
	changed = !slices.Equal(i.byRunner[id], list) || i.byRunner[id] == nil
	i.byRunner[id] = list
	return changed
}

func (i *imageCache) forget(id core.RunnerID) {
	i.mu.Lock()
	defer i.mu.Unlock()
	delete(i.byRunner, id)
}

// askImages asks every runner that can be reached what it holds: an image may have been built a moment ago. The rows, which
// serve lists, follow. It returns an error only when runners are there and none of them answers.
func (c *Controller) askImages(ctx context.Context) (map[core.RunnerID][]runnerapi.Image, error) {
	var fleet []Runner
	if err := c.store.InTx(ctx, System(), func(tx Tx) error {
		var err error
		fleet, err = tx.Fleet(ctx)
		return err
	}); err != nil {
		return nil, err
	}
	// mu guards held and failed.
	var mu sync.Mutex
	held, failed := map[core.RunnerID][]runnerapi.Image{}, error(nil)
	var group errgroup.Group
	for _, r := range fleet {
		if !r.Fresh {
			continue
		}
		group.Go(func() error {
			list, err := c.runners.Images(ctx, r.Endpoint)
			if err == nil {
				err = c.recordImages(ctx, r.Info.RunnerID, list)
			}
			mu.Lock()
			defer mu.Unlock()
			if err != nil {
				failed = err
				return nil
			}
			held[r.Info.RunnerID] = list
			return nil
		})
	}
	_ = group.Wait() // none of them fails
	if len(held) == 0 && failed != nil {
		return nil, failed
	}
	return held, nil
}

func (c *Controller) recordImages(ctx context.Context, id core.RunnerID, list []runnerapi.Image) error {
	if !c.images.swap(id, list) {
		return nil
	}
	err := c.store.InTx(ctx, System(), func(tx Tx) error { return tx.SetImages(ctx, id, list) })
	if err != nil {
		c.images.forget(id)
	}
	return err
}

// findImage resolves a name or digest among what reachable runners hold. When they disagree about a name, the newest image
// has it.
func (c *Controller) findImage(ctx context.Context, ref string) (Image, error) {
	held, err := c.askImages(ctx)
	if err != nil {
		return Image{}, err
	}
	if len(held) == 0 {
		return Image{}, core.Errorf(core.Unavailable, core.CodeNoRunner, "no runner is registered and reachable; start one with `coppice dev` or `coppice runner`")
	}
	var found Image
	for _, list := range held {
		for _, img := range list {
			if (img.Name == ref || string(img.Digest) == ref) && (found.Digest == "" || img.CreatedAt.After(found.BuiltAt)) {
				found = Image{Name: img.Name, Digest: img.Digest, SizeBytes: img.SizeBytes, BuiltAt: img.CreatedAt}
			}
		}
	}
	if found.Digest == "" {
		return Image{}, core.Errorf(core.NotFound, core.CodeImageNotFound, "no reachable runner has an image %q; build it with `coppice image build`", core.Clip(ref))
	}
	for _, id := range slices.Sorted(maps.Keys(held)) {
		if slices.ContainsFunc(held[id], func(img runnerapi.Image) bool { return img.Digest == found.Digest }) {
			found.Runners = append(found.Runners, id)
		}
	}
	return found, nil
}
