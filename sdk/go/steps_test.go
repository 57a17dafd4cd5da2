package coppice_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

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

// TestStepConformance carries out the table that all SDKs have in common; sdk/conformance/README.md says what its words mean.
func TestStepConformance(t *testing.T) {
	t.Parallel()
	for _, x := range stepCases(t) {
		t.Run(x.Name, func(t *testing.T) {
			t.Parallel()
			x.run(t, func(h http.Handler) coppice.Config {
				server := httptest.NewServer(h)
				t.Cleanup(server.Close)
				return coppice.Config{Server: server.URL}
			})
		})
	}
}

// TestStepSilence carries out the cases whose breaks are far apart: an answer that is cut falls silent instead, and the clock runs.
func TestStepSilence(t *testing.T) {
	t.Parallel()
	cases := slices.DeleteFunc(stepCases(t), func(x stepCase) bool { return !x.Apart })
	if len(cases) == 0 {
		t.Fatal("there is none")
	}
	for _, x := range cases {
		synctest.Test(t, func(t *testing.T) {
			x.run(t, func(h http.Handler) coppice.Config {
				return coppice.Config{Server: "http://test", Transport: silent{h}}
			})
		})
	}
}

// silent answers by a handler. An answer that the handler cuts is open until the client gives up on it.
type silent struct{ http.Handler }

func (s silent) RoundTrip(r *http.Request) (*http.Response, error) {
	rec := httptest.NewRecorder()
	cut := false
	func() {
		defer func() { cut = recover() != nil }()
		s.ServeHTTP(rec, r)
	}()
	res := rec.Result()
	if cut {
		res.Body = io.NopCloser(io.MultiReader(res.Body, untilDone{r.Context()}))
	}
	return res, nil
}

type untilDone struct{ context.Context } //nolint:containedctx // of the request

func (u untilDone) Read([]byte) (int, error) {
	<-u.Done()
	return 0, context.Cause(u)
}

// TestStepSignsOfLife: a connection with a line each 15 seconds is not lost, however long no action ends, and however long the caller takes.
func TestStepSignsOfLife(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		asked, events := 0, 0
		c, err := coppice.New(coppice.Config{Server: "http://test", Transport: roundTripper(func(*http.Request) (*http.Response, error) {
			asked++
			body, w := io.Pipe()
			go func() {
				for range 40 { // ten minutes
					fmt.Fprintln(w, `{"operation_id":"op_1"}`)
					time.Sleep(15 * time.Second)
				}
				fmt.Fprintln(w, `{"operation_id":"op_1","state":"succeeded"}`)
				_ = w.Close()
			}()
			return &http.Response{StatusCode: http.StatusOK, Body: body}, nil
		})})
		if err != nil {
			t.Fatal(err)
		}
		for _, err := range c.StreamStep(t.Context(), "ckpt_0", coppice.StepRequest{}) {
			if err != nil {
				t.Fatal(err)
			}
			events++
			time.Sleep(5 * time.Minute)
		}
		if asked != 1 || events != 1 {
			t.Errorf("%d requests, %d events", asked, events)
		}
	})
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(r *http.Request) (*http.Response, error) { return f(r) }

func stepCases(t *testing.T) (table []stepCase) {
	t.Helper()
	b, err := os.ReadFile("../conformance/steps.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(b, &table); err != nil || len(table) < 10 {
		t.Fatalf("%d cases, %v", len(table), err)
	}
	return table
}

type stepCase struct {
	Name, Key, Error string
	Apart            bool
	Events           []string
	Requests         int64
	Answers          []struct {
		Status  int
		Problem string
		Lines   []string
		Part    string
		Cut     bool
	}
}

func (x stepCase) run(t *testing.T, serve func(http.Handler) coppice.Config) {
	t.Helper()
	var asked atomic.Int64
	keys := make(chan string, x.Requests+1)
	c, err := coppice.New(serve(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a := x.Answers[min(int(asked.Add(1)), len(x.Answers))-1]
		select {
		case keys <- r.Header.Get("Idempotency-Key"):
		default:
		}
		if a.Problem != "" {
			w.Header().Set("Content-Type", "application/problem+json")
			w.WriteHeader(a.Status)
			fmt.Fprintf(w, `{"type":"x","title":"x","detail":"x","request_id":"x","status":%d,"code":%q}`, a.Status, a.Problem)
			return
		}
		w.Header().Set("Content-Type", "application/x-ndjson")
		for _, line := range a.Lines {
			fmt.Fprintln(w, line)
		}
		fmt.Fprint(w, a.Part)
		if a.Cut {
			_ = http.NewResponseController(w).Flush()
			panic(http.ErrAbortHandler)
		}
	})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	ctx := t.Context()
	if x.Key != "" {
		ctx = coppice.WithIdempotencyKey(ctx, x.Key)
	}
	seen := []string{}
	var last error
	for e, err := range c.StreamStep(ctx, "ckpt_0", coppice.StepRequest{Actions: make([]coppice.StepAction, 2)}) {
		if last = err; err != nil {
			break
		}
		s := e.OperationID
		if a := e.Action; a != nil {
			if s += fmt.Sprintf(" %d %s", a.Index, a.Kept); a.Problem != nil {
				s += " " + a.Problem.Code
			}
		}
		seen = append(seen, s)
	}
	if !slices.Equal(seen, x.Events) || asked.Load() != x.Requests {
		t.Errorf("%q after %d requests", seen, asked.Load())
	}
	if x.Error == "" && last != nil || x.Error != "" && !errors.Is(last, coppice.Code(x.Error)) {
		t.Errorf("the error is %v", last)
	}
	close(keys)
	first := <-keys
	for key := range keys {
		if key != first {
			t.Errorf("the keys %q and %q", first, key)
		}
	}
	if first == "" || x.Key != "" && first != x.Key {
		t.Errorf("the key %q", first)
	}
}
