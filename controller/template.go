package controller

import (
	"context"
	"errors"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// templateWait bounds one wait for a template that another request makes; the wait is repeated while the operation of that request lives.
const templateWait = time.Minute

// template returns the template from which a workspace is forked. If there is none, it makes one. A unique index decides between
// concurrent creators on all controllers: one makes the template, and the others wait. If this fails, all get the failure.
func (c *Controller) template(ctx context.Context, w Workspace, local bool) (Checkpoint, error) {
	var waited core.OperationID
	for {
		template, err := c.liveTemplate(ctx, w, local)
		switch {
		case err == nil && template.State.Forkable():
			return template, nil
		case err == nil:
			waited = template.OperationID
		case core.CategoryOf(err) != core.NotFound:
			return Checkpoint{}, err
		case waited != "": // the template that we waited for no longer exists
			op, err := c.operations.Wait(ctx, System(), waited, 0)
			if err != nil {
				return Checkpoint{}, err
			}
			if op.Problem != nil {
				return Checkpoint{}, core.Errorf(op.Problem.Category, op.Problem.Code, "the template of image %s was not made: %s", w.Image.Name, op.Problem.Msg)
			}
			waited = ""
			continue
		default:
			t, err := c.makeTemplate(ctx, w)
			if errors.Is(err, ErrTemplateExists) {
				continue
			}
			if err != nil {
				return Checkpoint{}, err
			}
			waited = t.ID()
		}
		if _, err := c.operations.Wait(ctx, System(), waited, templateWait); err != nil {
			return Checkpoint{}, err
		}
	}
}

func (c *Controller) liveTemplate(ctx context.Context, w Workspace, local bool) (Checkpoint, error) {
	var cp Checkpoint
	err := c.store.InTx(ctx, System(), func(tx Tx) error {
		runner, err := tx.Runner(ctx, w.Sandbox.RunnerID)
		if err != nil {
			return err
		}
		if cp, err = tx.LiveTemplate(ctx, runner, w.Image.Digest, w.Resources, local); err != nil {
			return err
		}
		return findSources(ctx, tx, &cp)
	})
	return cp, err
}

// makeTemplate starts the operation that makes a template. The operation belongs to the system, because the first workspace that
// needs the template may be terminated while others wait for it.
func (c *Controller) makeTemplate(ctx context.Context, w Workspace) (*task, error) {
	op := Operation{ProjectID: SystemProject, Kind: OpCreateTemplate}
	return c.begin(ctx, op, func(ctx context.Context, tx Tx, op *Operation, _ int) (kind, error) {
		runner, err := tx.Runner(ctx, w.Sandbox.RunnerID)
		if err != nil {
			return nil, err
		}
		class := runner.Info.Class
		cp := Checkpoint{
			ID: core.NewID[core.CheckpointID](), ProjectID: SystemProject, Kind: KindTemplate, Image: w.Image, RunnerID: runner.Info.RunnerID,
			Endpoint: runner.Endpoint, Class: &class, OperationID: op.ID,
			Resources: core.Resources{VCPUs: w.Resources.VCPUs, MemoryMiB: w.Resources.MemoryMiB, DiskGiB: core.MinDiskGiB},
		}
		op.CheckpointID = cp.ID
		return &createTemplate{Capture: cp.ID, checkpoint: &cp}, tx.InsertCheckpoint(ctx, cp)
	})
}

// createTemplate is the kind create_template: it boots an image and captures it.
type createTemplate struct {
	Capture core.CheckpointID `json:"capture,omitempty"`

	checkpoint *Checkpoint
}

func (k *createTemplate) made() made { return made{capture: k.Capture} }

// takeBack has nothing to do: the operation acts on no workspace.
func (k *createTemplate) takeBack(context.Context, Tx, Operation) error { return nil }

func (k *createTemplate) load(ctx context.Context, t *task) (cp Checkpoint, err error) {
	if k.checkpoint != nil {
		return *k.checkpoint, nil
	}
	err = t.Load(ctx, func(tx Tx) (err error) {
		cp, err = tx.Checkpoint(ctx, k.Capture)
		return err
	})
	return cp, err
}

func (k *createTemplate) work(ctx context.Context, c *Controller, t *task) error {
	cp, err := k.load(ctx, t)
	if err != nil {
		return err
	}
	var got runnerapi.Checkpoint
	err = c.forks.Insist(ctx, func() error {
		var err error
		got, err = c.runners.Template(ctx, cp.Endpoint, runnerapi.Template{CheckpointID: cp.ID, Image: cp.Image.Digest, Resources: cp.Resources})
		return err
	})
	t.Lap("boot")
	if err != nil {
		return err
	}
	return t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		done, err := tx.CaptureCheckpoint(ctx, cp.ID, cp.RunnerID, got)
		return Outcome{Checkpoint: cp.ID}, Result{Checkpoint: &done}, err
	})
}
