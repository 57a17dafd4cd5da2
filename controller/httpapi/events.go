package httpapi

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/labstack/echo/v4"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/events"
	"github.com/coppice-dev/coppice/controller/httpapi/strictjson"
	"github.com/coppice-dev/coppice/core"
)

// pace of event streams.
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
	after, err := lastEvent(c)
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
	w := &sseWriter{http: c.Response(), control: http.NewResponseController(c.Response()), within: s.pace.write}
	// A bare id is no event, but what a client that is cut off now comes back with.
	if err := w.send(fmt.Appendf(nil, "retry: 1000\nid: %d\n\n", stream.Cursor())); err != nil {
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
		if err := w.send(encodeEvents(list, stream.Cursor())); err != nil {
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

// lastEvent reads where to begin: -1 is now.
func lastEvent(c echo.Context) (int64, error) {
	id := c.Request().Header.Get("Last-Event-ID")
	if id == "" {
		id = c.QueryParam("after")
	}
	if id == "" {
		return -1, nil
	}
	n, err := strconv.ParseInt(id, 10, 64)
	if err != nil || n < 0 {
		return 0, invalid("Last-Event-ID", "it is not the id of an event")
	}
	return n, nil
}

// encodeEvents writes a batch. The bare id at its end says how far the stream has come, whatever the filter left out.
func encodeEvents(list []events.Event, cursor int64) []byte {
	var b bytes.Buffer
	for _, e := range list {
		data, err := json.Marshal(eventOf(e))
		if err != nil { // data is what the database made
			continue
		}
		fmt.Fprintf(&b, "id: %d\nevent: %s\ndata: %s\n\n", e.ID, e.Type, data)
	}
	if len(list) == 0 || list[len(list)-1].ID != cursor {
		fmt.Fprintf(&b, ": alive\nid: %d\n\n", cursor)
	}
	return b.Bytes()
}

func eventOf(e events.Event) api.Event {
	out := api.Event{
		ID: strconv.FormatInt(e.ID, 10), Type: e.Type, CreatedAt: e.CreatedAt, WorkspaceID: string(e.WorkspaceID), CheckpointID: string(e.CheckpointID),
		RootID: string(e.Root), OperationID: string(e.OperationID),
	}
	_ = json.Unmarshal(e.Data, &out.Data) // likewise
	return out
}

// sseWriter sends batches to a client that must take each in time.
type sseWriter struct {
	http    http.ResponseWriter
	control *http.ResponseController
	within  time.Duration
}

func (w *sseWriter) send(b []byte) error {
	_ = w.control.SetWriteDeadline(time.Now().Add(w.within)) // not every test's writer has a connection
	if _, err := w.http.Write(b); err != nil {
		return err
	}
	return w.control.Flush()
}
