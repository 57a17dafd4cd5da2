package httpapi

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
)

func policyIn(best api.KeepBest, path bool, age, bytes int64) controller.RetentionPolicy {
	return controller.RetentionPolicy{
		Annotation: best.Annotation, Policy: retention.Policy{KeepBest: best.K, KeepPathToRoot: path, MaxAge: seconds(age), MaxBytes: bytes},
	}
}

func retentionOf(r controller.Retention) api.Retention {
	p := r.Policy
	return api.Retention{
		CheckpointID: string(r.Checkpoint), Version: r.Version, UpdatedAt: r.UpdatedAt,
		Policy: api.RetentionPolicy{
			KeepBest:       api.KeepBest{K: p.KeepBest, Annotation: p.Annotation},
			KeepPathToRoot: p.KeepPathToRoot, MaxAgeSeconds: int64(p.MaxAge / time.Second), MaxBytes: p.MaxBytes,
		},
	}
}

func pruneResultOf(r *controller.PruneResult) api.PruneResult {
	if r == nil {
		return api.PruneResult{Items: []api.PruneItem{}}
	}
	return api.PruneResult{
		DryRun: r.DryRun, Bytes: r.Bytes(), Kept: r.Kept, KeptBytes: r.KeptBytes, OverBudget: r.Over, Truncated: r.Truncated, Planned: r.Planned,
		Items: convert(r.Items, func(i controller.PruneItem) api.PruneItem {
			return api.PruneItem{CheckpointID: string(i.ID), Reason: api.PruneItemReason(i.Reason), Bytes: i.Bytes, Skipped: i.Skipped}
		}),
	}
}

// DeleteCheckpoint serves DELETE /v1/checkpoints/{id}.
func (s *server) DeleteCheckpoint(ctx context.Context, r api.DeleteCheckpointRequestObject) (api.DeleteCheckpointResponseObject, error) {
	id := core.CheckpointID(r.CheckpointID)
	if !r.Params.Cascade && !r.Params.DryRun {
		return api.DeleteCheckpoint204Response{}, s.control.DeleteCheckpoint(ctx, projectOf(ctx), id)
	}
	a, err := s.control.DeleteCheckpoints(ctx, projectOf(ctx), id, r.Params.Cascade, r.Params.DryRun, waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.DeleteCheckpointResponseObject {
			return api.DeleteCheckpoint202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.DeleteCheckpointResponseObject {
			return api.DeleteCheckpoint200JSONResponse(pruneResultOf(a.Result.Prune))
		})
}

// PruneCheckpoints serves POST /v1/checkpoints/{id}/prune.
func (s *server) PruneCheckpoints(ctx context.Context, r api.PruneCheckpointsRequestObject) (api.PruneCheckpointsResponseObject, error) {
	b := r.Body
	policy := policyIn(b.KeepBest, b.KeepPathToRoot, b.MaxAgeSeconds, b.MaxBytes)
	a, err := s.control.PruneCheckpoints(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), policy, b.DryRun, waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.PruneCheckpointsResponseObject {
			return api.PruneCheckpoints202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.PruneCheckpointsResponseObject {
			return api.PruneCheckpoints200JSONResponse(pruneResultOf(a.Result.Prune))
		})
}

// GetRetention serves GET /v1/checkpoints/{id}/retention.
func (s *server) GetRetention(ctx context.Context, r api.GetRetentionRequestObject) (api.GetRetentionResponseObject, error) {
	got, err := s.control.Retention(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID))
	if err != nil {
		return nil, err
	}
	return api.GetRetention200JSONResponse(retentionOf(got)), nil
}

// PutRetention serves PUT /v1/checkpoints/{id}/retention.
func (s *server) PutRetention(ctx context.Context, r api.PutRetentionRequestObject) (api.PutRetentionResponseObject, error) {
	b := r.Body
	got, err := s.control.PutRetention(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID), policyIn(b.KeepBest, b.KeepPathToRoot, b.MaxAgeSeconds, b.MaxBytes))
	if err != nil {
		return nil, err
	}
	return api.PutRetention200JSONResponse(retentionOf(got)), nil
}

// DeleteRetention serves DELETE /v1/checkpoints/{id}/retention.
func (s *server) DeleteRetention(ctx context.Context, r api.DeleteRetentionRequestObject) (api.DeleteRetentionResponseObject, error) {
	return api.DeleteRetention204Response{}, s.control.DeleteRetention(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID))
}
