package httpapi

import (
	"context"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
)

// CollectStore serves POST /v1/store/gc.
func (s *server) CollectStore(ctx context.Context, r api.CollectStoreRequestObject) (api.CollectStoreResponseObject, error) {
	if err := s.control.StoreConfigured(); err != nil {
		return nil, err
	}
	if !r.Params.DryRun {
		record := controller.AuditRecord{ProjectID: controller.SystemProject, Object: "store", Outcome: controller.AuditAccepted}
		if err := s.control.Audit(ctx, record); err != nil {
			return nil, err
		}
	}
	g, err := s.control.CollectGarbage(ctx, r.Params.DryRun)
	if err != nil {
		return nil, err
	}
	return api.CollectStore200JSONResponse{
		DryRun: g.DryRun, Condemned: g.Condemned, Waiting: g.Waiting, Objects: g.Objects, Bytes: g.Bytes,
		DebrisWaiting: g.DebrisWaiting, DebrisObjects: g.DebrisObjects, DebrisBytes: g.DebrisBytes, More: g.More,
	}, nil
}

// CheckStore serves GET /v1/store/check.
func (s *server) CheckStore(ctx context.Context, _ api.CheckStoreRequestObject) (api.CheckStoreResponseObject, error) {
	r, err := s.control.CheckStore(ctx)
	if err != nil {
		return nil, err
	}
	object := func(o controller.StoredObject) api.StoreObject { return api.StoreObject{Key: o.Key, Bytes: o.Bytes} }
	return api.CheckStore200JSONResponse{
		Sound: r.Sound(), Objects: r.Objects, Bytes: r.Bytes, Uploading: r.Uploading, Debris: r.Debris, Truncated: r.Truncated,
		Missing: convert(r.Missing, object), Resized: convert(r.Resized, object), Foreign: convert(r.Foreign, object),
	}, nil
}
