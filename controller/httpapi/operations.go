package httpapi

import (
	"context"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// GetOperation serves GET /v1/operations/{id}.
func (s *server) GetOperation(ctx context.Context, r api.GetOperationRequestObject) (api.GetOperationResponseObject, error) {
	a, err := s.control.Operation(ctx, projectOf(ctx), core.OperationID(r.OperationID), seconds(int64(r.Params.Wait)))
	if err == nil {
		err = s.withSteps(ctx, &a)
	}
	if err != nil {
		return nil, err
	}
	op, err := operationOf(a)
	return api.GetOperation200JSONResponse(op), err
}

// ListOperations serves GET /v1/operations.
func (s *server) ListOperations(ctx context.Context, r api.ListOperationsRequestObject) (api.ListOperationsResponseObject, error) {
	p, err := page(r.Params.Limit, r.Params.Cursor)
	if err != nil {
		return nil, err
	}
	list, err := s.control.Operations(ctx, projectOf(ctx), controller.OperationFilter{
		Page: p, WorkspaceID: core.WorkspaceID(r.Params.WorkspaceID), Checkpoint: core.CheckpointID(r.Params.CheckpointID), ClaimedBy: r.Params.IdempotencyKey,
		Kinds:  convert(r.Params.Kind, func(v api.OperationKind) controller.OperationKind { return controller.OperationKind(v) }),
		States: convert(r.Params.State, func(v api.OperationState) core.OperationState { return core.OperationState(v) }),
	})
	if err != nil {
		return nil, err
	}
	list, next := cut(list, p, func(o controller.Operation) string { return string(o.ID) })
	return api.ListOperations200JSONResponse{Items: convert(list, unfinishedOf), NextCursor: next}, nil
}

// CancelOperation serves POST /v1/operations/{id}/cancel.
func (s *server) CancelOperation(ctx context.Context, r api.CancelOperationRequestObject) (api.CancelOperationResponseObject, error) {
	a, err := s.control.CancelOperation(ctx, projectOf(ctx), core.OperationID(r.OperationID), waitOf(r.Params.Wait))
	if err == nil {
		err = s.withSteps(ctx, &a)
	}
	if err != nil {
		return nil, err
	}
	op, err := operationOf(a)
	if !a.Done {
		return api.CancelOperation202JSONResponse{AcceptedJSONResponse: api.AcceptedJSONResponse(op)}, err
	}
	return api.CancelOperation200JSONResponse(op), err
}
