package httpapi

import (
	"context"
	"slices"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// CreateWorkspace serves POST /v1/workspaces.
func (s *server) CreateWorkspace(ctx context.Context, r api.CreateWorkspaceRequestObject) (api.CreateWorkspaceResponseObject, error) {
	req, err := createIn(*r.Body)
	if err != nil {
		return nil, err
	}
	a, err := s.control.CreateWorkspace(ctx, projectOf(ctx), req, waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.CreateWorkspaceResponseObject {
			return api.CreateWorkspace202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.CreateWorkspaceResponseObject { return api.CreateWorkspace201JSONResponse(workspaceIn(a)) })
}

// ListWorkspaces serves GET /v1/workspaces.
func (s *server) ListWorkspaces(ctx context.Context, r api.ListWorkspacesRequestObject) (api.ListWorkspacesResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	labels, err := labelFilter(r.Params.Label)
	if err != nil {
		return nil, err
	}
	f := controller.WorkspaceFilter{
		Page: p, Name: r.Params.Name, IDSuffix: r.Params.IDSuffix, Labels: labels,
		Head: core.CheckpointID(r.Params.CheckpointID), Parent: core.CheckpointID(r.Params.ParentCheckpointID),
		States: convert(r.Params.State, func(v api.WorkspaceState) core.WorkspaceState { return core.WorkspaceState(v) }),
	}
	if len(f.States) == 0 {
		f.States = slices.DeleteFunc(core.WorkspaceStates(), func(v core.WorkspaceState) bool { return v == core.WorkspaceTerminated })
	}
	list, err := s.control.Workspaces(ctx, projectOf(ctx), f)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(w controller.Workspace) string { return string(w.ID) })
	return api.ListWorkspaces200JSONResponse{Items: convert(list, workspaceOf), NextCursor: next}, nil
}

// GetWorkspace serves GET /v1/workspaces/{id}.
func (s *server) GetWorkspace(ctx context.Context, r api.GetWorkspaceRequestObject) (api.GetWorkspaceResponseObject, error) {
	w, err := s.control.Workspace(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	return api.GetWorkspace200JSONResponse(workspaceOf(w)), nil
}

// PatchWorkspace serves PATCH /v1/workspaces/{id}.
func (s *server) PatchWorkspace(ctx context.Context, r api.PatchWorkspaceRequestObject) (api.PatchWorkspaceResponseObject, error) {
	labels, err := labelsPatchIn(r.Body.Labels)
	if err != nil {
		return nil, err
	}
	p := controller.WorkspacePatch{Version: r.Body.Version, Name: r.Body.Name, Labels: labels}
	if r.Body.TTLSeconds != nil {
		ttl := seconds(*r.Body.TTLSeconds)
		p.TTL = &ttl
	}
	if r.Body.IdleSeconds != nil {
		idle := seconds(*r.Body.IdleSeconds)
		p.IdleAfter = &idle
	}
	p.OnTTL = controller.IdleAction(r.Body.OnTTL)
	p.OnIdle, p.AutoResume = controller.IdleAction(r.Body.OnIdle), r.Body.AutoResume
	if n := r.Body.Network; n != nil {
		if err := networkPatchIn(*n, &p); err != nil {
			return nil, err
		}
	}
	w, err := s.control.PatchWorkspace(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), p)
	if err != nil {
		return nil, err
	}
	return api.PatchWorkspace200JSONResponse(workspaceOf(w)), nil
}

// DeleteWorkspace serves DELETE /v1/workspaces/{id}.
func (s *server) DeleteWorkspace(ctx context.Context, r api.DeleteWorkspaceRequestObject) (api.DeleteWorkspaceResponseObject, error) {
	a, err := s.control.Terminate(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.DeleteWorkspaceResponseObject {
			return api.DeleteWorkspace202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.DeleteWorkspaceResponseObject { return api.DeleteWorkspace200JSONResponse(workspaceIn(a)) })
}

// TerminateWorkspace serves POST /v1/workspaces/{id}/terminate.
func (s *server) TerminateWorkspace(ctx context.Context, r api.TerminateWorkspaceRequestObject) (api.TerminateWorkspaceResponseObject, error) {
	a, err := s.control.Terminate(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.TerminateWorkspaceResponseObject {
			return api.TerminateWorkspace202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.TerminateWorkspaceResponseObject {
			return api.TerminateWorkspace200JSONResponse(workspaceIn(a))
		})
}

// SuspendWorkspace serves POST /v1/workspaces/{id}/suspend.
func (s *server) SuspendWorkspace(ctx context.Context, r api.SuspendWorkspaceRequestObject) (api.SuspendWorkspaceResponseObject, error) {
	a, err := s.control.Suspend(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.SuspendWorkspaceResponseObject {
			return api.SuspendWorkspace202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.SuspendWorkspaceResponseObject { return api.SuspendWorkspace200JSONResponse(workspaceIn(a)) })
}

// ResumeWorkspace serves POST /v1/workspaces/{id}/resume.
func (s *server) ResumeWorkspace(ctx context.Context, r api.ResumeWorkspaceRequestObject) (api.ResumeWorkspaceResponseObject, error) {
	a, err := s.control.Resume(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.ResumeWorkspaceResponseObject {
			return api.ResumeWorkspace202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.ResumeWorkspaceResponseObject { return api.ResumeWorkspace200JSONResponse(workspaceIn(a)) })
}

// ForkWorkspace serves POST /v1/workspaces/{id}/fork.
func (s *server) ForkWorkspace(ctx context.Context, r api.ForkWorkspaceRequestObject) (api.ForkWorkspaceResponseObject, error) {
	b := r.Body
	fork, err := forkIn(forkOptions{
		count: b.Count, name: b.BranchName, allOrNothing: b.AllOrNothing, env: b.Env, labels: b.Labels, network: b.Network, ttl: b.TTLSeconds,
		grants: b.Grants, idle: b.IdleSeconds, onIdle: b.OnIdle, autoResume: b.AutoResume, onTTL: b.OnTTL,
	})
	if err != nil {
		return nil, err
	}
	cp, err := checkpointRequestIn(b.Checkpoint)
	if err != nil {
		return nil, err
	}
	a, err := s.control.ForkWorkspace(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), cp, fork, waitOf(r.Params.Wait))
	var result api.ForkResult
	if err == nil && a.Done {
		result, err = s.forkResult(ctx, a)
	}
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.ForkWorkspaceResponseObject {
			return api.ForkWorkspace202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.ForkWorkspaceResponseObject { return api.ForkWorkspace201JSONResponse(result) })
}

// RestoreWorkspace serves POST /v1/workspaces/{id}/restore.
func (s *server) RestoreWorkspace(ctx context.Context, r api.RestoreWorkspaceRequestObject) (api.RestoreWorkspaceResponseObject, error) {
	a, err := s.control.RestoreWorkspace(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), core.CheckpointID(r.Body.CheckpointID), waitOf(r.Params.Wait))
	return answered(a, err,
		func(op api.AcceptedJSONResponse) api.RestoreWorkspaceResponseObject {
			return api.RestoreWorkspace202JSONResponse{AcceptedJSONResponse: op}
		},
		func() api.RestoreWorkspaceResponseObject {
			return api.RestoreWorkspace200JSONResponse(restoreResultOf(a))
		})
}

// ListResealReports serves GET /v1/workspaces/{id}/reseal-reports.
func (s *server) ListResealReports(ctx context.Context, r api.ListResealReportsRequestObject) (api.ListResealReportsResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Reseals(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), p)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(v controller.ResealRecord) string { return string(v.SandboxID) })
	return api.ListResealReports200JSONResponse{Items: convert(list, recordOf), NextCursor: next}, nil
}

// ListProcesses serves GET /v1/workspaces/{id}/processes.
func (s *server) ListProcesses(ctx context.Context, r api.ListProcessesRequestObject) (api.ListProcessesResponseObject, error) {
	list, err := s.control.Processes(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	return api.ListProcesses200JSONResponse{Items: convert(list, processOf)}, nil
}

// DeletePort serves DELETE /v1/workspaces/{id}/ports/{port_id}.
func (s *server) DeletePort(ctx context.Context, r api.DeletePortRequestObject) (api.DeletePortResponseObject, error) {
	err := s.control.Ports().Close(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), core.PortID(r.PortID))
	return api.DeletePort204Response{}, err
}
