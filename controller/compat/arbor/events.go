package arbor

import (
	"encoding/json"
	"io"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// eventPause is the longest time without a line: proxies and clients take silence for the end.
const eventPause = 15 * time.Second

// events follows the events of a workspace, as server-sent events. A client that sends the id of the last event that it has seen
// (Last-Event-ID) misses none.
func (l *layer) events(w http.ResponseWriter, r *http.Request) {
	ctx, c, err := l.caller(r)
	if err == nil {
		_, err = c.Workspace(ctx, r.PathValue("id"))
	}
	if err != nil {
		l.fail(w, r, err)
		return
	}
	leave, err := l.streams.enter(c.key)
	if err != nil {
		writeFailure(w, err)
		return
	}
	defer leave()
	shared.Unhurry(w)
	stream := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	send := func(line string) bool {
		_ = stream.SetWriteDeadline(time.Now().Add(answerTime)) // fails only without a connection
		_, err := io.WriteString(w, line+"\n\n")
		return err == nil && stream.Flush() == nil
	}
	if !send(": events") {
		return
	}
	found := make(chan coppice.Event)
	go func() {
		defer close(found)
		filter := coppice.EventFilter{WorkspaceID: r.PathValue("id"), After: r.Header.Get("Last-Event-ID")}
		for event, err := range c.Events(ctx, filter) {
			if err != nil {
				return
			}
			select {
			case found <- event:
			case <-ctx.Done():
				return
			}
		}
	}()
	beat := time.NewTicker(eventPause)
	defer beat.Stop()
	for {
		select {
		case event, ok := <-found:
			if !ok {
				return
			}
			b, err := json.Marshal(event)
			if err != nil || !send("id: "+event.ID+"\nevent: "+event.Type+"\ndata: "+string(b)) {
				return
			}
		case <-beat.C:
			if !send(": beat") {
				return
			}
		case <-ctx.Done():
			return
		}
	}
}
