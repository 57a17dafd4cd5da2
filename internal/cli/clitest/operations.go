package clitest

import (
	"context"
	"maps"
	"slices"

	"github.com/coppice-dev/coppice/api"
)

func operation(n int, state api.OperationState) api.Operation {
	return api.Operation{
		ID: ID("op", n), Kind: api.OperationForkCheckpoint, State: state, Step: "fork", CheckpointID: ID("ckpt", 1), WorkspaceIDs: []string{ID("ws", 1)}, Timings: api.Timings{}, CreatedAt: Dawn,
	}
}

// ListOperations has one that is under way.
func (f *Server) ListOperations(_ context.Context, r api.ListOperationsRequestObject) (api.ListOperationsResponseObject, error) {
	f.note(r.Params)
	return api.ListOperations200JSONResponse{Items: []api.Operation{operation(1, api.OperationRunning)}}, nil
}

// CancelOperation comes in time for the first one only.
func (f *Server) CancelOperation(_ context.Context, r api.CancelOperationRequestObject) (api.CancelOperationResponseObject, error) {
	op := operation(2, api.OperationSucceeded)
	if r.OperationID == ID("op", 1) {
		op = operation(1, api.OperationFailed)
		op.Problem = &api.Failure{Code: "OPERATION_CANCELED", Message: "the operation was canceled"}
	}
	return api.CancelOperation200JSONResponse(op), nil
}

// CreateFilesPass has none to give: files go through the server.
func (f *Server) CreateFilesPass(context.Context, api.CreateFilesPassRequestObject) (api.CreateFilesPassResponseObject, error) {
	return api.CreateFilesPassdefaultApplicationProblemPlusJSONResponse{StatusCode: 400, Body: refusal(400, "UNSUPPORTED")}, nil
}

// PatchWorkspace changes name and labels.
func (f *Server) PatchWorkspace(_ context.Context, r api.PatchWorkspaceRequestObject) (api.PatchWorkspaceResponseObject, error) {
	f.note(*r.Body)
	f.mu.Lock()
	defer f.mu.Unlock()
	i := slices.IndexFunc(f.Workspaces, func(ws api.Workspace) bool { return ws.ID == r.WorkspaceID })
	ws := &f.Workspaces[i]
	ws.Version++
	if r.Body.Name != "" {
		ws.Name = r.Body.Name
	}
	ws.Labels = changed(ws.Labels, r.Body.Labels)
	return api.PatchWorkspace200JSONResponse(*ws), nil
}

func changed(labels api.Labels, patch api.LabelsPatch) api.Labels {
	labels = maps.Clone(labels)
	for key, value := range patch {
		if delete(labels, key); value != nil {
			labels[key] = *value
		}
	}
	return labels
}
