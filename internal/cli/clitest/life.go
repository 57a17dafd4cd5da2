package clitest

import (
	"context"
	"slices"

	"github.com/coppice-dev/coppice/api"
)

// move changes the state of one of the server's workspaces.
func (f *Server) move(id string, to api.WorkspaceState) api.Workspace {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.Workspaces, func(ws api.Workspace) bool { return ws.ID == id })
	f.Workspaces[i].State = to
	return f.Workspaces[i]
}

func (f *Server) SuspendWorkspace(_ context.Context, r api.SuspendWorkspaceRequestObject) (api.SuspendWorkspaceResponseObject, error) {
	return api.SuspendWorkspace200JSONResponse(f.move(r.WorkspaceID, api.WorkspaceSuspended)), nil
}

func (f *Server) ResumeWorkspace(_ context.Context, r api.ResumeWorkspaceRequestObject) (api.ResumeWorkspaceResponseObject, error) {
	return api.ResumeWorkspace200JSONResponse(f.move(r.WorkspaceID, api.WorkspaceReady)), nil
}

func (f *Server) DeleteCheckpoint(_ context.Context, r api.DeleteCheckpointRequestObject) (api.DeleteCheckpointResponseObject, error) {
	if !r.Params.Cascade && !r.Params.DryRun {
		return api.DeleteCheckpoint204Response{}, nil
	}
	return api.DeleteCheckpoint200JSONResponse{DryRun: r.Params.DryRun, Bytes: 3 << 20, Items: []api.PruneItem{
		{CheckpointID: r.CheckpointID, Reason: api.PruneCascade, Bytes: 3 << 20},
	}}, nil
}

func (f *Server) PruneCheckpoints(_ context.Context, r api.PruneCheckpointsRequestObject) (api.PruneCheckpointsResponseObject, error) {
	f.note(*r.Body)
	return api.PruneCheckpoints200JSONResponse{
		DryRun: r.Body.DryRun, Bytes: 1 << 20, Kept: 3, KeptBytes: 5 << 20, OverBudget: true,
		Items: []api.PruneItem{
			{CheckpointID: ID("ckpt", 2), Reason: api.PruneAge, Bytes: 1 << 20},
			{CheckpointID: ID("ckpt", 1), Reason: api.PruneNotKept, Bytes: 1 << 20, Skipped: "it came into use"},
		},
	}, nil
}

func (f *Server) PutRetention(_ context.Context, r api.PutRetentionRequestObject) (api.PutRetentionResponseObject, error) {
	return api.PutRetention200JSONResponse{CheckpointID: r.CheckpointID, Policy: *r.Body, Version: 2}, nil
}

func (f *Server) GetRetention(context.Context, api.GetRetentionRequestObject) (api.GetRetentionResponseObject, error) {
	return api.GetRetentiondefaultApplicationProblemPlusJSONResponse{StatusCode: 404, Body: refusal(404, "RETENTION_NOT_FOUND")}, nil
}

func (f *Server) DeleteRetention(context.Context, api.DeleteRetentionRequestObject) (api.DeleteRetentionResponseObject, error) {
	return api.DeleteRetention204Response{}, nil
}

func (f *Server) GetWorkspaceUsage(context.Context, api.GetWorkspaceUsageRequestObject) (api.GetWorkspaceUsageResponseObject, error) {
	return api.GetWorkspaceUsage200JSONResponse{Workspaces: 1, CPUSeconds: 12.5}, nil
}

func (f *Server) GetCheckpointUsage(context.Context, api.GetCheckpointUsageRequestObject) (api.GetCheckpointUsageResponseObject, error) {
	return api.GetCheckpointUsage200JSONResponse{Checkpoints: 2, StoredBytes: 7 << 20}, nil
}
