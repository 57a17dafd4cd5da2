//go:build linux

package guesttest

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/answer"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Client asks a server.
type Client struct {
	T   *testing.T
	URL string
}

// NewClient returns a client of a server that ends with the test.
func NewClient(t *testing.T, h http.Handler) *Client {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(func() {
		srv.CloseClientConnections()
		srv.Close()
	})
	return &Client{T: t, URL: srv.URL}
}

// Do sends a request and returns the body; a status of 400 or more is an error.
func (c *Client) Do(method, path string, body io.Reader) ([]byte, *http.Response, error) {
	c.T.Helper()
	req, err := http.NewRequestWithContext(c.T.Context(), method, c.URL+path, body)
	if err != nil {
		c.T.Fatal(err)
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil || res.StatusCode < 400 {
		return b, res, err
	}
	var p guestapi.Problem
	if err := json.Unmarshal(b, &p); err != nil {
		c.T.Fatalf("%s %s: status %d: %q", method, path, res.StatusCode, b)
	}
	if want := answer.Status(p.Category); res.StatusCode != want {
		c.T.Errorf("%s %s: status %d, want %d", method, path, res.StatusCode, want)
	}
	return b, res, p.Err()
}

// Ask sends a value and returns the answer.
func Ask[T any](c interface {
	Do(method, path string, body io.Reader) ([]byte, *http.Response, error)
}, method, path string, in any,
) (out T, err error) {
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			return out, err
		}
		body = bytes.NewReader(b)
	}
	b, _, err := c.Do(method, path, body) //nolint:bodyclose // Do has read and closed it
	if err == nil && len(b) > 0 {
		err = json.Unmarshal(b, &out)
	}
	return out, err
}

// Must returns a function that ends the test if there is an error.
func Must[T any](t *testing.T) func(v T, err error) T {
	t.Helper()
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// Route puts an id into the pattern of a route.
func Route(pattern string, id core.SessionID) string {
	return strings.Replace(pattern, "{id}", string(id), 1)
}

// StartSession starts a session, in the root directory unless the specification has another.
func (c *Client) StartSession(spec guestapi.SessionSpec) guestapi.Session {
	c.T.Helper()
	if spec.Cwd == "" {
		spec.Cwd = "/"
	}
	return Must[guestapi.Session](c.T)(Ask[guestapi.Session](c, http.MethodPost, guestapi.PathSessions, spec))
}

// ReadOutput reads the output of a session.
func (c *Client) ReadOutput(id core.SessionID, query string) (string, *http.Response) {
	c.T.Helper()
	b, res, err := c.Do(http.MethodGet, Route(guestapi.PathSessionOutput, id)+"?"+query, nil)
	if err != nil {
		c.T.Fatal(err)
	}
	return string(b), res
}

// AwaitEnd waits for the end of a session.
func (c *Client) AwaitEnd(id core.SessionID) guestapi.Session {
	c.T.Helper()
	s := Must[guestapi.Session](c.T)(Ask[guestapi.Session](c, http.MethodGet, Route(guestapi.PathSessionWait, id)+"?timeout_ms=20000", nil))
	if s.State != guestapi.SessionExited {
		c.T.Fatalf("the session has not ended: %+v", s)
	}
	return s
}

// Watchdog ends tests that would hang; no test result depends on it.
const Watchdog = 3 * time.Minute

// Eventually waits for something that is not announced.
func Eventually(t *testing.T, ok func() bool) {
	t.Helper()
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	limit := time.After(Watchdog)
	for !ok() {
		select {
		case <-tick.C:
		case <-limit:
			t.Fatal("it has not happened in minutes")
		}
	}
}
