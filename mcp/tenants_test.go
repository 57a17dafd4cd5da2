package mcp

import (
	"crypto/sha256"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"
)

// accepting is the part of the API that accepts every key.
func accepting(t *testing.T) *tenants {
	t.Helper()
	api := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `{"id":"key_1"}`) }))
	t.Cleanup(api.Close)
	cfg := Config{Server: api.URL, Log: slog.New(slog.DiscardHandler)}
	transport, err := newTransport(cfg.Server, false)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(transport.close)
	ts := newTenants(cfg, transport)
	t.Cleanup(ts.close)
	return ts
}

// TestKeysAreBounded: the server remembers so many keys and forgets the one that was used least recently, unless it has requests.
func TestKeysAreBounded(t *testing.T) {
	t.Parallel()
	ts := accepting(t)
	client, err := ts.transport.client(ts.cfg, "x")
	if err != nil {
		t.Fatal(err)
	}
	sum := func(i int) [sha256.Size]byte { return sha256.Sum256(fmt.Append(nil, i)) }
	for i := range maxTenants {
		ts.known[sum(i)] = &tenant{client: client, requests: make(slots, maxCalls), used: time.Unix(int64(i), 0)}
	}
	ts.known[sum(0)].requests.try()
	ts.known[sum(1)].users++
	_, held, no := ts.admit(t.Context(), "new")
	if no != nil || len(ts.known) != maxTenants || ts.known[sum(0)] == nil || ts.known[sum(1)] == nil || ts.known[sum(2)] != nil {
		t.Errorf("%+v, %d keys", no, len(ts.known))
	}
	held.leave()
	for _, x := range ts.known {
		x.users++
	}
	if _, _, no := ts.admit(t.Context(), "newer"); no == nil || no.status != http.StatusServiceUnavailable {
		t.Errorf("although all are in use: %+v", no)
	}
}

// TestRequestsAreBounded: all keys together have so many requests. A request holds its slots until its calls have ended.
func TestRequestsAreBounded(t *testing.T) {
	t.Parallel()
	ts := accepting(t)
	x, held, no := ts.admit(t.Context(), "key")
	if no != nil {
		t.Fatal(no)
	}
	for ts.begin("") {
	}
	if _, _, no := ts.admit(t.Context(), "other"); no == nil || no.status != http.StatusTooManyRequests {
		t.Errorf("another key of a project that is full: %+v", no)
	}
	for ts.busy[""] > 1 {
		ts.end("")
	}
	for ts.shared.try() {
	}
	if _, _, no := ts.admit(t.Context(), "other"); no == nil || no.status != http.StatusServiceUnavailable || no.code != codeBusy {
		t.Errorf("one more request: %+v", no)
	}
	held.enter() // a call begins
	held.leave() // the client hangs up
	if len(x.requests) != 1 || len(ts.shared) != maxRequests {
		t.Errorf("while the call runs: %d, %d", len(x.requests), len(ts.shared))
	}
	held.leave()
	if len(x.requests) != 0 || len(ts.shared) != maxRequests-1 || len(ts.busy) != 0 {
		t.Errorf("after the call: %d, %d", len(x.requests), len(ts.shared))
	}
	if _, _, no := ts.admit(t.Context(), strings.Repeat("x", maxKey+1)); no == nil || no.status != http.StatusUnauthorized {
		t.Errorf("a long key: %+v", no)
	}
	for ts.strangers.try() {
	}
	malformed := "cpk_06e5bqv7z0f3m8k2h1t9r4w6xc_" + strings.Repeat("u", keySecret)
	for key, status := range map[string]int{
		malformed: http.StatusUnauthorized, "cpk_x": http.StatusUnauthorized, strings.ReplaceAll(malformed, "u", "v"): http.StatusServiceUnavailable,
	} {
		if _, _, no := ts.admit(t.Context(), key); no == nil || no.status != status {
			t.Errorf("%s where all places of strangers are taken: %+v, want %d", key, no, status)
		}
	}
	if _, err := enterHeld(t.Context()); err == nil {
		t.Error("a call without a request was admitted")
	}
}
