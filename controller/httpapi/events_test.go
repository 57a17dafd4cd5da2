package httpapi_test

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/api"
	"github.com/coppice-dev/coppice/controller/httpapi"
)

// sse is an open event stream.
type sse struct {
	t     *testing.T
	lines *bufio.Scanner
	last  string
	end   func()
}

func (w *world) follow(t *testing.T, query, last string) *sse {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), watchdog)
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, w.url+"/v1/events"+query, http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("Authorization", "Bearer "+apiKey)
	if last != "" {
		req.Header.Set("Last-Event-ID", last)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	end := func() {
		cancel()
		_ = res.Body.Close()
	}
	t.Cleanup(end)
	if res.StatusCode != http.StatusOK || res.Header.Get("Content-Type") != "text/event-stream" || res.Header.Get("Cache-Control") != "no-store" {
		t.Fatalf("%s: %s %v", query, res.Status, res.Header)
	}
	return &sse{t: t, lines: bufio.NewScanner(res.Body), end: end}
}

// next reads one block: an event, or a bare id.
func (s *sse) next() (api.Event, bool) {
	s.t.Helper()
	var e api.Event
	kind, data := "", ""
	for s.lines.Scan() {
		if s.lines.Text() == "" {
			if data != "" {
				if err := json.Unmarshal([]byte(data), &e); err != nil || e.ID != s.last || e.Type != kind {
					s.t.Fatalf("%v: id %s, event %s, data %s", err, s.last, kind, data)
				}
			}
			return e, true
		}
		name, value, _ := strings.Cut(s.lines.Text(), ": ")
		switch name {
		case "id":
			s.last = value
		case "event":
			kind = value
		case "data":
			data = value
		}
	}
	return e, false
}

// event reads up to the next event.
func (s *sse) event() api.Event {
	s.t.Helper()
	for {
		e, ok := s.next()
		if !ok {
			s.t.Fatalf("the stream ended: %v", s.lines.Err())
		}
		if e.ID != "" {
			return e
		}
	}
}

// TestEventStream follows, breaks off, and comes back with the last id.
func TestEventStream(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.follow(t, "?type=workspace", "")
	if _, ok := s.next(); !ok || s.last == "" {
		t.Fatal("the stream does not begin with an id")
	}
	start := s.last
	ws := w.create("main")
	for _, want := range []string{"workspace.creating", "workspace.restoring", "workspace.ready"} {
		if e := s.event(); e.Type != want || e.WorkspaceID != ws.ID || e.Data.Name != "main" || e.CreatedAt.IsZero() {
			t.Fatalf("got %+v, want %s", e, want)
		}
	}
	s.end()
	cp := w.checkpoint(ws.ID)
	back := w.follow(t, "?tree="+cp.ID, s.last)
	for _, want := range []string{"operation.succeeded", "workspace.checkpointing", "checkpoint.capturing", "checkpoint.captured", "workspace.ready", "operation.succeeded"} {
		if e := back.event(); want == "operation.succeeded" && e.Type != want || e.RootID == "" {
			t.Errorf("got %+v, want %s", e, want)
		}
	}
	present := w.follow(t, "?follow=false&after="+start, "")
	n := 0
	for {
		e, ok := present.next()
		if !ok {
			break
		}
		if e.ID != "" {
			n++
		}
	}
	if n != 9 {
		t.Errorf("%d events up to the present, want 9", n)
	}
	if p := w.do(call{method: "GET", path: "/v1/events", header: map[string]string{"Last-Event-ID": "99999999"}}).problem(t); p.Status != http.StatusGone || p.Code != "EVENTS_EXPIRED" {
		t.Errorf("an id that never was: %+v", p)
	}
	for _, path := range []string{"?after=x", "?type=runner", "?tree=x", "?follow=perhaps", "?nonsense=1"} {
		if p := w.do(call{method: "GET", path: "/v1/events" + path}).problem(t); p.Status != http.StatusBadRequest {
			t.Errorf("%s: %+v", path, p)
		}
	}
	if p := w.do(call{method: "GET", path: "/v1/events", key: "-"}).problem(t); p.Status != http.StatusUnauthorized {
		t.Errorf("without a key: %+v", p)
	}
}

// TestEventStreamPace sees signs of life when nothing happens, and cuts off a client that does not read.
func TestEventStreamPace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var log syncBuffer
	serve := func(life, stall time.Duration) string {
		s := httptest.NewServer(httpapi.NewWithPace(w.control, slog.New(slog.NewTextHandler(&log, nil)), life, stall))
		t.Cleanup(s.Close)
		return s.URL
	}
	w.url = serve(20*time.Millisecond, watchdog)
	s := w.follow(t, "", "")
	for range 5 {
		if e, ok := s.next(); !ok || e.ID != "" || s.last == "" {
			t.Fatalf("got %+v, want a sign of life", e)
		}
	}
	s.end()

	// Megabytes of events. The client reads only the headers.
	conn, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", strings.TrimPrefix(serve(20*time.Millisecond, 200*time.Millisecond), "http://"))
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if err := conn.(*net.TCPConn).SetReadBuffer(4096); err != nil {
		t.Fatal(err)
	}
	if _, err := fmt.Fprintf(conn, "GET /v1/events?after=0 HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\n\r\n", apiKey); err != nil {
		t.Fatal(err)
	}
	db, err := pgx.Connect(t.Context(), w.dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = db.Close(context.WithoutCancel(t.Context())) }()
	if _, err := db.Exec(t.Context(), `
		INSERT INTO events (project_id, type, data) SELECT p.id, 'workspace.ready', jsonb_build_object('name', repeat('x', 4000))
		FROM projects p, generate_series(1, 4000) WHERE p.name = 'default'`); err != nil {
		t.Fatal(err)
	}
	deadline := time.NewTimer(watchdog)
	defer deadline.Stop()
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for !strings.Contains(log.String(), "event stream cut off") {
		select {
		case <-deadline.C:
			t.Fatal("it was not cut off")
		case <-tick.C:
		}
	}
}

// syncBuffer takes a log from several goroutines.
type syncBuffer struct {
	mu   sync.Mutex
	text strings.Builder
}

func (b *syncBuffer) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.Write(p)
}

func (b *syncBuffer) String() string {
	b.mu.Lock()
	defer b.mu.Unlock()
	return b.text.String()
}
