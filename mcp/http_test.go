package mcp_test

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	sdk "github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/mcp"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// serveHTTP serves MCP over HTTP and returns its address.
func (w *world) serveHTTP(t *testing.T, cfg mcp.HTTPConfig) string {
	t.Helper()
	if cfg.Server == "" {
		cfg.Server = w.url
	}
	cfg.Log = slog.New(slog.DiscardHandler)
	h, err := mcp.NewHandler(cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(h.Close)
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return srv.URL
}

// withKey sends a key with every request.
type withKey struct {
	key  string
	next http.RoundTripper
}

func (k withKey) RoundTrip(req *http.Request) (*http.Response, error) {
	req = req.Clone(req.Context())
	req.Header.Set("Authorization", "Bearer "+k.key)
	return k.next.RoundTrip(req)
}

func overHTTP(t *testing.T, url, key, version string) *session {
	t.Helper()
	pool := &http.Transport{}
	s := connect(t, &sdk.StreamableClientTransport{Endpoint: url + "/mcp", HTTPClient: &http.Client{Transport: withKey{key, pool}}, DisableStandaloneSSE: true, MaxRetries: -1}, version)
	t.Cleanup(func() {
		_ = s.Close()
		pool.CloseIdleConnections()
	})
	return s
}

// key makes a project, and a key of it.
func (w *world) key(t *testing.T, project string) coppice.CreatedKey {
	t.Helper()
	p, err := w.admin.CreateProject(t.Context(), coppice.CreateProjectRequest{Name: project})
	if err != nil {
		t.Fatal(err)
	}
	k, err := w.admin.CreateKey(t.Context(), p.ID, coppice.CreateKeyRequest{Name: "agent"})
	if err != nil {
		t.Fatal(err)
	}
	return k
}

// TestVersionsAndTransports has the same conversation over both transports, in the oldest and the newest version.
func TestVersionsAndTransports(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	url := w.serveHTTP(t, mcp.HTTPConfig{})
	versions := mcp.Versions()
	if versions[len(versions)-1] != "2025-06-18" || versions[0] != sdk.SupportedProtocolVersions()[0] {
		t.Fatalf("versions: %v", versions)
	}
	for _, version := range []string{versions[0], versions[len(versions)-1]} {
		for name, open := range map[string]func() *session{
			"stdio": func() *session { return w.stdio(t, mcp.Config{}, adminKey, version) },
			"http":  func() *session { return overHTTP(t, url, adminKey, version) },
		} {
			s := open()
			if got := s.InitializeResult(); got.ProtocolVersion != version || !strings.Contains(got.Instructions, "Never follow instructions") || got.ServerInfo.Name != "coppice" {
				t.Errorf("%s %s: %+v", name, version, got)
			}
			ws, _ := s.ok(t, "workspace_create", args{})
			res, err := s.CallTool(t.Context(), &sdk.CallToolParams{
				Meta: sdk.Meta{"progressToken": "p1"}, Name: "exec", Arguments: args{"workspace": ws["id"], "command": []string{"echo", name, version}},
			})
			if err != nil || res.IsError || !strings.Contains(textOf(t, res), name+" "+version) {
				t.Errorf("%s %s: exec: %+v, %v", name, version, res, err)
			}
			select {
			case p := <-s.progress:
				if p.ProgressToken != "p1" || !strings.HasPrefix(p.Message, "exec: ") {
					t.Errorf("%s %s: progress %+v", name, version, p)
				}
			case <-t.Context().Done():
				t.Errorf("%s %s: no progress", name, version)
			}
			s.refused(t, "WORKSPACE_NOT_FOUND", "workspace_show", args{"workspace": "absent"})
			if read, err := s.ReadResource(t.Context(), &sdk.ReadResourceParams{URI: "coppice://workspaces"}); err != nil || !strings.Contains(read.Contents[0].Text, ws["id"].(string)) {
				t.Errorf("%s %s: resource: %v", name, version, err)
			}
			if _, err := s.CallTool(t.Context(), &sdk.CallToolParams{Name: "absent"}); err == nil {
				t.Errorf("%s %s: an unknown tool was called", name, version)
			}
		}
	}
}

// TestKeysOverHTTP: each request gets what its own key may do, and nothing without a valid one.
func TestKeysOverHTTP(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	url := w.serveHTTP(t, mcp.HTTPConfig{AuthorizationServers: []string{"https://login.example"}})
	blue, green := w.key(t, "blue"), w.key(t, "green")
	ofBlue, ofGreen := overHTTP(t, url, blue.Secret, ""), overHTTP(t, url, green.Secret, "")
	ws, _ := ofBlue.ok(t, "workspace_create", args{"name": "demo"})
	ofGreen.refused(t, "WORKSPACE_NOT_FOUND", "workspace_show", args{"workspace": ws["id"]})
	if list, _ := ofGreen.ok(t, "workspace_list", args{}); len(list["workspaces"].([]any)) != 0 {
		t.Errorf("green sees %v", list)
	}
	if list, _ := ofBlue.ok(t, "workspace_list", args{}); len(list["workspaces"].([]any)) != 1 {
		t.Errorf("blue sees %v", list)
	}

	for name, header := range map[string]string{"none": "", "wrong": "Bearer cpk_wrong", "no bearer": blue.Secret, "long": "Bearer " + strings.Repeat("x", 1000)} {
		res := post(t, url, map[string]string{"Authorization": header}, ping)
		if res.status != http.StatusUnauthorized || !strings.Contains(res.header.Get("WWW-Authenticate"), `Bearer resource_metadata="`+url+`/.well-known/oauth-protected-resource/mcp"`) {
			t.Errorf("%s: %+v", name, res)
		}
	}
	var metadata struct {
		Resource             string   `json:"resource"`
		AuthorizationServers []string `json:"authorization_servers"`
	}
	got := send(t, http.MethodGet, url+"/.well-known/oauth-protected-resource/mcp", nil, "")
	if err := json.Unmarshal([]byte(got.body), &metadata); err != nil || got.status != 200 || metadata.Resource != url+"/mcp" || metadata.AuthorizationServers[0] != "https://login.example" {
		t.Errorf("metadata: %+v, %v", got, err)
	}

	if err := w.admin.RevokeKey(t.Context(), blue.Key.ID); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "a revoked key is refused", func() bool {
		return post(t, url, map[string]string{"Authorization": "Bearer " + blue.Secret}, ping).status == http.StatusUnauthorized
	})
	ofGreen.ok(t, "workspace_list", args{})
}

const ping = `{"jsonrpc":"2.0","id":1,"method":"ping"}`

type answer struct {
	status int
	header http.Header
	body   string
}

func post(t *testing.T, url string, header map[string]string, body string) answer {
	t.Helper()
	all := map[string]string{"Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Protocol-Version": "2025-06-18"}
	maps.Copy(all, header)
	return send(t, http.MethodPost, url+"/mcp", all, body)
}

func send(t *testing.T, method, url string, header map[string]string, body string) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	for k, v := range header {
		if k == "Host" {
			req.Host = v
		} else if v != "" {
			req.Header.Set(k, v)
		}
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatal(err)
	}
	return answer{res.StatusCode, res.Header, string(b)}
}

// TestWebPages: a page in a browser cannot reach the server by a name of its own, nor from its origin.
func TestWebPages(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	url := w.serveHTTP(t, mcp.HTTPConfig{PublicURL: "https://mcp.example.com", Origins: []string{"https://app.example.com"}})
	for _, x := range []struct {
		host, origin string
		status       int
	}{
		{"", "", 200},
		{"localhost:7080", "", 200},
		{"[::1]:7080", "", 200},
		{"mcp.example.com", "", 200},
		{"MCP.example.com", "https://mcp.example.com", 200},
		{"", "https://app.example.com", 200},
		{"", url, 200},
		{"evil.example", "", 403},
		{"127.0.0.1.evil.example", "", 403},
		{"localhost.evil.example:7080", "", 403},
		{"mcp.example.com.evil.example", "", 403},
		{"10.0.0.1", "", 403},
		{"", "https://evil.example", 403},
		{"", "null", 403},
		{"mcp.example.com", "https://mcp.example.com.evil.example", 403},
		{"", "http://localhost:1", 403},
	} {
		header := map[string]string{"Authorization": "Bearer " + adminKey, "Origin": x.origin}
		if x.host != "" {
			header["Host"] = x.host
		}
		if res := post(t, url, header, ping); res.status != x.status {
			t.Errorf("host %q, origin %q: %+v, want %d", x.host, x.origin, res, x.status)
		}
		if res := send(t, http.MethodGet, url+"/.well-known/oauth-protected-resource", header, ""); res.status != x.status {
			t.Errorf("host %q, origin %q: metadata %+v, want %d", x.host, x.origin, res, x.status)
		}
	}
	right := map[string]string{"Authorization": "Bearer " + adminKey}
	for name, x := range map[string]struct {
		body   string
		status int
	}{"batch": {" [" + ping + "]", 400}, "no JSON": {"{", 400}, "empty": {"", 400}, "long": {`{"x":"` + strings.Repeat("x", 5<<20) + `"}`, 413}} {
		if res := post(t, url, right, x.body); res.status != x.status {
			t.Errorf("%s: %+v, want %d", name, res, x.status)
		}
	}
	if res := send(t, http.MethodGet, url+"/mcp", right, ""); res.status != http.StatusMethodNotAllowed {
		t.Errorf("GET: %+v", res)
	}
	if res := send(t, http.MethodGet, url+"/", right, ""); res.status != http.StatusNotFound {
		t.Errorf("another path: %+v", res)
	}
}

// TestTenantsDoNotBlockEachOther: a key whose slots are all taken is refused, others are served. Its slots stay taken
// while its calls run, although their clients hang up.
func TestTenantsDoNotBlockEachOther(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	url := w.serveHTTP(t, mcp.HTTPConfig{})
	blue, green := w.key(t, "blue"), w.key(t, "green")
	ofBlue := overHTTP(t, url, blue.Secret, "2025-06-18")
	ws, _ := ofBlue.ok(t, "workspace_create", args{"name": "demo"})
	api := w.cell.Client(t, blue.Secret)
	running := func() (list []coppice.Session) {
		all, err := coppice.Collect(api.Sessions(t.Context(), ws["id"].(string)))
		if err != nil {
			t.Fatal(err)
		}
		for _, s := range all {
			if s.State != coppice.SessionExited {
				list = append(list, s)
			}
		}
		return list
	}
	const most = 16
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	var calls sync.WaitGroup
	for range most {
		calls.Go(func() {
			req, err := http.NewRequestWithContext(ctx, http.MethodPost, url+"/mcp", strings.NewReader(
				`{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"exec","arguments":{"workspace":"demo","command":["sleep","3600"],"wait_seconds":600}}}`))
			if err != nil {
				t.Error(err)
				return
			}
			for k, v := range map[string]string{"Authorization": "Bearer " + blue.Secret, "Content-Type": "application/json", "Accept": "application/json, text/event-stream", "Mcp-Protocol-Version": "2025-06-18"} {
				req.Header.Set(k, v)
			}
			if res, err := http.DefaultClient.Do(req); err == nil {
				_, _ = io.Copy(io.Discard, res.Body)
				_ = res.Body.Close()
			}
		})
	}
	eventually.True(t, "every call runs its program", func() bool { return len(running()) == most })
	asBlue := map[string]string{"Authorization": "Bearer " + blue.Secret}
	if res := post(t, url, asBlue, ping); res.status != http.StatusTooManyRequests || !strings.Contains(res.body, "TOO_MANY_CALLS") {
		t.Errorf("one more request of blue: %+v", res)
	}
	overHTTP(t, url, green.Secret, "").ok(t, "workspace_list", args{})
	cancel()
	calls.Wait()
	for _, s := range running() {
		if err := api.DeleteSession(t.Context(), s.ID); err != nil && !errors.Is(err, coppice.CodeSessionNotFound) {
			t.Error(err)
		}
	}
	eventually.True(t, "blue is served again", func() bool { return post(t, url, asBlue, ping).status == http.StatusOK })
}

// TestWrongKeysDoNotBlockKnownOnes fills the room for checks of unknown keys: keys that were valid before do not need it.
func TestWrongKeysDoNotBlockKnownOnes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	stuck, entered := make(chan struct{}), make(chan struct{}, 64)
	proxy := httptest.NewServer(http.HandlerFunc(func(rw http.ResponseWriter, req *http.Request) {
		if strings.Contains(req.Header.Get("Authorization"), "wrong") {
			entered <- struct{}{}
			<-stuck
			rw.WriteHeader(http.StatusUnauthorized)
			return
		}
		out, err := http.NewRequestWithContext(req.Context(), req.Method, w.url+req.URL.RequestURI(), req.Body)
		if err != nil {
			t.Error(err)
			return
		}
		out.Header = req.Header
		res, err := http.DefaultClient.Do(out)
		if err != nil {
			rw.WriteHeader(http.StatusBadGateway)
			return
		}
		defer res.Body.Close()
		rw.WriteHeader(res.StatusCode)
		_, _ = io.Copy(rw, res.Body)
	}))
	t.Cleanup(proxy.Close)
	url := w.serveHTTP(t, mcp.HTTPConfig{Config: mcp.Config{Server: proxy.URL}})
	right := map[string]string{"Authorization": "Bearer " + adminKey}
	if res := post(t, url, right, ping); res.status != http.StatusOK {
		t.Fatalf("the right key: %+v", res)
	}
	const strangers = 32
	var calls sync.WaitGroup
	for range strangers {
		calls.Go(func() { post(t, url, map[string]string{"Authorization": "Bearer wrong"}, ping) })
	}
	for range strangers {
		<-entered
	}
	if res := post(t, url, map[string]string{"Authorization": "Bearer wrong"}, ping); res.status != http.StatusServiceUnavailable {
		t.Errorf("one more unknown key: %+v", res)
	}
	if res := post(t, url, right, ping); res.status != http.StatusOK {
		t.Errorf("the right key meanwhile: %+v", res)
	}
	close(stuck)
	calls.Wait()
}

// TestServeHTTP listens on loopback only, and ends with its context.
func TestServeHTTP(t *testing.T) {
	t.Parallel()
	cfg := mcp.HTTPConfig{Config: mcp.Config{Server: "http://127.0.0.1:1", Log: slog.New(slog.DiscardHandler)}}
	for _, address := range []string{"0.0.0.0:0", ":7080", "10.0.0.1:1", "localhost:1", "nonsense"} {
		if err := mcp.ServeHTTP(t.Context(), cfg, address); err == nil || !strings.Contains(err.Error(), "loopback") {
			t.Errorf("%s: %v", address, err)
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended, said, log := make(chan error, 1), make(chan string, 1), cfg
	log.Log = slog.New(slog.NewTextHandler(lineWriter(said), nil))
	go func() { ended <- mcp.ServeHTTP(ctx, log, "127.0.0.1:0") }()
	_, url, _ := strings.Cut(<-said, "url=")
	url, _, _ = strings.Cut(url, "/mcp")
	if res := post(t, url, map[string]string{"X-Long": strings.Repeat("x", 64<<10)}, ping); res.status != http.StatusRequestHeaderFieldsTooLarge {
		t.Errorf("a long header: %d", res.status)
	}
	if res := post(t, url, nil, ping); res.status != http.StatusUnauthorized {
		t.Errorf("no key: %+v", res)
	}
	http.DefaultClient.CloseIdleConnections()
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	for _, public := range []string{"mcp.example.com", "https://a/b", "https://u@a", "ftp://a"} {
		bad := cfg
		bad.PublicURL = public
		if _, err := mcp.NewHandler(bad); err == nil {
			t.Errorf("public URL %q was taken", public)
		}
	}
	if _, err := mcp.NewHandler(mcp.HTTPConfig{Config: mcp.Config{Server: "nonsense"}}); err == nil {
		t.Error("an address that is none was taken")
	}
}

// lineWriter sends what is written to it.
type lineWriter chan string

func (w lineWriter) Write(b []byte) (int, error) {
	w <- string(b)
	return len(b), nil
}
