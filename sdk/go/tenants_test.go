package coppice_test

import (
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestTenantCalls compares the request of each call with the contract.
func TestTenantCalls(t *testing.T) {
	t.Parallel()
	var sent []string
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		body, err := io.ReadAll(r.Body)
		if err != nil {
			t.Error(err)
		}
		sent = append(sent, strings.TrimSpace(r.Method+" "+r.URL.Path+" "+string(body)))
		if r.Method == http.MethodDelete {
			w.WriteHeader(http.StatusNoContent)
			return
		}
		_, _ = io.WriteString(w, `{"id":"x","items":[{"id":"x"}],"secret":"s"}`)
	}))
	t.Cleanup(server.Close)
	c, err := coppice.New(coppice.Config{Server: server.URL, Token: "k"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	ctx, seven := t.Context(), int64(7)
	self, err1 := c.Self(ctx)
	p, err2 := c.CreateProject(ctx, coppice.CreateProjectRequest{Name: "blue", Quotas: coppice.QuotasPatch{Depth: &seven}})
	_, err3 := c.Project(ctx, "p")
	list, err4 := coppice.Collect(c.Projects(ctx))
	_, err5 := c.PatchProject(ctx, "p", coppice.PatchProjectRequest{Version: 2, Quotas: coppice.QuotasPatch{Keys: &seven}})
	made, err6 := c.CreateKey(ctx, "p", coppice.CreateKeyRequest{Name: "ci", Scopes: []coppice.KeyScope{coppice.ScopeWorkspaceRead}, TTLSeconds: 60})
	_, err7 := c.Key(ctx, "k")
	keys, err8 := coppice.Collect(c.Keys(ctx, "p"))
	if err := errors.Join(err1, err2, err3, err4, err5, err6, err7, err8, c.RevokeKey(ctx, "k"), c.DeleteProject(ctx, "p")); err != nil {
		t.Fatal(err)
	}
	if self.ID != "x" || p.ID != "x" || len(list) != 1 || made.Secret != "s" || len(keys) != 1 {
		t.Errorf("%+v %+v %v %+v %v", self, p, list, made, keys)
	}
	want := []string{
		"GET /v1/self", `POST /v1/projects {"name":"blue","quotas":{"depth":7}}`, "GET /v1/projects/p", "GET /v1/projects",
		`PATCH /v1/projects/p {"quotas":{"keys":7},"version":2}`, `POST /v1/projects/p/keys {"name":"ci","scopes":["workspace:read"],"ttl_seconds":60}`,
		"GET /v1/keys/k", "GET /v1/projects/p/keys", "DELETE /v1/keys/k", "DELETE /v1/projects/p",
	}
	if got, err := json.Marshal(sent); err != nil || strings.Join(sent, "\n") != strings.Join(want, "\n") {
		t.Errorf("sent %s, %v", got, err)
	}
}

// TestRateLimitedIsRepeated: the client waits as long as the server says and repeats. It does not repeat a request that
// a quota refuses.
func TestRateLimitedIsRepeated(t *testing.T) {
	t.Parallel()
	calls, code := 0, ""
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		if calls++; calls == 1 {
			w.Header().Set("Retry-After", "0")
			w.WriteHeader(http.StatusTooManyRequests)
			_, _ = io.WriteString(w, `{"code":"`+code+`","detail":"later","status":429}`)
			return
		}
		_, _ = io.WriteString(w, `{"id":"x"}`)
	}))
	t.Cleanup(server.Close)
	c, err := coppice.New(coppice.Config{Server: server.URL, Token: "k"})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.Close)
	code = "RATE_LIMITED"
	if _, err := c.CreateKey(t.Context(), "p", coppice.CreateKeyRequest{Name: "x"}); err != nil || calls != 2 {
		t.Errorf("%d calls, %v", calls, err)
	}
	calls, code = 0, "QUOTA_EXCEEDED"
	if _, err := c.CreateKey(t.Context(), "p", coppice.CreateKeyRequest{Name: "x"}); !errors.Is(err, coppice.CodeQuotaExceeded) || calls != 1 {
		t.Errorf("%d calls, %v", calls, err)
	}
}
