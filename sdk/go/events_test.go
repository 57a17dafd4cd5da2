package coppice_test

import (
	"errors"
	"fmt"
	"net/http"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestEventsGoOn loses the connection after each event and continues with the event's id, until the server does not
// keep that event any more.
func TestEventsGoOn(t *testing.T) {
	t.Parallel()
	var asked []string
	var connections atomic.Int32
	c := serve(t, http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked = append(asked, r.Header.Get("Last-Event-ID")+" "+r.URL.RawQuery)
		n := connections.Add(1)
		if n == 3 {
			problem(w, api.Problem{Status: http.StatusGone, Code: "EVENTS_EXPIRED", Detail: "too old"})
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		fmt.Fprintf(w, ": hello\nretry: 1000\nid: %d\n\n", 10*n-1)
		fmt.Fprintf(w, "id: %d\nevent: workspace.ready\ndata: {\"id\":\"%d\",\"type\":\"workspace.ready\",\ndata: \"data\":{\"name\":\"main\"}}\n\n", 10*n, 10*n)
		fmt.Fprintf(w, ": alive\nid: %d\n\n", 10*n+5)
	}))
	ready := 0
	var got []string
	var last error
	for e, err := range c.Events(t.Context(), coppice.EventFilter{Types: []string{"workspace"}, Ready: func() { ready++ }}) {
		if last = err; err == nil {
			got = append(got, e.ID+" "+e.Type+" "+e.Data.Name)
		}
	}
	if diff := cmp.Diff([]string{"10 workspace.ready main", "20 workspace.ready main"}, got); diff != "" || ready != 1 {
		t.Errorf("ready %d, events (-want +got):\n%s", ready, diff)
	}
	if diff := cmp.Diff([]string{" type=workspace", "15 type=workspace", "25 type=workspace"}, asked); diff != "" {
		t.Errorf("asked (-want +got):\n%s", diff)
	}
	if !errors.Is(last, coppice.CodeEventsExpired) {
		t.Errorf("ended with %v", last)
	}
}
