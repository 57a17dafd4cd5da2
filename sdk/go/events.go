package coppice

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"net/http"
	"net/url"
	"time"
)

// EventFilter narrows Events. Its zero value follows everything that happens in the project from now on.
type EventFilter struct {
	After       string       // id of the last known event; "0" begins with the oldest event that is kept
	Tree        CheckpointID // any checkpoint of the wanted tree
	WorkspaceID WorkspaceID
	Types       []string // whole types, such as "workspace.ready", or objects, such as "checkpoint"
	Present     bool     // end after all past events, instead of following
	Ready       func()   // called once the stream has begun: every later event is in it
}

func (f EventFilter) query() url.Values {
	q := url.Values{}
	set(q, "tree", f.Tree)
	set(q, "workspace_id", f.WorkspaceID)
	for _, t := range f.Types {
		q.Add("type", t)
	}
	if f.Present {
		q.Set("follow", "false")
	}
	return q
}

const (
	eventSilence = 50 * time.Second // the server sends something at least every 15 s
	eventPause   = time.Second      // pause before the client connects again
	maxEventLine = 1 << 20
)

// Events yields events, each once and in order, until ctx ends. When the connection breaks, it connects again with the
// id of the last event. An error ends it: CodeEventsExpired if it was away for longer than events are kept.
func (c *Client) Events(ctx context.Context, f EventFilter) iter.Seq2[Event, error] {
	return func(yield func(Event, error) bool) {
		s := &eventStream{c: c, f: f, last: f.After, yield: yield}
		for {
			err := s.connect(ctx)
			var refused *Error
			switch {
			case s.stopped:
				return
			case ctx.Err() != nil:
				yield(Event{}, context.Cause(ctx))
				return
			case err == nil && f.Present:
				return
			case errors.As(err, &refused) && refused.Status < http.StatusInternalServerError && refused.Status != http.StatusTooManyRequests:
				yield(Event{}, err)
				return
			}
			timer := time.NewTimer(eventPause)
			select {
			case <-ctx.Done():
			case <-timer.C:
			}
			timer.Stop()
		}
	}
}

type eventStream struct {
	c       *Client
	f       EventFilter
	last    string
	yield   func(Event, error) bool
	stopped bool // yield wants no more events
}

var errSilent = errors.New("the server has been silent for too long")

// connect reads one connection to its end.
func (s *eventStream) connect(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	r := get("v1", "events").with(s.f.query())
	if s.last != "" {
		r.header = http.Header{"Last-Event-Id": {s.last}}
	}
	res, err := s.c.send(ctx, r)
	if err != nil {
		return err
	}
	defer res.Body.Close()
	watch := time.AfterFunc(eventSilence, func() { cancel(errSilent) })
	defer watch.Stop()
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(make([]byte, 0, 4096), maxEventLine)
	var data []byte
	for lines.Scan() {
		watch.Reset(eventSilence)
		if len(lines.Bytes()) == 0 { // the end of an event
			if err := s.dispatch(data); err != nil || s.stopped {
				return err
			}
			data = nil
			continue
		}
		name, value, _ := bytes.Cut(lines.Bytes(), []byte(":"))
		value = bytes.TrimPrefix(value, []byte(" "))
		switch string(name) {
		case "id":
			s.last = string(value)
		case "data":
			data = append(data, value...)
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("read events: %w", err)
	}
	return nil
}

func (s *eventStream) dispatch(data []byte) error {
	if s.f.Ready != nil {
		s.f.Ready()
		s.f.Ready = nil
	}
	if len(data) == 0 { // a bare id
		return nil
	}
	var e Event
	if err := json.Unmarshal(data, &e); err != nil {
		return fmt.Errorf("decode an event: %w", err)
	}
	s.stopped = !s.yield(e, nil)
	return nil
}
