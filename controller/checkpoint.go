package controller

import (
	"context"
	"encoding/json"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/core"
)

// CheckpointRequest asks for a checkpoint of a running workspace.
type CheckpointRequest struct {
	Name        string
	Labels      map[string]string
	Annotations map[string]json.RawMessage
	Pinned      bool
	Prepare     prepare.Wanted // machines of it
}

// createCheckpoint is the kind create_checkpoint: it captures a running workspace.
type createCheckpoint struct{ captureInput }

// CreateCheckpoint captures a running workspace.
func (c *Controller) CreateCheckpoint(ctx context.Context, project core.ProjectID, id core.WorkspaceID, req CheckpointRequest, wait time.Duration) (Answer, error) {
	return c.capture(ctx, project, id, wait, capturing{kind: OpCreateCheckpoint, request: req, as: asCheckpoint})
}

func asCheckpoint(_ context.Context, _ Tx, in captureInput, _ int) (kind, error) {
	return &createCheckpoint{in}, nil
}

func (k *createCheckpoint) work(ctx context.Context, c *Controller, t *task) error {
	defer c.captures.Ended(t.Op().WorkspaceID)
	plan, err := k.load(ctx, t)
	if err != nil {
		return err
	}
	defer c.Prepare.SoonIf(plan.prepare, k.Capture)
	got, err := k.call(ctx, c, t, plan, runnerapi.Capture{})
	if err != nil {
		return c.captureFailed(ctx, t, k, k.Sandbox, err)
	}
	return t.Finish(ctx, func(ctx context.Context, tx Tx) (any, Result, error) {
		if err := k.record(ctx, tx, t, plan, got); err != nil {
			return nil, Result{}, err
		}
		cp := plan.checkpoint
		return Outcome{Checkpoint: cp.ID}, Result{Checkpoint: &cp}, nil
	})
}
