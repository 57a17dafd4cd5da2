package router_test

import (
	"bufio"
	"crypto/tls"
	"io"
	"net"
	"net/http"
	"net/http/cookiejar"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coder/websocket"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

const absent = "The sandbox was not found"

// TestPublic: a public preview leads to the guest's port over HTTP/2 and HTTP/1.1, until it is ended. A port without a preview is absent, and a
// port on which nobody listens is closed.
func TestPublic(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	w.listen(ws.ID, 3000, w.guest(func(rw http.ResponseWriter, q *http.Request) { _, _ = io.WriteString(rw, q.Host+q.URL.String()) }))
	p := w.preview(ws.ID, 3000, coppice.VisibilityPublic)
	host := "3000-" + strings.TrimPrefix(ws.ID, "ws_") + "." + domain
	if p.URL != "https://"+host+"/" || p.Listen != "" || !p.ExpiresAt.IsZero() {
		t.Fatalf("%+v", p)
	}
	a := w.get(w.client, p.URL+"a/%2F?b=1;c&d=%zz")
	if w.want("h2", a, http.StatusOK, host+"/a/%2F?b=1;c&d=%zz"); a.proto != 2 {
		t.Errorf("HTTP/%d", a.proto)
	}
	if a = w.get(w.browser(nil, false), p.URL); a.proto != 1 {
		t.Errorf("HTTP/%d", a.proto)
	}
	w.want("HTTP/1.1", a, http.StatusOK, host+"/")
	w.want("by headers", w.get(w.client, "https://"+domain+"/x", "E2b-Sandbox-Id", strings.TrimPrefix(ws.ID, "ws_"), "E2b-Sandbox-Port", "3000"), http.StatusOK, domain+"/x")
	for name, host := range map[string]string{"another domain": "3000-" + strings.TrimPrefix(ws.ID, "ws_") + ".evil.example", "no port": domain + ".evil", "a child": "a." + host} {
		w.want(name, w.get(w.client, p.URL, "Host", host, "E2b-Sandbox-Id", strings.TrimPrefix(ws.ID, "ws_"), "E2b-Sandbox-Port", "3000"), http.StatusMisdirectedRequest, "not that of a preview")
	}
	w.want("another port", w.get(w.client, strings.Replace(p.URL, "3000-", "3001-", 1)), http.StatusBadGateway, absent)
	closed := w.preview(ws.ID, 3002, coppice.VisibilityPublic)
	w.want("closed", w.get(w.client, closed.URL), http.StatusBadGateway, `"message":"The sandbox is running but port is not open","port":3002,"code":502`)
	list, err := w.rest.Ports(t.Context(), ws.ID)
	if err != nil || len(list) != 2 || list[0].URL != p.URL {
		t.Errorf("%+v, %v", list, err)
	}
	if err := w.rest.DeletePort(t.Context(), ws.ID, p.ID); err != nil {
		t.Fatal(err)
	}
	w.want("ended", w.get(w.client, p.URL), http.StatusBadGateway, absent)
}

// TestSigned: the token is good for its workspace, port and epoch, and for nothing else. A fork's answer has one of its own.
func TestSigned(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	guest := w.guest(func(rw http.ResponseWriter, q *http.Request) {
		_, _ = io.WriteString(rw, "hello "+q.URL.String()+" "+q.Header.Get("Cookie")+q.Header.Get("Coppice-Preview-Token"))
	})
	w.listen(ws.ID, 3000, guest)
	w.listen(ws.ID, 4000, guest)
	p := w.preview(ws.ID, 3000, coppice.VisibilitySigned)
	base, token, ok := strings.Cut(p.URL, "?coppice_token=")
	if !ok || p.ExpiresAt.IsZero() {
		t.Fatalf("%+v", p)
	}
	w.want("in the URL", w.get(w.client, base+"a?x=1&coppice_token="+token+"&y=2"), http.StatusOK, "hello /a?x=1&y=2 ")
	w.want("in a header", w.get(w.client, base, "Coppice-Preview-Token", token), http.StatusOK, "hello / ")
	w.want("as E2B's", w.get(w.client, base, "E2b-Traffic-Access-Token", token), http.StatusOK, "hello / ")
	other := w.preview(ws.ID, 4000, coppice.VisibilitySigned)
	stranger := w.create(w.rest)
	w.listen(stranger.ID, 3000, guest)
	theirs := w.preview(stranger.ID, 3000, coppice.VisibilitySigned)
	for name, url := range map[string]string{
		"no token": base, "of another port": base + "?" + strings.SplitN(other.URL, "?", 2)[1], "of another workspace": base + "?" + strings.SplitN(theirs.URL, "?", 2)[1],
		"cut": p.URL[:len(p.URL)-1], "empty": base + "?coppice_token=",
	} {
		w.want(name, w.get(w.client, url), http.StatusBadGateway, absent)
	}

	cp, err := w.rest.CreateCheckpoint(t.Context(), ws.ID, coppice.CreateCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	w.preview(ws.ID, 5000, coppice.VisibilityPublic) // a fork does not get it
	fork, err := w.rest.ForkCheckpoint(t.Context(), cp.ID, coppice.ForkCheckpointRequest{})
	if err != nil {
		t.Fatal(err)
	}
	child := fork.Children[0]
	if len(child.Previews) != 2 || child.Previews[0].Visibility != coppice.VisibilitySigned || child.Previews[1].Visibility != coppice.VisibilitySigned {
		t.Fatalf("%+v", child.Previews)
	}
	w.listen(child.Workspace.ID, 3000, guest)
	for _, c := range child.Previews {
		if c.GuestPort != 3000 {
			continue
		}
		w.want("the fork's own", w.get(w.client, c.URL), http.StatusOK, "hello")
		w.want("the parent's, for the fork", w.get(w.client, strings.SplitN(c.URL, "?", 2)[0]+"?coppice_token="+token), http.StatusBadGateway, absent)
	}
	w.want("the parent's, after the fork", w.get(w.client, p.URL), http.StatusOK, "hello")

	if _, err := w.rest.RestoreWorkspace(t.Context(), ws.ID, cp.ID); err != nil {
		t.Fatal(err)
	}
	w.listen(ws.ID, 3000, guest)
	w.want("after a restore", w.get(w.client, p.URL), http.StatusBadGateway, absent)
	list, err := w.rest.Ports(t.Context(), ws.ID)
	if err != nil {
		t.Fatal(err)
	}
	for _, again := range list {
		if again.ID == p.ID {
			w.want("the new token", w.get(w.client, again.URL), http.StatusOK, "hello")
		}
	}
	w.preview(ws.ID, 3000, coppice.VisibilitySigned)
	for _, old := range list {
		if old.ID == p.ID {
			w.want("after another preview replaced it", w.get(w.client, old.URL), http.StatusBadGateway, absent)
		}
	}
}

// TestInheritedWithinQuota: a fork gets as many previews as the quota allows. A preview that has expired takes no place.
func TestInheritedWithinQuota(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	if _, err := w.rest.PatchProject(t.Context(), coppice.ProjectID(w.project()), coppice.PatchProjectRequest{Quotas: coppice.QuotasPatch{Ports: new(int64(2))}}); err != nil {
		t.Fatal(err)
	}
	short, err := w.rest.CreatePort(t.Context(), ws.ID, coppice.CreatePortRequest{GuestPort: 3000, Visibility: coppice.VisibilitySigned, TTLSeconds: 1})
	if err != nil {
		t.Fatal(err)
	}
	w.preview(ws.ID, 4000, coppice.VisibilitySigned)
	eventually.True(t, "a preview has expired", func() bool { return time.Now().After(short.ExpiresAt.Add(100 * time.Millisecond)) })
	fork := func() []coppice.Port {
		t.Helper()
		f, err := w.rest.ForkWorkspace(t.Context(), ws.ID, coppice.ForkWorkspaceRequest{})
		if err != nil {
			t.Fatal(err)
		}
		return f.Children[0].Previews
	}
	if got := fork(); len(got) != 1 || got[0].GuestPort != 4000 {
		t.Errorf("with one place the fork gets %+v", got)
	}
	if got := fork(); len(got) != 0 {
		t.Errorf("without a place the fork gets %+v", got)
	}
}

// TestPrivate: a private preview wants a key of the project that may reach into guests. Whoever has none gets the answer of an absent preview.
func TestPrivate(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	w.listen(ws.ID, 3000, w.guest(func(rw http.ResponseWriter, q *http.Request) {
		_, _ = io.WriteString(rw, "hello "+q.Header.Get("Coppice-Key")+q.Header.Get("Authorization"))
	}))
	p := w.preview(ws.ID, 3000, coppice.VisibilityPrivate)
	w.want("with the key", w.get(w.client, p.URL, "Coppice-Key", firstKey, "Authorization", "Bearer mine"), http.StatusOK, "hello Bearer mine")
	key := func(project coppice.ProjectID, scopes ...coppice.KeyScope) string {
		k, err := w.rest.CreateKey(t.Context(), project, coppice.CreateKeyRequest{Name: "k", Scopes: scopes})
		if err != nil {
			t.Fatal(err)
		}
		return k.Secret
	}
	own := string(w.project())
	other, err := w.rest.CreateProject(t.Context(), coppice.CreateProjectRequest{Name: "other"})
	if err != nil {
		t.Fatal(err)
	}
	nowhere := w.get(w.client, strings.Replace(p.URL, "3000-", "3001-", 1))
	for name, secret := range map[string]string{
		"none": "", "wrong": "cpk_x_y", "of another project": key(other.ID, coppice.ScopeWorkspaceExec), "without the scope": key(own, coppice.ScopeWorkspaceRead),
	} {
		if a := w.get(w.client, p.URL, "Coppice-Key", secret); a.status != nowhere.status || a.body != nowhere.body {
			t.Errorf("%s: %d %q, and an absent one %q", name, a.status, a.body, nowhere.body)
		}
	}
	// A key that may only read sees the URL of a signed preview without its token.
	w.preview(ws.ID, 4000, coppice.VisibilitySigned)
	list, err := w.cell.Client(w.T, key(own, coppice.ScopeWorkspaceRead)).Ports(t.Context(), ws.ID)
	if err != nil || len(list) != 2 || strings.Contains(list[1].URL, "?") {
		t.Errorf("%+v, %v", list, err)
	}
}

// TestBrowser: a browser keeps the token in a cookie of the one host, and sends it only for what the page itself, or a link, asks for.
func TestBrowser(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	w.listen(ws.ID, 3000, w.guest(func(rw http.ResponseWriter, q *http.Request) {
		for _, c := range []string{
			"mine=1", "same=1; Domain=" + q.Host, "parent=1; Domain=" + domain, "dotted=1; Domain=." + domain, "other=1; Domain=a." + domain, "__Host-coppice-preview=x; Secure; Path=/",
		} {
			rw.Header().Add("Set-Cookie", c)
		}
		rw.Header().Set("Clear-Site-Data", `"*"`)
		rw.Header().Set("Alt-Svc", `h3=":1"`)
		_, _ = io.WriteString(rw, "cookies "+q.Header.Get("Cookie"))
	}))
	p := w.preview(ws.ID, 3000, coppice.VisibilitySigned)
	base, _, _ := strings.Cut(p.URL, "?")
	jar, err := cookiejar.New(nil)
	if err != nil {
		t.Fatal(err)
	}
	browser := w.browser(jar, true)
	a := w.get(browser, p.URL+"&q=1", "Accept", "text/html")
	if a.status != http.StatusSeeOther || a.header.Get("Location") != "/?q=1" || a.header.Get("Referrer-Policy") != "no-referrer" {
		t.Fatalf("%+v", a)
	}
	if got := a.header.Get("Clear-Site-Data"); got != `"cache", "storage"` {
		t.Errorf("at the first link the browser clears %q", got)
	}
	if again := w.get(browser, p.URL, "Accept", "text/html"); again.status != http.StatusSeeOther || again.header.Get("Clear-Site-Data") != "" {
		t.Errorf("the same link again: %+v", again)
	}
	if c := a.header.Get("Set-Cookie"); !strings.HasPrefix(c, "__Host-coppice-preview=") || !strings.HasSuffix(c, "; Path=/; HttpOnly; Secure; SameSite=Lax") {
		t.Errorf("the cookie is %q", c)
	}
	a = w.get(browser, base, "Cookie", "own=1", "Sec-Fetch-Site", "same-origin")
	w.want("with the cookie", a, http.StatusOK, "cookies own=1")
	if strings.Contains(a.body, "coppice") {
		t.Errorf("the guest gets %q", a.body)
	}
	if got := strings.Join(a.header.Values("Set-Cookie"), " | "); got != "mine=1 | same=1" {
		t.Errorf("the guest sets %q", got)
	}
	if a.header.Get("Clear-Site-Data") != "" || a.header.Get("Alt-Svc") != "" {
		t.Errorf("the guest speaks for others: %v", a.header)
	}
	if a := w.get(browser, strings.Replace(p.URL, "/?", "//evil.example/?", 1), "Accept", "text/html"); a.header.Get("Location") != "/evil.example/" {
		t.Errorf("it leads to %q", a.header.Get("Location"))
	}
	for name, header := range map[string][]string{
		"a browser that does not say":       {},
		"a request of a sibling's page":     {"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "cors", "Sec-Fetch-Dest", "empty"},
		"a form of a sibling's page":        {"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document", "Origin", "https://4000-x." + domain},
		"a frame of a sibling's page":       {"Sec-Fetch-Site", "same-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "iframe"},
		"a socket of another page":          {"Origin", "https://evil.example"},
		"a sandboxed page":                  {"Origin", "null"},
		"an image of another page":          {"Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "no-cors", "Sec-Fetch-Dest", "image"},
		"an old browser from a foreign one": {"Origin", strings.TrimSuffix(base, "/") + ".evil.example"},
	} {
		w.want(name, w.get(browser, base, header...), http.StatusBadGateway, absent)
	}
	w.want("a link", w.get(browser, base, "Sec-Fetch-Site", "cross-site", "Sec-Fetch-Mode", "navigate", "Sec-Fetch-Dest", "document"), http.StatusOK, "cookies")
	w.want("its own page", w.get(browser, base, "Sec-Fetch-Site", "same-origin", "Origin", strings.TrimSuffix(base, "/")), http.StatusOK, "cookies")
}

// TestServiceWorkers: no script becomes a service worker, which would outlive the state of the workspace that it came from. The browser cannot take
// one from its cache either.
func TestServiceWorkers(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	w.listen(ws.ID, 3000, w.guest(func(rw http.ResponseWriter, _ *http.Request) {
		rw.Header().Set("Vary", "Accept")
		_, _ = io.WriteString(rw, "script")
	}))
	p := w.preview(ws.ID, 3000, coppice.VisibilityPublic)
	w.want("for a service worker", w.get(w.client, p.URL+"sw.js", "Service-Worker", "script"), http.StatusForbidden, "service workers")
	a := w.get(w.client, p.URL+"sw.js")
	w.want("for a page", a, http.StatusOK, "script")
	if got := a.header.Values("Vary"); !slices.Equal(got, []string{"Accept", "Service-Worker"}) {
		t.Errorf("it varies by %q", got)
	}
}

// TestRevokedKey: the signed links that were made with a key, and those that forks have inherited, end with the key. Other previews stay.
func TestRevokedKey(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	guest := w.guest(func(rw http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(rw, "hello") })
	key, err := w.rest.CreateKey(t.Context(), coppice.ProjectID(w.project()), coppice.CreateKeyRequest{
		Name: "visitor", Scopes: []coppice.KeyScope{coppice.ScopeWorkspaceCreate, coppice.ScopeWorkspaceExec}, TTLSeconds: 3600,
	})
	if err != nil {
		t.Fatal(err)
	}
	theirs := w.cell.Client(w.T, key.Secret)
	open := func(c *coppice.Client, port int, v coppice.Visibility, ttl int64) coppice.Port {
		t.Helper()
		w.listen(ws.ID, port, guest)
		p, err := c.CreatePort(t.Context(), ws.ID, coppice.CreatePortRequest{GuestPort: port, Visibility: v, TTLSeconds: ttl})
		if err != nil {
			t.Fatal(err)
		}
		w.want("before", w.get(w.client, p.URL, "Coppice-Key", firstKey), http.StatusOK, "hello")
		return p
	}
	dead := open(theirs, 3000, coppice.VisibilitySigned, 7200)
	if dead.ExpiresAt.IsZero() || dead.ExpiresAt.After(key.Key.ExpiresAt) {
		t.Errorf("the link ends at %s, and its key at %s", dead.ExpiresAt, key.Key.ExpiresAt)
	}
	stay := []coppice.Port{
		open(theirs, 3001, coppice.VisibilityPrivate, 0), open(theirs, 3002, coppice.VisibilityPublic, 0), open(w.rest, 3003, coppice.VisibilitySigned, 0),
	}
	f, err := w.rest.ForkWorkspace(t.Context(), ws.ID, coppice.ForkWorkspaceRequest{})
	if err != nil {
		t.Fatal(err)
	}
	child := f.Children[0]
	if len(child.Previews) != 3 {
		t.Fatalf("the fork has %+v", child.Previews)
	}
	if err := w.rest.RevokeKey(t.Context(), key.Key.ID); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "its link is dead", func() bool { return w.get(w.client, dead.URL).status == http.StatusBadGateway })
	for _, p := range stay {
		w.want("another preview", w.get(w.client, p.URL, "Coppice-Key", firstKey), http.StatusOK, "hello")
	}
	for id, want := range map[coppice.WorkspaceID]int{ws.ID: 3, child.Workspace.ID: 2} {
		if list, err := w.rest.Ports(t.Context(), id); err != nil || len(list) != want {
			t.Errorf("%s has %+v, %v", id, list, err)
		}
	}
}

// TestStreams: WebSockets and server-sent events go both ways at once, and end with the preview and with the sandbox.
func TestStreams(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	next := make(chan struct{})
	guest := w.guest(func(rw http.ResponseWriter, q *http.Request) {
		if q.URL.Path == "/events" {
			for range 2 {
				_, _ = io.WriteString(rw, "data: one\n\n")
				_ = http.NewResponseController(rw).Flush()
				select {
				case <-next:
				case <-q.Context().Done():
				}
			}
			return
		}
		c, err := websocket.Accept(rw, q, nil)
		if err != nil {
			return
		}
		defer c.CloseNow() //nolint:errcheck // of a test
		for {
			kind, b, err := c.Read(q.Context())
			if err != nil || c.Write(q.Context(), kind, b) != nil {
				return
			}
		}
	})
	w.listen(ws.ID, 3000, guest)
	p := w.preview(ws.ID, 3000, coppice.VisibilityPublic)
	res, err := w.client.Get(p.URL + "events")
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	lines := bufio.NewReader(res.Body)
	for range 2 { // the second event is sent after the first was read
		if line, err := lines.ReadString('\n'); err != nil || line != "data: one\n" {
			t.Fatalf("%q, %v", line, err)
		}
		if _, err := lines.ReadString('\n'); err != nil {
			t.Fatal(err)
		}
		next <- struct{}{}
	}
	dial := func(p coppice.Port) *websocket.Conn {
		t.Helper()
		c, _, err := websocket.Dial(t.Context(), p.URL, &websocket.DialOptions{HTTPClient: w.browser(nil, false)}) //nolint:bodyclose // of an upgrade
		if err != nil {
			t.Fatal(err)
		}
		if err := c.Write(t.Context(), websocket.MessageText, []byte("ping")); err != nil {
			t.Fatal(err)
		}
		if _, b, err := c.Read(t.Context()); err != nil || string(b) != "ping" {
			t.Fatalf("%q, %v", b, err)
		}
		return c
	}
	c := dial(p)
	if err := w.rest.DeletePort(t.Context(), ws.ID, p.ID); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Read(t.Context()); err == nil { // a router looks every few seconds
		t.Error("a socket goes on without its preview")
	}
	c = dial(w.preview(ws.ID, 3000, coppice.VisibilityPublic))
	if _, err := w.rest.TerminateWorkspace(t.Context(), ws.ID); err != nil {
		t.Fatal(err)
	}
	if _, _, err := c.Read(t.Context()); err == nil {
		t.Error("a socket goes on without its sandbox")
	}
}

// TestBounds: a workspace has so many requests at the same time, of which an address has half, and their places are free again.
func TestBounds(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	free := make(chan struct{})
	w.listen(ws.ID, 3000, w.guest(func(rw http.ResponseWriter, _ *http.Request) {
		rw.WriteHeader(http.StatusOK)
		_ = http.NewResponseController(rw).Flush()
		<-free
	}))
	p := w.preview(ws.ID, 3000, coppice.VisibilityPublic)
	const ofOne = 64
	for from := byte(1); from <= 3; from++ {
		client := w.browserAt(nil, true, net.IPv4(127, 0, 0, from))
		for i := 0; i < ofOne && from < 3; i++ {
			res, err := client.Get(p.URL)
			if err != nil {
				t.Fatal(err)
			}
			defer res.Body.Close()
			if res.StatusCode != http.StatusOK {
				t.Fatalf("request %d of address %d: %s", i, from, res.Status)
			}
		}
		if a := w.get(client, p.URL); a.status != http.StatusTooManyRequests || a.header.Get("Retry-After") == "" {
			t.Errorf("one more, from address %d: %+v", from, a)
		}
	}
	close(free)
	eventually.True(t, "a place is free", func() bool { return w.get(w.client, p.URL).status == http.StatusOK })
}

// TestIdleConnections: after many requests at once the router keeps a few connections to the guest for the next ones.
func TestIdleConnections(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	const atOnce, most = 40, 16
	var arrived sync.WaitGroup
	arrived.Add(atOnce)
	var mu sync.Mutex
	open := map[net.Conn]bool{}
	guest := httptest.NewUnstartedServer(http.HandlerFunc(func(rw http.ResponseWriter, _ *http.Request) {
		arrived.Done()
		arrived.Wait() // so that each has a connection of its own
		_, _ = io.WriteString(rw, "hello")
	}))
	guest.Config.ConnState = func(c net.Conn, s http.ConnState) {
		mu.Lock()
		defer mu.Unlock()
		switch s {
		case http.StateNew:
			open[c] = true
		case http.StateClosed, http.StateHijacked:
			delete(open, c)
		case http.StateActive, http.StateIdle:
		}
	}
	guest.Start()
	t.Cleanup(guest.Close)
	w.listen(ws.ID, 3000, guest)
	p := w.preview(ws.ID, 3000, coppice.VisibilityPublic)
	var all sync.WaitGroup
	for range atOnce {
		all.Go(func() { w.want("a request", w.get(w.client, p.URL), http.StatusOK, "hello") })
	}
	all.Wait()
	eventually.True(t, "the other connections are closed", func() bool {
		mu.Lock()
		defer mu.Unlock()
		return len(open) == most
	})
}

// TestHostileGuest: a guest that answers with too much, with two answers, with an early answer or with none gets no further than its own request.
func TestHostileGuest(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	heads := map[string]string{
		"/long":   "HTTP/1.1 200 OK\r\nX-Long: " + strings.Repeat("a", 1<<17) + "\r\n\r\n",
		"/split":  "HTTP/1.1 200 OK\r\nX-A: b\r\n Set-Cookie: a=b\r\nContent-Length: 0\r\n\r\n",
		"/two":    "HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
		"/none":   "",
		"/switch": "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: other\r\n\r\n",
	}
	guest := w.guest(func(rw http.ResponseWriter, q *http.Request) {
		conn, _, err := http.NewResponseController(rw).Hijack()
		if err != nil {
			return
		}
		defer conn.Close()
		if head, ok := heads[q.URL.Path]; ok {
			_, _ = io.WriteString(conn, head)
			return
		}
		_, _ = io.WriteString(conn, "HTTP/1.1 103 Early Hints\r\nX-Early: 1\r\n\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\npoison")
	})
	w.listen(ws.ID, 3000, guest)
	p := w.preview(ws.ID, 3000, coppice.VisibilityPublic)
	for path := range heads {
		if a := w.get(w.client, p.URL+path[1:]); a.status != http.StatusBadGateway && path != "/split" || a.header.Get("Set-Cookie") != "" {
			t.Errorf("%s: %+v", path, a)
		}
	}
	for range 3 {
		if a := w.get(w.client, p.URL); a.status != http.StatusOK || a.body != "ok" || a.header.Get("X-Early") != "" {
			t.Errorf("%+v", a)
		}
	}
}

// TestSmuggling: what two servers could read in two ways is refused, and headers for the next hop do not reach the guest.
func TestSmuggling(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create(w.rest)
	w.listen(ws.ID, 3000, w.guest(func(rw http.ResponseWriter, q *http.Request) {
		if q.URL.Path != "/" || q.Header.Get("X-Hop") != "" || q.Header.Get("X-Forwarded-Host") == "evil.example" || q.Header.Get("Forwarded") != "" {
			t.Errorf("the guest gets %s %v", q.URL, q.Header)
		}
		_, _ = io.WriteString(rw, "hello")
	}))
	p := w.preview(ws.ID, 3000, coppice.VisibilityPublic)
	host := strings.TrimSuffix(strings.TrimPrefix(p.URL, "https://"), "/")
	transport, ok := w.client.Transport.(*http.Transport)
	if !ok {
		t.Fatal("no transport")
	}
	for request, want := range map[string]string{
		"GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\nX-Forwarded-Host: evil.example\r\nForwarded: host=evil.example\r\n\r\n":                         "200",
		"POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nContent-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /evil HTTP/1.1\r\nHost: " + host + "\r\n\r\n": "200",
		"POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab":                                                                 "400",
		"POST / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nTransfer-Encoding: xchunked\r\n\r\n":                                                                              "501",
		"GET / HTTP/1.1\r\nHost: " + host + "\r\nHost: evil.example\r\nConnection: close\r\n\r\n":                                                                                        "400",
		"GET / HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\nX-A : b\r\n\r\n":                                                                                                   "400",
		"CONNECT " + host + ":80 HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n":                                                                                            "400",
		"GET http://evil.example/ HTTP/1.1\r\nHost: " + host + "\r\nConnection: close\r\n\r\n":                                                                                           "421",
	} {
		raw, err := transport.DialContext(t.Context(), "tcp", "")
		if err != nil {
			t.Fatal(err)
		}
		config := transport.TLSClientConfig.Clone()
		config.NextProtos = nil
		conn := tls.Client(raw, config)
		if _, err := io.WriteString(conn, request); err != nil {
			t.Fatal(err)
		}
		b, _ := io.ReadAll(conn)
		_ = conn.Close()
		if status, _, _ := strings.Cut(strings.TrimPrefix(string(b), "HTTP/1.1 "), " "); status != want {
			t.Errorf("%q is answered %q, want %s", request, b, want)
		}
	}
}
