package httpapi

import (
	"context"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// Exec serves POST /v1/workspaces/{id}/exec.
func (s *server) Exec(ctx context.Context, r api.ExecRequestObject) (api.ExecResponseObject, error) {
	req, wait, err := execIn(*r.Body)
	if err != nil {
		return nil, err
	}
	id := core.WorkspaceID(r.WorkspaceID)
	if !wait {
		view, err := s.control.StartSession(ctx, projectOf(ctx), id, req)
		if err != nil {
			return nil, err
		}
		return api.Exec201JSONResponse(sessionOf(view)), nil
	}
	out, err := s.control.Exec(ctx, projectOf(ctx), id, req)
	if err != nil {
		return nil, err
	}
	return api.Exec200JSONResponse(execResultOf(out)), nil
}

// ListSessions serves GET /v1/workspaces/{id}/sessions.
func (s *server) ListSessions(ctx context.Context, r api.ListSessionsRequestObject) (api.ListSessionsResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Sessions(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), p)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(v controller.SessionView) string { return string(v.ID) })
	return api.ListSessions200JSONResponse{Items: convert(list, sessionOf), NextCursor: next}, nil
}

// GetSession serves GET /v1/sessions/{id}.
func (s *server) GetSession(ctx context.Context, r api.GetSessionRequestObject) (api.GetSessionResponseObject, error) {
	view, err := s.control.Session(ctx, projectOf(ctx), core.SessionID(r.SessionID), seconds(int64(r.Params.Wait)))
	if err != nil {
		return nil, err
	}
	return api.GetSession200JSONResponse(sessionOf(view)), nil
}

// DeleteSession serves DELETE /v1/sessions/{id}.
func (s *server) DeleteSession(ctx context.Context, r api.DeleteSessionRequestObject) (api.DeleteSessionResponseObject, error) {
	return api.DeleteSession204Response{}, s.control.DeleteSession(ctx, projectOf(ctx), core.SessionID(r.SessionID))
}

// SignalSession serves POST /v1/sessions/{id}/signal.
func (s *server) SignalSession(ctx context.Context, r api.SignalSessionRequestObject) (api.SignalSessionResponseObject, error) {
	return api.SignalSession204Response{}, s.control.SignalTarget(ctx, projectOf(ctx), core.SessionID(r.SessionID), r.Body.Signal, string(r.Body.Target))
}

// SetSessionDeadline serves POST /v1/sessions/{id}/deadline.
func (s *server) SetSessionDeadline(ctx context.Context, r api.SetSessionDeadlineRequestObject) (api.SetSessionDeadlineResponseObject, error) {
	return api.SetSessionDeadline204Response{}, s.control.SetDeadline(ctx, projectOf(ctx), core.SessionID(r.SessionID), r.Body.TimeoutMS)
}

// ResizeSession serves POST /v1/sessions/{id}/resize.
func (s *server) ResizeSession(ctx context.Context, r api.ResizeSessionRequestObject) (api.ResizeSessionResponseObject, error) {
	cols, rows := uint16(r.Body.Cols), uint16(r.Body.Rows) //nolint:gosec // G115: the contract bounds them at 1000
	return api.ResizeSession204Response{}, s.control.ResizeSession(ctx, projectOf(ctx), core.SessionID(r.SessionID), cols, rows)
}
