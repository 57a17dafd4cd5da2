package arbor

import (
	"context"
	"encoding/json"
	"io"
	"net/http"
	"time"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// eventPause is the longest time without a line: proxies and clients take silence for the end.
const eventPause = 15 * time.Second

// found is an event, or why there are no more.
type found struct {
	event coppice.Event
	err   error
}

// events follows the events of a workspace, as server-sent events. A client that sends the id of the last event that it has seen
// (Last-Event-ID) misses none.
func (l *layer) events(w http.ResponseWriter, r *http.Request) {
	if r.Method != http.MethodGet { // the mux gives HEAD to GET
		writeFailure(w, shared.Failf(http.StatusMethodNotAllowed, "%s does not accept the method %s", shared.Clip(r.URL.Path), r.Method))
		return
	}
	ctx, c, err := l.caller(r)
	if err != nil {
		l.fail(w, r, err)
		return
	}
	if err := l.follow(ctx, w, r, c); err != nil {
		l.fail(w, r, err)
	}
}

// follow answers with the events. It returns an error only if it has written nothing.
func (l *layer) follow(ctx context.Context, w http.ResponseWriter, r *http.Request, c caller) error {
	id := r.PathValue("id")
	if _, err := c.Workspace(ctx, id); err != nil {
		return err
	}
	key, err := c.Self(ctx)
	if err != nil {
		return err
	}
	leave, err := l.streams.enter(key.ID)
	if err != nil {
		return err
	}
	defer leave()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	ready, list := make(chan struct{}, 1), make(chan found)
	go read(ctx, c, coppice.EventFilter{WorkspaceID: id, After: r.Header.Get("Last-Event-ID"), Ready: func() {
		select {
		case ready <- struct{}{}:
		default: // the stream was connected again
		}
	}}, list)
	select {
	case <-ready:
	case first := <-list:
		if first.err == nil { // an event before the stream is ready: it stays the first
			return l.send(ctx, w, list, &first.event)
		}
		return first.err
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return l.send(ctx, w, list, nil)
}

// read sends the events of a filter to a channel, and last why there are no more.
func read(ctx context.Context, c caller, filter coppice.EventFilter, to chan<- found) {
	for event, err := range c.Events(ctx, filter) {
		select {
		case to <- found{event, err}:
		case <-ctx.Done():
			return
		}
	}
}

// send writes events until there are no more, or the client has left.
func (l *layer) send(ctx context.Context, w http.ResponseWriter, list <-chan found, first *coppice.Event) error {
	shared.Unhurry(w)
	stream := http.NewResponseController(w)
	w.Header().Set("Content-Type", "text/event-stream")
	w.Header().Set("Cache-Control", "no-store")
	write := func(line string) bool {
		_ = stream.SetWriteDeadline(time.Now().Add(answerTime)) // fails only without a connection
		_, err := io.WriteString(w, line+"\n\n")
		return err == nil && stream.Flush() == nil
	}
	going := write(": events") && (first == nil || write(lines(*first)))
	beat := time.NewTicker(eventPause)
	defer beat.Stop()
	for going {
		select {
		case next := <-list:
			if next.err != nil {
				e, _ := envelopeOf(next.err)
				b, _ := json.Marshal(e) // it can be encoded
				write("event: error\ndata: " + string(b))
				return nil
			}
			going = write(lines(next.event))
		case <-beat.C:
			going = write(": beat")
		case <-ctx.Done():
			return nil
		}
	}
	return nil
}

// lines are an event in the form of server-sent events.
func lines(e coppice.Event) string {
	b, _ := json.Marshal(e) // it can be encoded
	return "id: " + e.ID + "\nevent: " + e.Type + "\ndata: " + string(b)
}
