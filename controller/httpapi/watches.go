package httpapi

import (
	"context"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

const contentLines = "application/x-ndjson"

func watchOf(w controller.GuestWatch) api.Watch {
	return api.Watch{
		ID: string(w.ID), Path: w.Path, Recursive: w.Recursive, User: w.User, CreatedAt: w.CreatedAt, Last: w.Last, Incomplete: w.Incomplete, Ended: w.Ended,
	}
}

// CreateWatch serves POST /v1/workspaces/{id}/watches.
func (s *server) CreateWatch(ctx context.Context, r api.CreateWatchRequestObject) (api.CreateWatchResponseObject, error) {
	b := r.Body
	if err := needUser(b.User, map[string]string{"path": b.Path}); err != nil {
		return nil, err
	}
	var out controller.GuestWatch
	err := s.audited(ctx, r.WorkspaceID, map[string]string{"path": b.Path}, func() (err error) {
		req := controller.CreateWatch{Path: b.Path, User: b.User, Recursive: b.Recursive}
		out, err = s.control.CreateWatch(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), req)
		return err
	})
	if err != nil {
		return nil, err
	}
	return api.CreateWatch201JSONResponse(watchOf(out)), nil
}

// ListWatches serves GET /v1/workspaces/{id}/watches.
func (s *server) ListWatches(ctx context.Context, r api.ListWatchesRequestObject) (api.ListWatchesResponseObject, error) {
	list, err := s.control.Watches(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID))
	if err != nil {
		return nil, err
	}
	return api.ListWatches200JSONResponse{Items: convert(list, watchOf)}, nil
}

// DeleteWatch serves DELETE /v1/workspaces/{id}/watches/{watch_id}.
func (s *server) DeleteWatch(ctx context.Context, r api.DeleteWatchRequestObject) (api.DeleteWatchResponseObject, error) {
	err := s.audited(ctx, r.WorkspaceID, map[string]string{"watch": r.WatchID}, func() error {
		return s.control.DeleteWatch(ctx, projectOf(ctx), core.WorkspaceID(r.WorkspaceID), core.WatchID(r.WatchID))
	})
	return api.DeleteWatch204Response{}, err
}

func (s *server) watchEvents(c echo.Context) error {
	ctx := c.Request().Context()
	guest, err := s.control.Guest(ctx, projectOf(ctx), core.WorkspaceID(c.Param("workspace_id")))
	if err != nil {
		return err
	}
	return s.forward(c, guest, controller.PathWatches+"/"+c.Param("watch_id")+"/events", guestQuery(c, "after", "follow"))
}
