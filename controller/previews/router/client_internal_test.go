package router

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/previews"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sandboxhost"
)

// desk finds one preview, whose token is "good", and counts what it is asked.
type desk struct {
	Previews
	Keys

	known, absent, down bool // what Recent and Lookup say
	lookups, used       int
}

func (d *desk) Recent(sandboxhost.Target) (previews.Preview, bool, error) {
	return signed, d.known, nil
}

func (d *desk) Lookup(context.Context, sandboxhost.Target) (previews.Preview, error) {
	d.lookups++
	switch {
	case d.down:
		return previews.Preview{}, core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "down")
	case d.absent:
		return previews.Preview{}, previews.Absent()
	}
	return signed, nil
}

func (d *desk) Find(context.Context, sandboxhost.Target) (previews.Preview, error) {
	return signed, nil
}
func (d *desk) Token(_ previews.Preview, token string) bool { return token == "good" }
func (d *desk) Used(previews.Upstream)                      { d.used++ }

var signed = previews.Preview{Port: model.Port{ID: "port_1", Visibility: model.VisibilitySigned}}

const sent = 3000 // requests; a bucket holds and gets less while they are sent

func (d *desk) router() *Router {
	return New(Config{Previews: d, Keys: d, Domain: "preview.example", Log: slog.New(slog.DiscardHandler)})
}

// ask has an address send a request, which is not forwarded, and returns the status of the answer; 0 if it is let in.
func ask(t *testing.T, r *Router, from, token string) int {
	t.Helper()
	q := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "https://3000-"+strings.Repeat("0", 26)+".preview.example/", http.NoBody)
	q.RemoteAddr = net.JoinHostPort(from, "1")
	q.Header.Set(headerToken, token)
	at, ok := target(q, r.cfg.Domain)
	if !ok {
		t.Fatal("no target")
	}
	_, _, _, err := r.find(q, at, r.client(q))
	if err == nil {
		return 0
	}
	w := httptest.NewRecorder()
	r.refuse(w, q, at, err)
	return w.Code
}

// TestStrangers: an address whose requests are refused is soon refused without a look into the database. Others are not, and who is let in
// is never counted. The address itself still gets in where it has a token and the preview is known.
func TestStrangers(t *testing.T) {
	t.Parallel()
	for name, d := range map[string]*desk{"no preview": {absent: true}, "a wrong token": {}, "a wrong token of a known preview": {known: true}} {
		r := d.router()
		for i := 0; i < sent && !d.absent; i++ {
			if got := ask(t, r, "192.0.2.1", "good"); got != 0 {
				t.Fatalf("%s: a good token is answered %d", name, got)
			}
		}
		d.lookups = 0
		limited := 0
		for range sent {
			switch got := ask(t, r, "192.0.2.1", "bad"); got {
			case http.StatusTooManyRequests:
				limited++
			case http.StatusBadGateway:
			default:
				t.Fatalf("%s: %d", name, got)
			}
		}
		if limited == 0 || limited+d.lookups != sent {
			t.Errorf("%s: %d of %d are limited, and %d looked up", name, limited, sent, d.lookups)
		}
		if got := ask(t, r, "192.0.2.2", "bad"); got != http.StatusBadGateway {
			t.Errorf("%s: another address is answered %d", name, got)
		}
		d.known, d.absent = true, false
		if got := ask(t, r, "192.0.2.1", "good"); got != 0 {
			t.Errorf("%s: with the token of a known preview it is answered %d", name, got)
		}
	}
}

// TestOutage: requests that could not be judged do not count against an address.
func TestOutage(t *testing.T) {
	t.Parallel()
	d := &desk{down: true}
	r := d.router()
	for range sent {
		if got := ask(t, r, "192.0.2.1", "good"); got != http.StatusServiceUnavailable {
			t.Fatalf("without a database: %d", got)
		}
	}
	d.down = false
	if got := ask(t, r, "192.0.2.1", "good"); got != 0 {
		t.Errorf("afterwards: %d", got)
	}
}

// keys know one key, and count the others that they are asked about.
type keys struct {
	Keys

	asked int
}

func (k *keys) Known(secret string) bool { return secret == "known" }

func (k *keys) Authenticate(_ context.Context, secret string) (model.Key, error) {
	if k.Known(secret) {
		return model.Key{Scopes: []core.KeyScope{core.ScopeWorkspaceExec}}, nil
	}
	k.asked++
	return model.Key{}, core.Errorf(core.Unauthenticated, core.CodeUnauthenticated, "no")
}

// full has no place for another read.
type full struct{ Previews }

func (full) Queue(context.Context) (func(), error) {
	return nil, core.Errorf(core.Unavailable, core.CodeDatabaseUnavailable, "full")
}

// TestKeysOfStrangers: a key that nobody knows waits for its turn at the database. A known one does not.
func TestKeysOfStrangers(t *testing.T) {
	t.Parallel()
	k := &keys{}
	r := &Router{cfg: Config{Previews: full{}, Keys: k}}
	q := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
	for secret, want := range map[string]core.Category{"known": "", "guessed": core.Unavailable, "": core.NotFound} {
		q.Header.Set(headerKey, secret)
		if _, _, err := r.admit(q, previews.Preview{Port: model.Port{Visibility: model.VisibilityPrivate}}); core.CategoryOf(err) != want {
			t.Errorf("%q: %v, want %q", secret, err, want)
		}
	}
	if k.asked != 0 {
		t.Errorf("%d keys were read in spite of the queue", k.asked)
	}
}

// TestClient: only a proxy of the operator may say who the client is.
func TestClient(t *testing.T) {
	t.Parallel()
	r := &Router{cfg: Config{Proxies: []netip.Prefix{netip.MustParsePrefix("10.0.0.0/8")}}}
	for _, c := range []struct{ remote, forwarded, want string }{
		{"192.0.2.1:1", "198.51.100.1", "192.0.2.1"},
		{"10.0.0.1:1", "198.51.100.1", "198.51.100.1"},
		{"10.0.0.1:1", "203.0.113.1, 198.51.100.1, 10.0.0.2", "198.51.100.1"},
		{"10.0.0.1:1", "", "10.0.0.1"},
		{"10.0.0.1:1", "evil, 10.0.0.3", "10.0.0.3"},
		{"[::ffff:10.0.0.1]:1", "2001:db8::1", "2001:db8::1"},
		{"10.0.0.1:1", "198.51.100.1, " + strings.Repeat("10.0.0.9, ", maxHops) + "10.0.0.9", "10.0.0.9"},
		{"@", "198.51.100.1", "invalid IP"},
	} {
		q := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", http.NoBody)
		q.RemoteAddr = c.remote
		q.Header.Set("X-Forwarded-For", c.forwarded)
		if got := r.client(q).String(); got != c.want {
			t.Errorf("%+v: %s", c, got)
		}
	}
	if a, b := visitor(netip.MustParseAddr("2001:db8:1:2::3")), visitor(netip.MustParseAddr("2001:db8:1:4::5")); a != b {
		t.Errorf("%s and %s are of one site", a, b)
	}
}

// TestIdleStreams: a request counts as use until its answer begins, and then when bytes go either way.
func TestIdleStreams(t *testing.T) {
	t.Parallel()
	d := &desk{}
	r := d.router()
	v := &visit{preview: signed, upstream: previews.Upstream{Sandbox: "sbx_1"}, end: func() { t.Error("it is ended") }}
	leave, _ := r.places.enter(v)
	defer leave()
	check := func(what string, want bool) {
		t.Helper()
		d.used = 0
		if r.check(t.Context(), time.Now().Add(time.Minute)); d.used == 1 != want {
			t.Errorf("%s: it counts %d times as use", what, d.used)
		}
	}
	check("before the answer", true)
	near, far := net.Pipe()
	defer near.Close()
	defer far.Close()
	res := &http.Response{StatusCode: http.StatusSwitchingProtocols, Body: near}
	v.traffic.ofAnswer(res)
	check("without a byte", false)
	go func() { _, _ = far.Write([]byte("x")) }()
	if n, err := res.Body.Read(make([]byte, 1)); n != 1 || err != nil {
		t.Fatal(n, err)
	}
	check("after a byte of the guest", true)
	check("and none since", false)
	go func() { _, _ = far.Read(make([]byte, 1)) }()
	up, ok := res.Body.(interface{ Write(b []byte) (int, error) })
	if !ok {
		t.Fatal("it is no stream both ways")
	}
	if _, err := up.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	check("after a byte of the client", true)
	_ = far.Close()
	if _, err := res.Body.Read(make([]byte, 1)); err == nil || errors.Is(err, context.Canceled) {
		t.Errorf("at the end: %v", err)
	}
}
