package httpapi

import (
	"context"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func usageOf(u controller.Usage) api.Usage {
	return api.Usage{
		Workspaces: u.Workspaces, Checkpoints: u.Checkpoints, CPUSeconds: u.CPUSeconds, GibSeconds: u.GiBSeconds, StoredBytes: u.StoredBytes,
		SentBytes: u.SentBytes, ReceivedBytes: u.ReceivedBytes, SampledAt: u.SampledAt, PreparedCPUSeconds: u.PreparedCPUSeconds, PreparedMemoryBytes: u.PreparedMemoryBytes,
	}
}

// GetWorkspaceUsage serves GET /v1/workspaces/{id}/usage.
func (s *server) GetWorkspaceUsage(ctx context.Context, r api.GetWorkspaceUsageRequestObject) (api.GetWorkspaceUsageResponseObject, error) {
	u, err := s.control.Tenancy.WorkspaceUsage(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	return api.GetWorkspaceUsage200JSONResponse(usageOf(u)), nil
}

// GetCheckpointUsage serves GET /v1/checkpoints/{id}/usage.
func (s *server) GetCheckpointUsage(ctx context.Context, r api.GetCheckpointUsageRequestObject) (api.GetCheckpointUsageResponseObject, error) {
	u, err := s.control.Tenancy.CheckpointUsage(ctx, projectOf(ctx), core.CheckpointID(r.CheckpointID))
	if err != nil {
		return nil, err
	}
	return api.GetCheckpointUsage200JSONResponse(usageOf(u)), nil
}
