package clitest

import (
	"context"

	"github.com/coppice-dev/coppice/api"
)

func (f *Server) GetPrepared(_ context.Context, r api.GetPreparedRequestObject) (api.GetPreparedResponseObject, error) {
	return api.GetPrepared200JSONResponse{CheckpointID: r.CheckpointID, Asked: 3, Ready: 2, Hits: 5, GivenUp: f.FailChild, ExpiresAt: Dawn}, nil
}

func (f *Server) PutPrepared(_ context.Context, r api.PutPreparedRequestObject) (api.PutPreparedResponseObject, error) {
	f.note(*r.Body)
	return api.PutPrepared200JSONResponse{CheckpointID: r.CheckpointID, Asked: r.Body.Count}, nil
}
