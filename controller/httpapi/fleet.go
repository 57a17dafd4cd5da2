package httpapi

import (
	"context"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
)

// ListImages serves GET /v1/images.
func (s *server) ListImages(ctx context.Context, r api.ListImagesRequestObject) (api.ListImagesResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Fleet().Images(ctx, projectOf(ctx), p)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(i controller.Image) string { return string(i.ID) + "/" + i.Name })
	out := api.ListImages200JSONResponse{Items: convert(list, imageOf), NextCursor: next}
	if r.Params.Cursor == "" {
		out.Built, err = s.Built(ctx)
	}
	return out, err
}

// ListRunners serves GET /v1/runners.
func (s *server) ListRunners(ctx context.Context, r api.ListRunnersRequestObject) (api.ListRunnersResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Fleet().Runners(ctx, projectOf(ctx), p)
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(v controller.Runner) string { return string(v.Info.RunnerID) })
	return api.ListRunners200JSONResponse{Items: convert(list, runnerOf), NextCursor: next}, nil
}

// GetHealth serves GET /healthz.
func (s *server) GetHealth(context.Context, api.GetHealthRequestObject) (api.GetHealthResponseObject, error) {
	return api.GetHealth200JSONResponse{Status: api.HealthOK, Version: s.version}, nil
}

// GetReadiness serves GET /readyz.
func (s *server) GetReadiness(ctx context.Context, _ api.GetReadinessRequestObject) (api.GetReadinessResponseObject, error) {
	if err := s.control.Ready(ctx); err != nil {
		return nil, err
	}
	return api.GetReadiness200JSONResponse{Status: api.HealthOK, Version: s.version}, nil
}
