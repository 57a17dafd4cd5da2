package guest_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/guest"
)

// do sends a public request and returns the answer's body. A status of 400 or more is an error.
func do(ctx context.Context, c *guest.Client, method, path string, body io.Reader) ([]byte, *http.Response, error) {
	req, err := http.NewRequestWithContext(ctx, method, "http://guest"+path, body)
	if err != nil {
		return nil, nil, err
	}
	res, err := c.Transport().RoundTrip(req)
	if err != nil {
		return nil, nil, err
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		return b, res, err
	}
	if res.StatusCode >= 400 {
		var p guestapi.Problem
		if err := json.Unmarshal(b, &p); err != nil {
			return b, res, fmt.Errorf("status %d: %q", res.StatusCode, b)
		}
		return b, res, p.Err()
	}
	return b, res, nil
}

func ask[T any](t *testing.T, c *guest.Client, method, path string, in any) T {
	t.Helper()
	var body io.Reader
	if in != nil {
		b, err := json.Marshal(in)
		if err != nil {
			t.Fatal(err)
		}
		body = bytes.NewReader(b)
	}
	b, _, err := do(t.Context(), c, method, path, body) //nolint:bodyclose // do has read and closed it
	if err != nil {
		t.Fatalf("%s %s: %v", method, path, err)
	}
	var out T
	if len(b) > 0 {
		if err := json.Unmarshal(b, &out); err != nil {
			t.Fatalf("%s %s: %v in %q", method, path, err, b)
		}
	}
	return out
}

func route(pattern string, id core.SessionID) string {
	return strings.Replace(pattern, "{id}", string(id), 1)
}

func start(t *testing.T, c *guest.Client, spec guestapi.SessionSpec) guestapi.Session {
	t.Helper()
	return ask[guestapi.Session](t, c, http.MethodPost, guestapi.PathSessions, spec)
}

func output(t *testing.T, c *guest.Client, id core.SessionID, query string) string {
	t.Helper()
	b, res, err := do(t.Context(), c, http.MethodGet, route(guestapi.PathSessionOutput, id)+"?"+query, nil) //nolint:bodyclose // do has read and closed it
	if err != nil {
		t.Fatalf("output %s: %v", query, err)
	}
	if res.Trailer.Get(guestapi.HeaderTruncated) != "false" {
		t.Errorf("output %s: truncated is %q", query, res.Trailer.Get(guestapi.HeaderTruncated))
	}
	return string(b)
}

// run executes a command and returns its output; it must succeed.
func run(t *testing.T, c *guest.Client, command ...string) string {
	t.Helper()
	s := start(t, c, guestapi.SessionSpec{Command: command})
	out := output(t, c, s.ID, "follow=1")
	s = ask[guestapi.Session](t, c, http.MethodGet, route(guestapi.PathSessionWait, s.ID), nil)
	if s.ExitCode == nil || *s.ExitCode != 0 {
		t.Fatalf("%q: %+v\nstdout: %s\nstderr: %s", command, s, out, output(t, c, s.ID, "stream=stderr"))
	}
	return out
}

func sh(t *testing.T, c *guest.Client, script string) string {
	t.Helper()
	return strings.TrimSpace(run(t, c, "/bin/sh", "-c", script))
}
