// Package sse writes events as server-sent events.
package sse

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strconv"
	"time"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/events"
)

// LastID reads where to begin: -1 is now.
func LastID(r *http.Request, invalid func(field, detail string) error) (int64, error) {
	id := r.Header.Get("Last-Event-ID")
	if id == "" {
		id = r.URL.Query().Get("after")
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

// Encode writes a batch. The bare id at its end says how far the stream has come, whatever the filter left out.
func Encode(list []events.Event, cursor int64) []byte {
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

// Writer sends batches to a client that must take each in time.
type Writer struct {
	http    http.ResponseWriter
	control *http.ResponseController
	within  time.Duration
}

// New makes a writer. A client that does not take a batch within the time is cut off.
func New(w http.ResponseWriter, within time.Duration) *Writer {
	return &Writer{http: w, control: http.NewResponseController(w), within: within}
}

// Send writes a batch at once.
func (w *Writer) Send(b []byte) error {
	_ = w.control.SetWriteDeadline(time.Now().Add(w.within)) // not every test's writer has a connection
	if _, err := w.http.Write(b); err != nil {
		return err
	}
	return w.control.Flush()
}
