package main

import (
	"context"
	"slices"

	"github.com/coppice-dev/coppice/api"
)

// move changes the state of one of the fake's workspaces.
func (f *fake) move(id string, to api.WorkspaceState) api.Workspace {
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.workspaces, func(ws api.Workspace) bool { return ws.ID == id })
	f.workspaces[i].State = to
	return f.workspaces[i]
}

func (f *fake) SuspendWorkspace(_ context.Context, r api.SuspendWorkspaceRequestObject) (api.SuspendWorkspaceResponseObject, error) {
	return api.SuspendWorkspace200JSONResponse(f.move(r.WorkspaceID, api.WorkspaceSuspended)), nil
}

func (f *fake) ResumeWorkspace(_ context.Context, r api.ResumeWorkspaceRequestObject) (api.ResumeWorkspaceResponseObject, error) {
	return api.ResumeWorkspace200JSONResponse(f.move(r.WorkspaceID, api.WorkspaceReady)), nil
}

func (f *fake) DeleteCheckpoint(_ context.Context, r api.DeleteCheckpointRequestObject) (api.DeleteCheckpointResponseObject, error) {
	if !r.Params.Cascade && !r.Params.DryRun {
		return api.DeleteCheckpoint204Response{}, nil
	}
	return api.DeleteCheckpoint200JSONResponse{DryRun: r.Params.DryRun, Bytes: 3 << 20, Items: []api.PruneItem{
		{CheckpointID: r.CheckpointID, Reason: api.PruneCascade, Bytes: 3 << 20},
	}}, nil
}

func (f *fake) PruneCheckpoints(_ context.Context, r api.PruneCheckpointsRequestObject) (api.PruneCheckpointsResponseObject, error) {
	f.note(*r.Body)
	return api.PruneCheckpoints200JSONResponse{
		DryRun: r.Body.DryRun, Bytes: 1 << 20, Kept: 3, KeptBytes: 5 << 20, OverBudget: true,
		Items: []api.PruneItem{
			{CheckpointID: fakeID("ckpt", 2), Reason: api.PruneAge, Bytes: 1 << 20},
			{CheckpointID: fakeID("ckpt", 1), Reason: api.PruneNotKept, Bytes: 1 << 20, Skipped: "it came into use"},
		},
	}, nil
}

func (f *fake) PutRetention(_ context.Context, r api.PutRetentionRequestObject) (api.PutRetentionResponseObject, error) {
	return api.PutRetention200JSONResponse{CheckpointID: r.CheckpointID, Policy: *r.Body, Version: 2}, nil
}

func (f *fake) GetRetention(context.Context, api.GetRetentionRequestObject) (api.GetRetentionResponseObject, error) {
	return api.GetRetentiondefaultApplicationProblemPlusJSONResponse{StatusCode: 404, Body: refusal(404, "RETENTION_NOT_FOUND")}, nil
}

func (f *fake) DeleteRetention(context.Context, api.DeleteRetentionRequestObject) (api.DeleteRetentionResponseObject, error) {
	return api.DeleteRetention204Response{}, nil
}

func (f *fake) GetWorkspaceUsage(context.Context, api.GetWorkspaceUsageRequestObject) (api.GetWorkspaceUsageResponseObject, error) {
	return api.GetWorkspaceUsage200JSONResponse{Workspaces: 1, CPUSeconds: 12.5}, nil
}

func (f *fake) GetCheckpointUsage(context.Context, api.GetCheckpointUsageRequestObject) (api.GetCheckpointUsageResponseObject, error) {
	return api.GetCheckpointUsage200JSONResponse{Checkpoints: 2, StoredBytes: 7 << 20}, nil
}
