package apitest_test

import (
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/api/apitest"
)

// recorder is a test that may fail.
type recorder struct {
	testing.TB
	faults []string
}

func (r *recorder) Helper() {}

func (r *recorder) Errorf(format string, _ ...any) { r.faults = append(r.faults, format) }

type canned func() *http.Response

func (c canned) RoundTrip(*http.Request) (*http.Response, error) { return c(), nil }

// TestTransport wants a breach to fail the test, and nothing else to.
func TestTransport(t *testing.T) {
	t.Parallel()
	problem := `{"type":"x","title":"x","status":404,"detail":"x","code":"X","request_id":"r"}`
	for name, c := range map[string]struct {
		path, kind, body string
		status           int
		silent, wrong    bool
	}{
		"as it should be":       {"/healthz", "application/json", `{"status":"ok","version":"1"}`, 200, false, false},
		"a field is missing":    {"/healthz", "application/json", `{"status":"ok"}`, 200, false, true},
		"a field too many":      {"/healthz", "application/json", `{"status":"ok","version":"1","x":1}`, 200, false, true},
		"no JSON":               {"/healthz", "application/json", `{`, 200, false, true},
		"a problem":             {"/healthz", "application/problem+json", problem, 503, false, false},
		"no problem":            {"/healthz", "application/json", `{"error":"x"}`, 503, false, true},
		"no request id":         {"/healthz", "application/json", `{"status":"ok","version":"1"}`, 200, true, true},
		"an unknown route":      {"/nowhere", "application/problem+json", problem, 404, false, false},
		"an unknown route, 200": {"/nowhere", "application/json", `{}`, 200, false, true},
		"bytes":                 {"/v1/sessions/sess_06e5bqv7z0f3m8k2h1t9r4w6xc/output", "application/octet-stream", "\x00", 200, false, false},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := &recorder{TB: t}
			client := &http.Client{Transport: apitest.Transport(r, canned(func() *http.Response {
				h := http.Header{"Content-Type": {c.kind}, "X-Request-Id": {"r"}}
				if c.silent {
					h.Del("X-Request-Id")
				}
				return &http.Response{StatusCode: c.status, Header: h, Body: io.NopCloser(strings.NewReader(c.body))}
			}))}
			req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, "http://h:1"+c.path, nil)
			if err != nil {
				t.Fatal(err)
			}
			res, err := client.Do(req)
			if err != nil {
				t.Fatal(err)
			}
			body, err := io.ReadAll(res.Body)
			if err != nil || res.Body.Close() != nil || string(body) != c.body {
				t.Errorf("the body is not passed on: %q, %v", body, err)
			}
			if wrong := len(r.faults) > 0; wrong != c.wrong {
				t.Errorf("faults: %q", r.faults)
			}
		})
	}
}
