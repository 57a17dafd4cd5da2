package controller

import (
	"bytes"
	"cmp"
	"context"
	"time"

	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/guestclient"
	"github.com/coppice-dev/coppice/controller/steps"
	"github.com/coppice-dev/coppice/controller/uploads"
	"github.com/coppice-dev/coppice/core"
)

// buildImage is the kind build_image: it builds an image of the project. Package builds does the work.
type buildImage struct {
	madeNothing
	builds.Spec
}

// BuildImage builds an image of the project from a Dockerfile or from steps.
func (c *Controller) BuildImage(ctx context.Context, project core.ProjectID, spec builds.Spec, wait time.Duration) (Answer, error) {
	if err := builds.Check(&spec); err != nil {
		return Answer{}, err
	}
	if err := grants.CheckMode(spec.Egress, spec.Allow); err != nil {
		return Answer{}, err
	}
	op := Operation{ProjectID: project, Kind: OpBuildImage, Step: "build"}
	t, err := c.begin(ctx, op, func(ctx context.Context, tx Tx, _ *Operation, _ int) (kind, error) {
		if err := c.mayReachAll(ctx, tx, project, spec.Egress); err != nil {
			return nil, err
		}
		return &buildImage{Spec: spec}, builds.Admit(ctx, tx, project)
	})
	if err != nil {
		return Answer{}, err
	}
	return t.Await(ctx, wait)
}

func (k *buildImage) job(c *Controller, t *task) builds.Job {
	op := t.Op()
	return builds.Job{
		Ref: steps.Ref{ID: op.ID, Project: op.ProjectID, Epoch: op.LeaseEpoch}, Spec: &k.Spec, Created: op.CreatedAt, Lease: t.CheckLease,
		Create: func(ctx context.Context, image string, note steps.Note) error {
			_, err := c.beginCreate(ctx, op.ProjectID, CreateRequest{Image: image, Resources: k.Resources, Egress: k.Egress, Allow: k.Allow, admitted: note}, c.cfg.AdmissionWait)
			return err
		},
		Fork: func(ctx context.Context, id core.CheckpointID, network bool, note steps.Note) error {
			req := ForkRequest{Count: 1, Grants: grants.Choice{None: true}, admitted: note}
			if network {
				req.Egress, req.Allow = k.Egress, &k.Allow
			}
			_, err := c.beginFork(ctx, op.ProjectID, OpForkCheckpoint, asFork, id, req, c.cfg.AdmissionWait)
			return err
		},
		Progress: func(ctx context.Context, step string) error {
			return t.Load(ctx, func(tx Tx) error { return t.Step(ctx, tx, step) })
		},
	}
}

func (k *buildImage) work(ctx context.Context, c *Controller, t *task) error {
	image, err := c.Builds.Run(ctx, k.job(c, t))
	if err != nil {
		return err
	}
	t.Lap("build")
	return t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		image, err := builds.Publish(ctx, tx, t.Op().ProjectID, image)
		return Outcome{Checkpoint: image.Checkpoint, Image: &image}, Result{Image: &image}, err
	})
}

// undo ends what the instructions have begun, before the build itself ends.
func (k *buildImage) undo(ctx context.Context, c *Controller, t *task, why error) error {
	return c.Builds.TakeBack(ctx, k.job(c, t), why)
}

// fromProject makes a workspace from an image that the project has built: a fork of its checkpoint.
func (c *Controller) fromProject(ctx context.Context, project core.ProjectID, image builds.Image, req CreateRequest, wait time.Duration) (Answer, error) {
	cp, err := c.Tree.Checkpoint(ctx, project, image.Checkpoint)
	if err == nil && req.Shaped && req.Resources != cp.Resources {
		err = builds.ShapeError(image.Name, cp.Resources)
	}
	if err != nil {
		return Answer{}, err
	}
	fork := ForkRequest{ // without a policy it may reach nothing, as from every image, whatever the build might reach
		Count: 1, Name: req.Name, Egress: cmp.Or(req.Egress, core.EgressDenyAll), Allow: &req.Allow, Env: req.Env,
		Grants: grants.Choice{None: true}, Labels: req.Labels, TTL: req.TTL, IdlePolicy: req.IdlePolicy,
	}
	return c.fork(ctx, project, OpCreateWorkspace, func(in forkInput) kind { return &createWorkspace{forkInput: in, Built: true} }, image.Checkpoint, fork, wait)
}

func newBuilds(c *Controller) *builds.Builder {
	return builds.New(builds.Uses{
		Guests: c.guests, Steps: c.Steps, Uploads: c.Uploads, FindImage: c.fleet.FindImage, Checkpoint: c.Tree.Checkpoint,
		MayPull: c.fleet.MayPull, Pull: c.fleet.Pull,
		Start: func(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req guestclient.ExecRequest) error {
			_, err := c.StartSession(ctx, project, id, req)
			return err
		},
		File: func(ctx context.Context, project core.ProjectID, id core.CheckpointID, path string, most int) ([]byte, error) {
			file, err := c.Tree.Open(ctx, project, id, path)
			if err == nil && file.File.Size > int64(most) {
				err = core.Errorf(core.FailedPrecondition, core.CodeBuildFailed, "%s of the base has more than %d bytes", path, most)
			}
			if err != nil {
				return nil, err
			}
			var out bytes.Buffer
			err = file.Write(ctx, &out)
			return out.Bytes(), err
		},
	}, partStore[builds.Tx]{c.store.Store, func(tx AllTx) builds.Tx { return tx }}, c.log)
}

func newUploads(c *Controller) *uploads.Keeper {
	return uploads.New(partStore[uploads.Tx]{c.store.Store, func(tx AllTx) uploads.Tx { return tx }})
}
