package e2b_test

import (
	"context"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller/controllertest"
	"github.com/coppice-dev/coppice/controller/runnertest"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// tenant makes a project with a key of its own.
func (w *world) tenant(name string, scopes ...coppice.KeyScope) (key string, id coppice.KeyID) {
	w.t.Helper()
	p, err := w.rest.CreateProject(w.t.Context(), coppice.CreateProjectRequest{Name: name})
	if err != nil {
		w.t.Fatal(err)
	}
	k, err := w.rest.CreateKey(w.t.Context(), p.ID, coppice.CreateKeyRequest{Name: name, Scopes: scopes})
	if err != nil {
		w.t.Fatal(err)
	}
	return k.Secret, k.Key.ID
}

// What a foreign key gets for a sandbox is, but for the id, what it gets for one that does not exist.
func TestForeignKeySeesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base","timeout":600}`)
	var snap struct{ SnapshotID string }
	w.do(ask{method: "POST", path: "/sandboxes/" + s.SandboxID + "/snapshots", body: `{"name":"theirs"}`}).want(t, http.StatusCreated, &snap)
	foreign, _ := w.tenant("other", coppice.ScopeWorkspaceRead, coppice.ScopeWorkspaceCreate, coppice.ScopeWorkspaceDelete, coppice.ScopeWorkspaceExec,
		coppice.ScopeCheckpointRead, coppice.ScopeCheckpointCreate, coppice.ScopeCheckpointDelete, coppice.ScopeFleetRead)
	absent, noSnapshot := "06e5bqv7z0f3m8k2h1t9r4w6xc", "06e5bqv7z0f3m8k2h1t9r4w6xd"
	for _, a := range []ask{
		{method: "GET", path: "/sandboxes/ID"},
		{method: "DELETE", path: "/sandboxes/ID"},
		{method: "POST", path: "/sandboxes/ID/timeout", body: `{"timeout":1}`},
		{method: "POST", path: "/sandboxes/ID/refreshes", body: `{"duration":1}`},
		{method: "POST", path: "/sandboxes/ID/pause"},
		{method: "POST", path: "/sandboxes/ID/resume", body: `{"timeout":1}`},
		{method: "POST", path: "/sandboxes/ID/connect", body: `{"timeout":1}`},
		{method: "POST", path: "/v2/sandboxes/ID/connect", body: `{"timeout":1}`},
		{method: "POST", path: "/sandboxes/ID/fork", body: `{"count":1}`},
		{method: "POST", path: "/sandboxes/ID/snapshots", body: `{}`},
		{method: "GET", path: "/sandboxes/ID/metrics"},
		{method: "DELETE", path: "/templates/SNAP"},
		{method: "POST", path: "/v2/sandboxes", body: `{"templateID":"SNAP"}`},
		{method: "GET", path: "/snapshots?sandboxID=ID"},
	} {
		a.key = foreign
		ask := func(sandbox, snapshot string) string {
			b := a
			r := strings.NewReplacer("ID", sandbox, "SNAP", snapshot)
			b.path = r.Replace(a.path)
			if strings.Contains(a.body, `"SNAP"`) {
				b.body = strings.ReplaceAll(a.body, "SNAP", snapshot)
			}
			got := w.do(b)
			return fmt.Sprint(got.Status, strings.NewReplacer(sandbox, "ID", snapshot, "SNAP").Replace(got.Body))
		}
		if theirs, none := ask(s.SandboxID, snap.SnapshotID), ask(absent, noSnapshot); theirs != none {
			t.Errorf("%s %s: for a foreign one %s, for none %s", a.method, a.path, theirs, none)
		}
	}
	var list []any
	w.do(ask{method: "GET", path: "/v2/sandboxes", key: foreign}).want(t, http.StatusOK, &list)
	if len(list) != 0 {
		t.Errorf("a foreign key lists %v", list)
	}
	w.do(ask{method: "GET", path: "/sandboxes/" + s.SandboxID}).want(t, http.StatusOK, nil)
}

// A client without a valid key is refused before it has sent a byte of its body.
func TestKeyIsCheckedBeforeTheBody(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	id := "06e5bqv7z0f3m8k2h1t9r4w6xc"
	for _, route := range []string{
		"POST /sandboxes", "POST /v2/sandboxes", "POST /sandboxes/ID/timeout", "POST /sandboxes/ID/refreshes", "POST /sandboxes/ID/resume", "POST /sandboxes/ID/connect",
		"POST /v2/sandboxes/ID/connect", "POST /sandboxes/ID/fork", "POST /sandboxes/ID/snapshots", "PUT /sandboxes/ID/network",
	} {
		method, path, _ := strings.Cut(strings.ReplaceAll(route, "ID", id), " ")
		controllertest.WantRefusedBeforeBody(t, method, w.url+path, "", http.Header{"X-Api-Key": {"no-key"}})
		controllertest.WantRefusedBeforeBody(t, method, w.url+path, "", nil)
	}
	controllertest.WantRefusedBeforeBody(t, http.MethodPost, w.url+"/files?path=a", "49983-"+id+".sandbox.example", nil)
}

// A token opens its own sandbox, for its own purpose, and nothing else; and it ends with its key.
func TestTokens(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key, id := w.tenant("tenant", coppice.ScopeWorkspaceRead, coppice.ScopeWorkspaceCreate, coppice.ScopeWorkspaceExec)
	a, b := w.create(key, `{"templateID":"base"}`), w.create(key, `{"templateID":"base"}`)
	list := ask{method: "POST", path: "/process.Process/List", body: "{}", header: map[string]string{"Content-Type": "application/json"}}
	files := ask{method: "GET", path: "/files?path=/x"}
	w.envd(a, list).want(t, http.StatusOK, nil)
	for name, token := range map[string]string{
		"of another sandbox": b.EnvdAccessToken, "for ports": a.TrafficAccessToken, "none": "", "cut": a.EnvdAccessToken[:60], "key": key,
		"changed":        a.EnvdAccessToken[:len(a.EnvdAccessToken)-1] + "0g"[strings.IndexByte("0g", a.EnvdAccessToken[len(a.EnvdAccessToken)-1])&1^1:][:1],
		"of another key": strings.Replace(a.EnvdAccessToken, strings.TrimPrefix(id, "key_"), "06e5bqv7z0f3m8k2h1t9r4w6xc", 1), "long": strings.Repeat("x", 60_000),
	} {
		bad := a
		bad.EnvdAccessToken = token
		w.envd(bad, list).want(t, http.StatusUnauthorized, nil)
		w.envd(bad, files).want(t, http.StatusUnauthorized, nil)
		if r := w.envd(bad, ask{method: "GET", path: "/health"}); r.Status != http.StatusBadGateway {
			t.Errorf("%s: health answers %d", name, r.Status)
		}
		bad.SandboxID = "06e5bqv7z0f3m8k2h1t9r4w6xc"
		w.envd(bad, files).want(t, http.StatusUnauthorized, nil)
	}
	// A port is closed without a token, and open to none that is not for it.
	for _, token := range []string{"", b.TrafficAccessToken} {
		w.do(ask{method: "GET", path: "/", key: "-", host: "3000-" + a.SandboxID + ".sandbox.example", header: map[string]string{"E2b-Traffic-Access-Token": token}}).
			want(t, http.StatusForbidden, nil)
	}
	// The daemon's own routes are not reachable.
	for _, path := range []string{"/init", "/freeze", "/unfreeze", "/collapse", "/fsfreeze", "/fsthaw", "/upgrade", "/process.Process/Kill", "/process.Process/"} {
		w.envd(a, ask{method: "POST", path: path, body: "{}"}).want(t, http.StatusNotFound, nil)
	}
	if err := w.rest.RevokeKey(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	w.envd(a, list).want(t, http.StatusUnauthorized, nil)
}

// The token of a key that may not reach into guests opens nothing.
func TestTokenHasTheScopesOfItsKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key, _ := w.tenant("reader", coppice.ScopeWorkspaceRead, coppice.ScopeWorkspaceCreate)
	s := w.create(key, `{"templateID":"base"}`)
	w.envd(s, ask{method: "POST", path: "/process.Process/List", body: "{}", header: map[string]string{"Content-Type": "application/json"}}).want(t, http.StatusForbidden, nil)
	w.envd(s, ask{method: "GET", path: "/files?path=/x"}).want(t, http.StatusForbidden, nil)
}

func TestSignedLinks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s, other := w.create("", `{"templateID":"base"}`), w.create("", `{"templateID":"base"}`)
	form := "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"/b c.txt\"\r\n\r\nhello\r\n--b--\r\n"
	w.envd(s, ask{method: "POST", path: "/files", body: form, header: map[string]string{"Content-Type": "multipart/form-data; boundary=b"}}).want(t, http.StatusOK, nil)
	sign := func(path, op, token string, expires int64) string {
		text := strings.Join([]string{path, op, "", token}, ":")
		q := url.Values{"path": {path}}
		if expires != 0 {
			text += fmt.Sprintf(":%d", expires)
			q.Set("signature_expiration", fmt.Sprint(expires))
		}
		sum := sha256.Sum256([]byte(text))
		q.Set("signature", "v1_"+base64.RawStdEncoding.EncodeToString(sum[:]))
		return "/files?" + q.Encode()
	}
	host := "49983-" + s.SandboxID + ".sandbox.example"
	soon, past := time.Now().Add(time.Hour).Unix(), time.Now().Add(-time.Hour).Unix()
	r := w.do(ask{method: "GET", path: sign("/b c.txt", "read", s.EnvdAccessToken, soon), key: "-", host: host, header: map[string]string{"Range": "bytes=1-3"}})
	if r.want(t, http.StatusPartialContent, nil); r.Body != "ell" {
		t.Errorf("%q", r.Body)
	}
	w.do(ask{method: "GET", path: sign("/b c.txt", "read", s.EnvdAccessToken, 0), key: "-", host: host}).want(t, http.StatusOK, nil)
	expired := w.do(ask{method: "GET", path: sign("/b c.txt", "read", s.EnvdAccessToken, past), key: "-", host: host})
	if expired.want(t, http.StatusUnauthorized, nil); !strings.Contains(expired.Body, `"signature is already expired"`) {
		t.Error(expired.Body)
	}
	for name, path := range map[string]string{
		"of another sandbox": sign("/b c.txt", "read", other.EnvdAccessToken, soon), "for writing": sign("/b c.txt", "write", s.EnvdAccessToken, soon),
		"of another path":   strings.Replace(sign("/b c.txt", "read", s.EnvdAccessToken, soon), "b+c", "b+d", 1),
		"longer":            strings.Replace(sign("/b c.txt", "read", s.EnvdAccessToken, soon), "signature_expiration=", "signature_expiration=9", 1),
		"of a user":         sign("/b c.txt", "read", s.EnvdAccessToken, soon) + "&username=root",
		"expired and wrong": sign("/b c.txt", "read", other.EnvdAccessToken, past),
	} {
		if r := w.do(ask{method: "GET", path: path, key: "-", host: host}); r.Status != http.StatusUnauthorized || strings.Contains(r.Body, "expired") {
			t.Errorf("%s: %d %s", name, r.Status, r.Body)
		}
	}
}

// A port leads to the guest's, with the token of its sandbox; credentials of the layer do not get there.
func TestPorts(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base"}`)
	guest := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		for _, h := range []string{"X-Api-Key", "E2b-Traffic-Access-Token", "E2b-Sandbox-Id", "E2b-Sandbox-Port", "X-Access-Token"} {
			if r.Header.Get(h) != "" {
				t.Errorf("the guest gets %s", h)
			}
		}
		w.Header().Add("Set-Cookie", "a=b; Domain=sandbox.example; Path=/")
		w.Header().Set("Access-Control-Allow-Origin", "https://evil.example")
		w.Header().Set("Access-Control-Allow-Credentials", "true")
		w.Header().Set("X-Early", "1")
		w.WriteHeader(http.StatusEarlyHints)
		w.Header().Del("X-Early")
		_, _ = io.WriteString(w, r.Host+r.URL.Path)
	}))
	t.Cleanup(guest.Close)
	listen := strings.TrimPrefix(guest.URL, "http://") // the runner without machines opens nothing
	if _, err := w.rest.CreatePort(t.Context(), "ws_"+s.SandboxID, coppice.CreatePortRequest{GuestPort: 3000, Listen: listen}); err != nil {
		t.Fatal(err)
	}
	host := "3000-" + s.SandboxID + ".sandbox.example"
	r := w.do(ask{method: "GET", path: "/a", host: host, header: map[string]string{"E2b-Traffic-Access-Token": s.TrafficAccessToken}})
	if r.want(t, http.StatusOK, nil); r.Body != host+"/a" {
		t.Errorf("%q", r.Body)
	}
	r = w.do(ask{method: "GET", path: "/a", host: host, header: map[string]string{"X-Access-Token": s.EnvdAccessToken, "Origin": "https://a.example"}})
	r.want(t, http.StatusOK, nil)
	if h := r.Header; h.Get("Set-Cookie") != "a=b; Path=/" || len(h.Values("Access-Control-Allow-Origin")) != 1 || h.Get("Access-Control-Allow-Origin") != "*" || h.Get("Access-Control-Allow-Credentials") != "" {
		t.Errorf("the guest speaks for others: %v", h)
	}
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointPort {
			return errors.New("the address is somebody else's by now")
		}
		return nil
	})
	r = w.do(ask{method: "GET", path: "/a", host: host, header: map[string]string{"E2b-Traffic-Access-Token": s.TrafficAccessToken}})
	r.want(t, http.StatusBadGateway, nil)
	w.runner.Hook(nil)
	guest.Close()
	r = w.do(ask{method: "GET", path: "/a", host: host, header: map[string]string{"E2b-Traffic-Access-Token": s.TrafficAccessToken}})
	if r.want(t, http.StatusBadGateway, nil); !strings.Contains(r.Body, "The sandbox is running but port is not open") {
		t.Error(r.Body)
	}
}

// A paused sandbox has no ports, wherever its row says that they listen.
func TestPortsOfAPausedSandbox(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	s := w.create("", `{"templateID":"base"}`)
	other := httptest.NewServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { t.Error("somebody else gets the request") }))
	t.Cleanup(other.Close)
	if _, err := w.rest.CreatePort(t.Context(), "ws_"+s.SandboxID, coppice.CreatePortRequest{GuestPort: 3000, Listen: strings.TrimPrefix(other.URL, "http://")}); err != nil {
		t.Fatal(err)
	}
	w.do(ask{method: "POST", path: "/sandboxes/" + s.SandboxID + "/pause"}).want(t, http.StatusNoContent, nil)
	host := "3000-" + s.SandboxID + ".sandbox.example"
	w.do(ask{method: "GET", path: "/", host: host, header: map[string]string{"E2b-Traffic-Access-Token": s.TrafficAccessToken}}).want(t, http.StatusBadGateway, nil)
}

// A stream through a port ends with the key of its token, and a key has so many at the same time.
func TestPortStreams(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	key, id := w.tenant("tenant", coppice.ScopeWorkspaceRead, coppice.ScopeWorkspaceCreate, coppice.ScopeWorkspaceExec)
	s := w.create(key, `{"templateID":"base"}`)
	guest := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(w).Flush()
		<-r.Context().Done()
	}))
	t.Cleanup(guest.Close)
	if _, err := w.cell.Client(w.t, key).CreatePort(t.Context(), "ws_"+s.SandboxID, coppice.CreatePortRequest{GuestPort: 3000, Listen: strings.TrimPrefix(guest.URL, "http://")}); err != nil {
		t.Fatal(err)
	}
	open := func() (int, io.Reader) {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, w.url, nil)
		if err != nil {
			t.Fatal(err)
		}
		req.Host = "3000-" + s.SandboxID + ".sandbox.example"
		req.Header.Set("E2b-Traffic-Access-Token", s.TrafficAccessToken)
		resp, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = resp.Body.Close() })
		return resp.StatusCode, resp.Body
	}
	const most = 64
	streams := make([]io.Reader, most)
	for i := range streams {
		status, body := open()
		if streams[i] = body; status != http.StatusOK {
			t.Fatalf("stream %d: %d", i, status)
		}
	}
	if status, _ := open(); status != http.StatusTooManyRequests {
		t.Errorf("one more: %d", status)
	}
	w.envd(s, ask{method: "GET", path: "/files?path=/x"}).want(t, http.StatusTooManyRequests, nil)
	if err := w.rest.RevokeKey(t.Context(), id); err != nil {
		t.Fatal(err)
	}
	for _, body := range streams {
		_, _ = io.ReadAll(body) // it would go on for ever
	}
}
