package controllertest

import (
	"context"
	"io"
	"maps"
	"net/http"
	"testing"
	"time"
)

// WantRefusedBeforeBody sends a request whose body never comes, and wants it refused for its key. host is the name in the request; empty: that
// of the URL. A key in the header X-API-KEY or Authorization is the caller's.
func WantRefusedBeforeBody(t testing.TB, method, url, host string, header http.Header) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 15*time.Second) // the layers give a body 30
	defer cancel()
	body, never := io.Pipe()
	defer never.Close()
	req, err := http.NewRequestWithContext(ctx, method, url, body)
	if err != nil {
		t.Fatal(err)
	}
	req.Host = host
	maps.Copy(req.Header, header)
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Errorf("%s %s: %v", method, url, err)
		return
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusUnauthorized {
		t.Errorf("%s %s: status %d", method, url, resp.StatusCode)
	}
}
