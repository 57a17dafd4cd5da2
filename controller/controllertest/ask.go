package controllertest

import (
	"io"
	"net/http"
	"strings"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// Reply is the answer to a request of a test.
type Reply struct {
	Status int
	Header http.Header
	Body   string
}

// Ask sends a request. host is the name in it; empty: that of the URL.
func Ask(t testing.TB, method, url, host string, header map[string]string, body string) Reply {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if host != "" {
		req.Host = host
	}
	for k, v := range header {
		req.Header.Set(k, v)
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	b, err := io.ReadAll(resp.Body)
	if err != nil {
		t.Fatal(err)
	}
	return Reply{resp.StatusCode, resp.Header, string(b)}
}

// Tenant makes a project with a key of its own, which it returns.
func (s *Cell) Tenant(t testing.TB, name string) (key string) {
	t.Helper()
	p, err := s.REST.CreateProject(t.Context(), coppice.CreateProjectRequest{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	k, err := s.REST.CreateKey(t.Context(), p.ID, coppice.CreateKeyRequest{Name: name})
	if err != nil {
		t.Fatal(err)
	}
	return k.Secret
}
