package httpapi

import (
	"context"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
)

// CollectStore serves POST /v1/store/gc.
func (s *server) CollectStore(ctx context.Context, r api.CollectStoreRequestObject) (api.CollectStoreResponseObject, error) {
	if err := s.control.StoreConfigured(); err != nil {
		return nil, err
	}
	if !r.Params.DryRun {
		record := controller.AuditRecord{ProjectID: controller.SystemProject, Object: "store", Outcome: controller.AuditAccepted}
		if err := s.control.Tenancy.Audit(ctx, record); err != nil {
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

// CheckStoreData serves GET /v1/store/check/data.
func (s *server) CheckStoreData(ctx context.Context, r api.CheckStoreDataRequestObject) (api.CheckStoreDataResponseObject, error) {
	part := snapshotstore.Part{Which: uint64(max(0, r.Params.Part)), Of: uint64(max(0, r.Params.Of))}
	if part == (snapshotstore.Part{}) { // neither was given
		part = snapshotstore.Whole
	}
	d, err := s.control.CheckStoreData(ctx, part, r.Params.After)
	if err != nil {
		return nil, err
	}
	return api.CheckStoreData200JSONResponse{Checkpoints: d.Checkpoints, Remaining: d.Remaining, Frames: d.Frames, Bytes: d.Bytes, Next: d.Next, Problems: convert(d.Problems, func(p controller.StoreProblem) api.StoreProblem {
		return api.StoreProblem{
			Object: p.Object, Code: string(p.Code), Message: p.Message, NeededBy: p.Needed,
			Checkpoints: convert(p.Checkpoints, func(id core.CheckpointID) string { return string(id) }),
		}
	})}, nil
}
