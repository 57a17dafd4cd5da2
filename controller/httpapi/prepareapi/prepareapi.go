// Package prepareapi serves what is asked for of prepared machines: the routes
// /v1/checkpoints/{id}/prepared.
package prepareapi

import (
	"context"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/prepare"
	"github.com/coppice-dev/coppice/core"
)

// Handlers are the handlers of the routes.
type Handlers struct {
	Machines *prepare.Manager
	Project  func(ctx context.Context) core.ProjectID // of the request
}

// GetPrepared serves GET /v1/checkpoints/{id}/prepared.
func (h Handlers) GetPrepared(ctx context.Context, r api.GetPreparedRequestObject) (api.GetPreparedResponseObject, error) {
	got, err := h.Machines.Get(ctx, h.Project(ctx), core.CheckpointID(r.CheckpointID))
	if err != nil {
		return nil, err
	}
	return api.GetPrepared200JSONResponse(preparedOf(r.CheckpointID, got)), nil
}

// PutPrepared serves PUT /v1/checkpoints/{id}/prepared.
func (h Handlers) PutPrepared(ctx context.Context, r api.PutPreparedRequestObject) (api.PutPreparedResponseObject, error) {
	want := prepare.Wanted{Count: r.Body.Count}
	if ttl := r.Body.TTLSeconds; ttl != nil {
		want.TTL = time.Duration(*ttl) * time.Second
	}
	got, err := h.Machines.Set(ctx, h.Project(ctx), core.CheckpointID(r.CheckpointID), want)
	if err != nil {
		return nil, err
	}
	return api.PutPrepared200JSONResponse(preparedOf(r.CheckpointID, got)), nil
}

func preparedOf(id api.CheckpointID, s prepare.State) api.Prepared {
	return api.Prepared{
		CheckpointID: id, Asked: s.Asked, ExpiresAt: s.ExpiresAt, RunnerID: api.RunnerID(s.RunnerID), Ready: s.Ready, Max: s.Max, GivenUp: s.GivenUp,
		Hits: s.Counts.Hits, Misses: s.Counts.Misses, Wasted: s.Counts.Wasted,
		TakenCPUSeconds: s.Counts.TakenCPUSeconds, WastedCPUSeconds: s.Counts.WastedCPUSeconds, MemoryBytes: s.MemoryBytes,
	}
}
