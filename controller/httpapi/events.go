package httpapi

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/httpapi/sse"
	"github.com/coppice-dev/coppice/controller/httpapi/strictjson"
	"github.com/coppice-dev/coppice/core"
)

// pace of the streams of events and of steps.
type pace struct {
	heartbeat time.Duration // between signs of life when nothing happens
	write     time.Duration // a client that has not taken a batch by then is cut off
}

var defaultPace = pace{heartbeat: 15 * time.Second, write: 10 * time.Second}

// events streams what happens, as server-sent events.
func (s *server) events(c echo.Context) error {
	if c.Request().ContentLength != 0 {
		return strictjson.Malformed("this route takes none")
	}
	after, err := sse.LastID(c.Request(), invalid)
	if err != nil {
		return err
	}
	ctx, query := c.Request().Context(), c.QueryParams()
	stream, err := s.control.Events.Stream(ctx, projectOf(ctx), core.CheckpointID(query.Get("tree")),
		events.Filter{WorkspaceID: core.WorkspaceID(query.Get("workspace_id")), Types: query["type"]}, after)
	if err != nil {
		return err
	}
	defer stream.Close()
	h := c.Response().Header()
	h.Set(headerContent, "text/event-stream")
	h.Set("Cache-Control", "no-store")
	h.Set("X-Accel-Buffering", "no") // proxies must not collect
	c.Response().WriteHeader(http.StatusOK)
	w := sse.New(c.Response(), s.pace.write)
	// A bare id is no event, but what a client that is cut off now comes back with.
	if err := w.Send(fmt.Appendf(nil, "retry: 1000\nid: %d\n\n", stream.Cursor())); err != nil {
		return err
	}
	follow := query.Get("follow") == "" || isTrue(query.Get("follow"))
	for {
		list, err := s.nextEvents(ctx, stream, follow)
		switch {
		case ctx.Err() != nil:
			return nil // the client has gone
		case err != nil:
			s.log.InfoContext(ctx, "event stream ended", "code", core.CodeOf(err), "err", err)
			return nil // it comes back with its last id and is told why then
		case len(list) == 0 && !follow:
			return nil
		}
		if err := w.Send(sse.Encode(list, stream.Cursor())); err != nil {
			s.log.InfoContext(ctx, "event stream cut off", "err", err)
			panic(http.ErrAbortHandler)
		}
	}
}

// nextEvents waits for events, no longer than until the next sign of life is due.
func (s *server) nextEvents(ctx context.Context, stream *events.Stream, follow bool) ([]events.Event, error) {
	wait, cancel := context.WithTimeout(ctx, s.pace.heartbeat)
	defer cancel()
	list, err := stream.Next(wait, follow)
	if err != nil && wait.Err() != nil && ctx.Err() == nil {
		return nil, nil
	}
	return list, err
}
