package httpapi

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// CreateRunnerToken serves POST /v1/runner-tokens.
func (s *server) CreateRunnerToken(ctx context.Context, r api.CreateRunnerTokenRequestObject) (api.CreateRunnerTokenResponseObject, error) {
	token, row, err := s.control.Fleet().CreateToken(ctx, controller.KeyOf(ctx), core.RunnerID(r.Body.RunnerID), time.Duration(r.Body.TTLSeconds)*time.Second)
	if err != nil {
		return nil, err
	}
	return api.CreateRunnerToken201JSONResponse{Token: token, RunnerID: string(row.RunnerID), ExpiresAt: row.ExpiresAt}, nil
}

// PatchRunner serves PATCH /v1/runners/{id}.
func (s *server) PatchRunner(ctx context.Context, r api.PatchRunnerRequestObject) (api.PatchRunnerResponseObject, error) {
	got, err := s.control.Fleet().Drain(ctx, core.RunnerID(r.RunnerID), r.Body.Draining)
	if err != nil {
		return nil, err
	}
	return api.PatchRunner200JSONResponse(runnerOf(got)), nil
}

// DeleteRunner serves DELETE /v1/runners/{id}.
func (s *server) DeleteRunner(ctx context.Context, r api.DeleteRunnerRequestObject) (api.DeleteRunnerResponseObject, error) {
	return api.DeleteRunner204Response{}, s.control.Fleet().Remove(ctx, core.RunnerID(r.RunnerID), r.Params.Force)
}

// AttachSession serves POST /v1/sessions/{id}/attach.
func (s *server) AttachSession(ctx context.Context, r api.AttachSessionRequestObject) (api.AttachSessionResponseObject, error) {
	way, err := s.control.AttachWay(ctx, projectOf(ctx), core.SessionID(r.SessionID), r.Params.Via != api.AttachSessionParamsViaController)
	if err != nil {
		return nil, err
	}
	out := api.AttachSession201JSONResponse{Transport: api.TransportWebsocket, URL: way.URL, Token: way.Token, ExpiresAt: way.ExpiresAt, TLS: dataTLS(way)}
	if way.URL == "" {
		out.URL = "/v1/attach/" + r.SessionID
	}
	return out, nil
}

// CreateFilesPass serves POST /v1/workspaces/{id}/files/pass.
func (s *server) CreateFilesPass(ctx context.Context, r api.CreateFilesPassRequestObject) (api.CreateFilesPassResponseObject, error) {
	way, err := s.control.FilesWay(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	if way.URL == "" {
		return api.CreateFilesPass201JSONResponse{URL: "/v1/workspaces/" + r.WorkspaceID + "/files"}, nil
	}
	return api.CreateFilesPass201JSONResponse{URL: way.URL, Token: way.Token, ExpiresAt: way.ExpiresAt, TLS: dataTLS(way)}, nil
}

func dataTLS(w controller.Way) api.DataTLS {
	if w.Authority == "" {
		return api.DataTLS{}
	}
	return api.DataTLS{Authority: w.Authority, ServerName: w.ServerName}
}
