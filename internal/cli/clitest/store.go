package clitest

import (
	"context"

	"github.com/coppice-dev/coppice/api"
)

func (f *Server) CollectStore(_ context.Context, r api.CollectStoreRequestObject) (api.CollectStoreResponseObject, error) {
	f.note(r.Params.DryRun)
	f.mu.Lock()
	defer f.mu.Unlock()
	return api.CollectStore200JSONResponse{
		DryRun: r.Params.DryRun, Condemned: 1, Waiting: 2, Objects: 3, Bytes: 4 << 20, DebrisWaiting: 5, DebrisObjects: 6, DebrisBytes: 7 << 20, More: len(f.Requests) < 2,
	}, nil
}

func (f *Server) CheckStore(context.Context, api.CheckStoreRequestObject) (api.CheckStoreResponseObject, error) {
	out := api.CheckStore200JSONResponse{Sound: !f.FailChild, Objects: 5, Bytes: 6 << 20, Uploading: 7, Debris: 8, Missing: []api.StoreObject{}, Resized: []api.StoreObject{}, Foreign: []api.StoreObject{}}
	if f.FailChild {
		out.Missing = append(out.Missing, api.StoreObject{Key: "v1/a", Bytes: 1 << 10})
		out.Foreign, out.Truncated = append(out.Foreign, api.StoreObject{Key: "v1/b\x1b", Bytes: 2 << 10}), true
	}
	return out, nil
}

func (f *Server) CheckStoreData(_ context.Context, r api.CheckStoreDataRequestObject) (api.CheckStoreDataResponseObject, error) {
	f.note(r.Params)
	out := api.CheckStoreData200JSONResponse{Checkpoints: 2, Frames: 10, Bytes: 1 << 20, Problems: []api.StoreProblem{}}
	if f.FailChild {
		out.Problems = append(out.Problems, api.StoreProblem{Object: "v1/p/c/1/pack-0", Code: "CHECKPOINT_CORRUPT", Message: "not what was stored\x1b", Checkpoints: []string{"ckpt_a", "ckpt_b"}, NeededBy: 5})
	}
	if r.Params.After == "" {
		out.Next, out.Remaining = "more", 1
	}
	return out, nil
}
