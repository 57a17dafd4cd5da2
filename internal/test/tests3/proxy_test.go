package tests3

import (
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// TestProxy checks the effect of each kind of fault on a request for ten bytes.
func TestProxy(t *testing.T) {
	t.Parallel()
	const content = "0123456789"
	var done atomic.Int32
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			return
		}
		done.Add(1)
		if len(body) == 0 {
			body = []byte(content)
		}
		w.Header().Set("Content-Range", "bytes 0-9/10")
		w.WriteHeader(http.StatusPartialContent)
		_, _ = w.Write(body)
	}))
	defer origin.Close()
	p := (&Server{Address: strings.TrimPrefix(origin.URL, "http://")}).Proxy(t)
	client := &http.Client{Timeout: time.Minute, Transport: &http.Transport{DisableKeepAlives: true}}
	ask := func(method, sent string) (string, int, error) {
		req, err := http.NewRequestWithContext(t.Context(), method, "http://"+p.Address+"/b/k", strings.NewReader(sent))
		if err != nil {
			t.Fatal(err)
		}
		resp, err := client.Do(req)
		if err != nil {
			return "", 0, err
		}
		defer resp.Body.Close()
		body, err := io.ReadAll(resp.Body)
		return string(body), resp.StatusCode, err
	}
	broken := errors.New("an error")
	for name, c := range map[string]struct {
		fault  Fault
		sent   string
		body   string
		status int
		err    error
		done   int32 // requests that the server has executed
	}{
		"none":         {Fault{Kind: Flip, N: -1}, "", content, 206, nil, 1},
		"answer":       {Fault{Kind: Answer, Status: 503, Code: "SlowDown"}, "", "<Error><Code>SlowDown</Code><Message>injected</Message></Error>", 503, nil, 0},
		"reset":        {Fault{Kind: Reset}, "", "", 0, syscall.ECONNRESET, 1},
		"cut":          {Fault{Kind: Cut, N: 4}, "", "0123", 206, io.ErrUnexpectedEOF, 1},
		"stall":        {Fault{Kind: Stall, N: 4}, "", "0123", 206, broken, 1},
		"stall at 0":   {Fault{Kind: Stall}, "", "", 0, broken, 1},
		"slow":         {Fault{Kind: Slow, Every: time.Millisecond}, "", content, 206, nil, 1},
		"flip":         {Fault{Kind: Flip, N: 3}, "", "0122456789", 206, nil, 1},
		"truncate":     {Fault{Kind: Truncate, N: 4}, "", "0123", 206, nil, 1},
		"whole":        {Fault{Kind: Whole, N: 4}, "", "0123", 200, nil, 1},
		"drop":         {Fault{Kind: Drop}, "sent", "", 0, syscall.ECONNRESET, 1},
		"reset sent":   {Fault{Kind: ResetRequest, N: 2}, "sent", "", 0, syscall.ECONNRESET, 0},
		"stall sent":   {Fault{Kind: StallRequest, N: 2}, "sent", "", 0, broken, 0},
		"slow sent":    {Fault{Kind: SlowRequest, N: 1, Every: time.Millisecond}, "sent", "sent", 206, nil, 1},
		"flip sent":    {Fault{Kind: FlipRequest, N: 0}, "sent", "rent", 206, nil, 1},
		"not this one": {Fault{Kind: Reset, Of: Puts}, "", content, 206, nil, 1},
		"skipped":      {Fault{Kind: Reset, Skip: 1}, "", content, 206, nil, 1},
	} {
		method := http.MethodGet
		if c.sent != "" {
			method = http.MethodPut
		}
		p.Clear()
		done.Store(0)
		p.Add(c.fault)
		client.Timeout = time.Minute
		if c.err == broken { //nolint:errorlint // exactly this error
			client.Timeout = time.Second // the fault lasts for ever
		}
		body, status, err := ask(method, c.sent)
		if body != c.body || status != c.status || (err == nil) != (c.err == nil) || c.err != broken && !errors.Is(err, c.err) { //nolint:errorlint // exactly this error
			t.Errorf("%s: %q, %d, %v; want %q, %d, %v", name, body, status, err, c.body, c.status, c.err)
		}
		if n := done.Load(); n != c.done {
			t.Errorf("%s: the server has done %d requests, want %d", name, n, c.done)
		}
	}
	client.Timeout = time.Minute
	p.Clear()
	p.Add(Fault{Kind: Reset, Times: 2})
	for i, want := range []bool{true, true, false} {
		if _, _, err := ask(http.MethodGet, ""); (err != nil) != want {
			t.Errorf("request %d of two that are hit: %v", i, err)
		}
	}
	p.Down(t)
	if _, _, err := ask(http.MethodGet, ""); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("down: %v", err)
	}
	p.Up(t)
	if body, _, err := ask(http.MethodGet, ""); body != content || err != nil {
		t.Errorf("up again: %q, %v", body, err)
	}
	if _, err := (&net.Dialer{}).DialContext(t.Context(), "tcp", NoAddress(t)); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("nobody listens: %v", err)
	}
}
