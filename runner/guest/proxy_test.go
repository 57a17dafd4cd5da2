package guest

import (
	"io"
	"net/http"
	"net/http/httptest"
	"net/http/httptrace"
	"net/textproto"
	"strings"
	"testing"

	"github.com/coder/websocket"
	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

func TestPublic(t *testing.T) {
	t.Parallel()
	id := string(core.NewID[core.SessionID]())
	session := guestapi.PathSessions + "/" + id
	watch := guestapi.PathWatches + "/" + string(core.NewID[core.WatchID]())
	for path, methods := range map[string]string{
		guestapi.PathSessions: "GET POST", session: "GET DELETE", session + "/wait": "GET", session + "/output": "GET", session + "/attach": "GET",
		session + "/stdin": "POST", session + "/signal": "POST", session + "/resize": "POST", session + "/deadline": "POST",
		guestapi.PathWatches: "GET POST", watch: "DELETE", watch + "/events": "GET", watch + "/": "", watch + "/x": "", watch + "/events/": "",
		guestapi.PathFileContent: "GET HEAD PUT DELETE", guestapi.PathMakeDir: "POST", guestapi.PathRename: "POST", guestapi.PathXAttrs: "POST",
		guestapi.PathFiles: "GET HEAD PUT DELETE", guestapi.PathProcesses: "GET", guestapi.PathPorts: "GET", guestapi.PathMark: "GET",
		// and what is not
		guestapi.PathHealth: "", guestapi.PathQuiesce: "", guestapi.PathReseed: "", guestapi.PathReseal: "", guestapi.PathRelease: "",
		"": "", "/": "", "/v1": "", "/v1/": "", "*": "", "/v1/files/": "", "/v1/files/../reseal": "", "/v1//reseal": "", "//v1/files": "", "/v1/sessions/": "",
		"/v1/sessions/..": "", "/v1/sessions/../reseal": "", session + "/": "", session + "/..": "", session + "/wait/": "", session + "/nothing": "",
		session + "/wait/../../../reseal": "", "/v1/sessions/x": "", "/V1/files": "", "/v1/files?x": "", "/v1/reseal;/v1/files": "",
	} {
		for _, m := range []string{"GET", "HEAD", "POST", "PUT", "DELETE", "PATCH", "CONNECT", "OPTIONS", "TRACE", ""} {
			want := m != "" && strings.Contains(" "+methods+" ", " "+m+" ")
			if got := Public(m, path); got != want {
				t.Errorf("%s %q: public is %t, want %t", m, path, got, want)
			}
		}
	}
}

func TestTransportRefusesControlRoutes(t *testing.T) {
	t.Parallel()
	c := serveHTTP(t, func(_ http.ResponseWriter, r *http.Request) { t.Errorf("the guest was asked for %s", r.URL) })
	for _, url := range []string{
		"http://guest/v1/reseal", "http://guest/v1/%72eseal", "http://guest/v1/files/..%2freseal", "http://guest/v1/sessions/%2e%2e/reseal",
		"http://guest/v1%2freseal", "http://guest/v1/flush", "http://guest",
	} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader("{}"))
		if err != nil {
			t.Fatal(err)
		}
		res, err := c.Transport().RoundTrip(req)
		if err == nil {
			_ = res.Body.Close()
		}
		if core.CodeOf(err) != core.CodeRouteNotFound {
			t.Errorf("%s: %v", url, err)
		}
	}
}

func startProxy(t *testing.T, c *Client) string {
	t.Helper()
	srv := httptest.NewServer(c.Proxy(func(w http.ResponseWriter, _ *http.Request, err error) {
		http.Error(w, string(core.CodeOf(err)), http.StatusBadGateway)
	}))
	t.Cleanup(srv.Close)
	return srv.URL
}

// TestProxyReducesBothWays: no credential of the caller goes in, and nothing of a page comes out.
func TestProxyReducesBothWays(t *testing.T) {
	t.Parallel()
	seen := make(chan *http.Request, 1)
	c := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		b, _ := io.ReadAll(r.Body)
		seen <- r
		h := w.Header()
		h.Set("Content-Type", "text/html")
		h.Set("Set-Cookie", "a=b")
		h.Set("Location", "http://elsewhere/")
		h.Set("Access-Control-Allow-Origin", "*")
		h["X-Content-Type-Options"] = []string{"none"}
		h.Set(guestapi.HeaderOffset, "5")
		h.Set(guestapi.HeaderFileInfo, "\xff\xfe")
		h.Set("Trailer", guestapi.HeaderEOF+", X-Evil, "+guestapi.HeaderStatus)
		_, _ = w.Write(b)
		h.Set(guestapi.HeaderEOF, "true")
		h.Set("X-Evil", "1")
		h.Set(guestapi.HeaderStatus, "\xe9vil")
	})
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPut, startProxy(t, c)+guestapi.PathFiles+"?path=%2Fa", strings.NewReader("body"))
	if err != nil {
		t.Fatal(err)
	}
	req.Header = http.Header{"Authorization": {"Bearer secret"}, "Cookie": {"a=b"}, "X-Forwarded-For": {"1.2.3.4"}, "Content-Type": {"application/json", "second"}, "Range": {"bytes=0-1"}}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	b, err := io.ReadAll(res.Body)
	if err != nil || string(b) != "body" {
		t.Errorf("body %q %v", b, err)
	}
	in := <-seen
	for name := range in.Header {
		switch name {
		case "Content-Type", "Content-Length", "Connection", "Accept-Encoding", "User-Agent":
		default:
			t.Errorf("the guest was told %s: %s", name, in.Header[name])
		}
	}
	if in.Host != "guest" || in.URL.String() != "/v1/files?path=%2Fa" || len(in.Header["Content-Type"]) != 1 {
		t.Errorf("the guest was asked for %s of %s, header %v", in.URL, in.Host, in.Header)
	}
	res.Header.Del("Date")
	res.Header.Del("Content-Length")
	want := http.Header{"Content-Type": {"application/octet-stream"}, "X-Content-Type-Options": {"nosniff"}, guestapi.HeaderOffset: {"5"}}
	if diff := cmp.Diff(want, res.Header); diff != "" {
		t.Error(diff)
	}
	for name, v := range res.Trailer {
		if len(v) > 0 && name != guestapi.HeaderEOF {
			t.Errorf("trailer %s: %q", name, v)
		}
	}
	if res.Trailer.Get(guestapi.HeaderEOF) != "true" {
		t.Errorf("trailer %v", res.Trailer)
	}
}

// TestProxyForwardsNoInterimAnswer has a guest send interim answers with headers of its own. The user sees none of them, and the headers
// that the server set before are still there.
func TestProxyForwardsNoInterimAnswer(t *testing.T) {
	t.Parallel()
	c := serveHTTP(t, func(w http.ResponseWriter, _ *http.Request) {
		for _, code := range []int{http.StatusEarlyHints, http.StatusProcessing, 199} {
			w.Header().Set("Set-Cookie", "a=b")
			w.Header().Set("Link", "</evil>; rel=preload")
			w.WriteHeader(code)
		}
		w.Header().Del("Set-Cookie")
		_, _ = io.WriteString(w, "done")
	})
	proxy := c.Proxy(func(w http.ResponseWriter, _ *http.Request, err error) {
		http.Error(w, err.Error(), http.StatusBadGateway)
	})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("X-Ours", "kept")
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	ctx := httptrace.WithClientTrace(t.Context(), &httptrace.ClientTrace{Got1xxResponse: func(code int, h textproto.MIMEHeader) error {
		t.Errorf("the user got %d with %v", code, h)
		return nil
	}})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, srv.URL+guestapi.PathPorts, nil)
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultTransport.RoundTrip(req)
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = res.Body.Close() }()
	if b, err := io.ReadAll(res.Body); err != nil || string(b) != "done" {
		t.Errorf("body %q, %v", b, err)
	}
	if res.Header.Get("X-Ours") != "kept" || res.Header.Get("Link") != "" {
		t.Errorf("header %v", res.Header)
	}
}

// TestProxyBoundsHeaders: too many interim answers, and headers that are too long, are a fault of the guest.
func TestProxyBoundsHeaders(t *testing.T) {
	t.Parallel()
	c := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case guestapi.PathPorts:
			for range 10_000 {
				w.Header().Set("Link", strings.Repeat("x", 1000))
				w.WriteHeader(http.StatusEarlyHints)
			}
		case guestapi.PathProcesses:
			w.Header().Set(guestapi.HeaderFileInfo, strings.Repeat("x", 1<<20))
		}
		_, _ = io.WriteString(w, "done")
	})
	for _, path := range []string{guestapi.PathPorts, guestapi.PathProcesses} {
		res, err := http.Get(startProxy(t, c) + path)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != http.StatusBadGateway {
			t.Errorf("%s: %s", path, res.Status)
		}
	}
}

func TestProxyFailures(t *testing.T) {
	t.Parallel()
	c := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == guestapi.PathPorts {
			w.Header().Set("Location", "http://169.254.169.254/")
			w.WriteHeader(http.StatusFound)
			return
		}
		panic(http.ErrAbortHandler)
	})
	url := startProxy(t, c)
	for path, want := range map[string]core.Code{
		guestapi.PathPorts: core.CodeGuestProtocol, guestapi.PathProcesses: core.CodeGuestUnreachable, guestapi.PathReseal: core.CodeRouteNotFound,
	} {
		res, err := http.Get(url + path)
		if err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(res.Body)
		_ = res.Body.Close()
		if res.StatusCode != http.StatusBadGateway || strings.TrimSpace(string(b)) != string(want) {
			t.Errorf("%s: status %d, %s, want %s", path, res.StatusCode, b, want)
		}
	}
	_ = c.Close()
	res, err := http.Get(url + guestapi.PathPorts)
	if err != nil {
		t.Fatal(err)
	}
	_ = res.Body.Close()
	if res.StatusCode != http.StatusBadGateway {
		t.Errorf("over a closed connection: %d", res.StatusCode)
	}
}

func TestProxyPassesWebSockets(t *testing.T) {
	t.Parallel()
	c := serveHTTP(t, func(w http.ResponseWriter, r *http.Request) {
		conn, err := websocket.Accept(w, r, &websocket.AcceptOptions{InsecureSkipVerify: true})
		if err != nil {
			t.Error(err)
			return
		}
		defer func() { _ = conn.CloseNow() }()
		for range 3 {
			kind, b, err := conn.Read(r.Context())
			if err != nil {
				t.Error(err)
				return
			}
			if err := conn.Write(r.Context(), kind, append(b, '!')); err != nil {
				t.Error(err)
			}
		}
		_ = conn.Close(websocket.StatusNormalClosure, "done")
	})
	path := strings.Replace(guestapi.PathSessionAttach, "{id}", string(core.NewID[core.SessionID]()), 1)
	conn, _, err := websocket.Dial(t.Context(), startProxy(t, c)+path, nil) //nolint:bodyclose // websocket.Dial leaves nothing to close
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = conn.CloseNow() }()
	for range 3 {
		if err := conn.Write(t.Context(), websocket.MessageBinary, []byte("x\xc0cppgus\x1a")); err != nil {
			t.Fatal(err)
		}
		if _, b, err := conn.Read(t.Context()); err != nil || string(b) != "x\xc0cppgus\x1a!" {
			t.Fatalf("%q %v", b, err)
		}
	}
	if _, _, err := conn.Read(t.Context()); websocket.CloseStatus(err) != websocket.StatusNormalClosure {
		t.Errorf("the end is %v", err)
	}
}
