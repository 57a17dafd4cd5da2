package coppice_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestStreamStep breaks the first answer. The client asks again under the same key, and gives each result once.
func TestStreamStep(t *testing.T) {
	t.Parallel()
	var asked atomic.Int64
	keys := make(chan string, 2)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		var req coppice.StepRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil || len(req.Actions) != 2 || r.Header.Get("Accept") != "application/x-ndjson" {
			t.Errorf("%+v, %v, %v", req, err, r.Header)
		}
		keys <- r.Header.Get("Idempotency-Key")
		w.Header().Set("Content-Type", "application/x-ndjson")
		fmt.Fprintln(w, `{"operation_id":"op_1"}`)
		fmt.Fprintln(w, `{"operation_id":"op_1","action":{"index":1,"kept":"nothing","timings":[]}}`)
		if asked.Add(1) == 1 {
			if err := http.NewResponseController(w).Flush(); err != nil {
				t.Error(err)
			}
			panic(http.ErrAbortHandler)
		}
		fmt.Fprintln(w, `{"operation_id":"op_1","action":{"index":0,"kept":"checkpoint","checkpoint_id":"ckpt_1","timings":[]}}`)
		fmt.Fprintln(w, `{"operation_id":"op_1","state":"failed","problem":{"code":"OPERATION_CANCELED","message":"canceled"}}`)
	}))
	t.Cleanup(server.Close)
	c, err := coppice.New(coppice.Config{Server: server.URL})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	var seen []string
	var last error
	for e, err := range c.StreamStep(t.Context(), "ckpt_0", coppice.StepRequest{Actions: make([]coppice.StepAction, 2)}) {
		switch {
		case e.Action != nil:
			seen = append(seen, fmt.Sprint(e.Action.Index, e.Action.Kept))
		default:
			seen = append(seen, e.OperationID+string(e.State))
		}
		last = err
	}
	if want := []string{"op_1", "1nothing", "0checkpoint", "op_1failed"}; !slices.Equal(seen, want) {
		t.Errorf("%q, want %q", seen, want)
	}
	if !errors.Is(last, coppice.Code("OPERATION_CANCELED")) {
		t.Error(last)
	}
	if a, b := <-keys, <-keys; a == "" || a != b {
		t.Errorf("the keys %q and %q", a, b)
	}
}
