package coppice_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/api"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// keyed is a server with one answer for each try; it records the keys of the tries.
type keyed struct {
	mu    sync.Mutex
	tries []func(http.ResponseWriter)
	keys  []string
}

func (k *keyed) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	k.mu.Lock()
	k.keys = append(k.keys, r.Method+" "+r.Header.Get("Idempotency-Key"))
	try := k.tries[min(len(k.keys), len(k.tries))-1]
	k.mu.Unlock()
	try(w)
}

func hangUp(w http.ResponseWriter) {
	if conn, _, err := http.NewResponseController(w).Hijack(); err == nil {
		_ = conn.Close()
	}
}

func answer(status int, v any) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) {
		w.WriteHeader(status)
		_ = json.NewEncoder(w).Encode(v)
	}
}

func refuse(p api.Problem) func(http.ResponseWriter) {
	return func(w http.ResponseWriter) { problem(w, p) }
}

// TestCreationIsRepeatedUnderItsKey loses answers of creating requests: each request is repeated with the same key.
func TestCreationIsRepeatedUnderItsKey(t *testing.T) {
	t.Parallel()
	created := answer(201, api.Workspace{ID: "ws_x"})
	ended := answer(200, api.Operation{ID: "op_x", State: api.OperationSucceeded, Result: json.RawMessage(`{"id":"ws_x"}`)})
	for name, c := range map[string]struct {
		tries []func(http.ResponseWriter)
		keyed int // tries that carry the key; later ones ask for the operation
		code  coppice.Code
	}{
		"the connection is lost":       {[]func(http.ResponseWriter){hangUp, hangUp, created}, 3, ""},
		"the database is away":         {[]func(http.ResponseWriter){refuse(api.Problem{Status: 503, Code: "DATABASE_UNAVAILABLE"}), created}, 2, ""},
		"a proxy is lost":              {[]func(http.ResponseWriter){answer(502, "bad gateway"), created}, 2, ""},
		"it was heard and goes on":     {[]func(http.ResponseWriter){hangUp, refuse(api.Problem{Status: 409, Code: "IDEMPOTENCY_IN_PROGRESS", OperationID: "op_x"}), ended}, 2, ""},
		"it was heard, nothing to ask": {[]func(http.ResponseWriter){hangUp, refuse(api.Problem{Status: 409, Code: "IDEMPOTENCY_IN_PROGRESS"}), created}, 3, ""},
		"its operation failed":         {[]func(http.ResponseWriter){refuse(api.Problem{Status: 503, Code: "FORK_FAILED", OperationID: "op_x"})}, 1, coppice.CodeForkFailed},
		"it is refused":                {[]func(http.ResponseWriter){refuse(api.Problem{Status: 409, Code: "NAME_TAKEN"})}, 1, coppice.CodeNameTaken},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			k := &keyed{tries: c.tries}
			client := serve(t, k)
			got, err := client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{})
			if c.code == "" && (err != nil || got.ID != "ws_x") || c.code != "" && !errors.Is(err, c.code) {
				t.Errorf("%+v, %v", got, err)
			}
			if len(k.keys) != len(c.tries) || len(k.keys[0]) < len("POST ")+20 {
				t.Fatalf("tries: %q", k.keys)
			}
			for i, key := range k.keys {
				if want := i < c.keyed; want != (key == k.keys[0]) {
					t.Errorf("try %d: %q", i, key)
				}
			}
			k.tries = []func(http.ResponseWriter){created}
			if _, err := client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{}); err != nil || k.keys[len(k.keys)-1] == k.keys[0] {
				t.Errorf("another call has the same key: %q, %v", k.keys, err)
			}
			mine := coppice.WithIdempotencyKey(t.Context(), "mine")
			if _, err := client.Exec(mine, "ws_x", coppice.ExecRequest{}); err != nil || k.keys[len(k.keys)-1] != "POST mine" {
				t.Errorf("the caller's key: %q, %v", k.keys, err)
			}
		})
	}
}

// TestInterruptedCallNamesItsOperation ends the context of a creating call while the server works on it. The client then asks under the same
// key what became of it, and starts nothing new.
func TestInterruptedCallNamesItsOperation(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		answer    func(http.ResponseWriter) // to the question
		operation coppice.OperationID       // that goes on; empty: the call succeeds
	}{
		"another request waits for it": {refuse(api.Problem{Status: 409, Code: "IDEMPOTENCY_IN_PROGRESS", OperationID: "op_x"}), "op_x"},
		"it goes on":                   {answer(202, api.Operation{ID: "op_x", State: api.OperationRunning}), "op_x"},
		"it has succeeded":             {answer(201, api.Workspace{ID: "ws_x"}), ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			heard := make(chan struct{})
			ctx, cancel := context.WithCancel(t.Context())
			first := ""
			srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				key := r.Header.Get("Idempotency-Key")
				if r.URL.Query().Get("wait") != "0" {
					first = key
					_, _ = io.Copy(io.Discard, r.Body) // then the server notices that the client has gone
					close(heard)
					<-r.Context().Done()
					return
				}
				if key != first || key == "" {
					t.Errorf("key %q, the first request had %q", key, first)
				}
				c.answer(w)
			}))
			t.Cleanup(srv.Close)
			go func() {
				<-heard
				cancel()
			}()
			client, err := coppice.New(coppice.Config{Server: srv.URL})
			if err != nil {
				t.Fatal(err)
			}
			got, err := client.CreateWorkspace(ctx, coppice.CreateWorkspaceRequest{})
			if c.operation == "" {
				if err != nil || got.ID != "ws_x" {
					t.Errorf("got %+v, %v", got, err)
				}
				return
			}
			unfinished, ok := errors.AsType[*coppice.UnfinishedError](err)
			if !ok || unfinished.OperationID != c.operation || !errors.Is(err, context.Canceled) {
				t.Errorf("got %v", err)
			}
		})
	}
}
