package httpapi_test

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/controller/httpapi"
)

// TestHealthChecksAreQuiet: engines ask every few seconds. What succeeds is not in the usual log, and everything else is.
func TestHealthChecksAreQuiet(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	var log keep
	s := httptest.NewServer(httpapi.New(w.control, slog.New(slog.NewTextHandler(&log, nil))))
	for _, path := range []string{"/healthz", "/readyz", "/openapi.yaml", "/v1/workspaces"} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, s.URL+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		resp, err := s.Client().Do(req)
		if err != nil {
			t.Fatal(err)
		}
		resp.Body.Close()
	}
	s.Close() // a line is written after its answer
	text := log.text()
	for path, want := range map[string]bool{"/healthz": false, "/readyz": false, "/openapi.yaml": true, "/v1/workspaces": true} {
		if got := strings.Contains(text, "path="+path); got != want {
			t.Errorf("%s is in the log: %v, want %v\n%s", path, got, want, text)
		}
	}
}
