package registry

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/authn"
	"github.com/miekg/dns"

	"github.com/coppice-dev/coppice/core"
)

// resolver is a resolver for which every name has one address.
func resolver(t *testing.T, address string) *net.Resolver {
	t.Helper()
	conn, err := net.ListenPacket("udp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	server := &dns.Server{PacketConn: conn, Handler: dns.HandlerFunc(func(w dns.ResponseWriter, q *dns.Msg) {
		answer := new(dns.Msg).SetReply(q)
		if q.Question[0].Qtype == dns.TypeA {
			answer.Answer = []dns.RR{&dns.A{
				Hdr: dns.RR_Header{Name: q.Question[0].Name, Rrtype: dns.TypeA, Class: dns.ClassINET, Ttl: 1}, A: net.ParseIP(address),
			}}
		}
		_ = w.WriteMsg(answer) // the client asks again
	})}
	started := make(chan struct{})
	server.NotifyStartedFunc = func() { close(started) }
	ended := make(chan error, 1)
	go func() { ended <- server.ActivateAndServe() }()
	<-started
	t.Cleanup(func() {
		if err := server.Shutdown(); err != nil {
			t.Error(err)
		}
		if err := <-ended; err != nil {
			t.Error(err)
		}
	})
	var d net.Dialer
	return &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return d.DialContext(ctx, "udp", conn.LocalAddr().String())
	}}
}

// TestNameOfAnotherAddress: a host is judged by the address that is dialled, not by its name: one that a registry sends the
// client to, and one that the operator has named.
func TestNameOfAnotherAddress(t *testing.T) {
	t.Parallel()
	var inner atomic.Int64
	secret := httptest.NewTLSServer(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { inner.Add(1) }))
	defer secret.Close()
	port := secret.Listener.Addr().(*net.TCPAddr).Port
	s := &shelf{t: t}
	s.honest()
	s.front = func(w http.ResponseWriter, r *http.Request) bool {
		if !strings.Contains(r.URL.Path, "/blobs/") {
			return false
		}
		http.Redirect(w, r, fmt.Sprintf("https://storage.example:%d/", port), http.StatusTemporaryRedirect)
		return true
	}
	o := opts(s.start(t), "app:1")
	o.resolver = resolver(t, "127.0.0.1")
	if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != CodeRefused || !strings.Contains(err.Error(), "has the address 127.0.0.1") {
		t.Errorf("a redirect to a name on this host: %v", err)
	}
	o = opts("registry.example", "app:1")
	o.resolver = resolver(t, "169.254.169.254")
	if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != CodeRefused || !strings.Contains(err.Error(), "169.254.169.254") {
		t.Errorf("a registry at the address of the metadata service: %v", err)
	}
	if n := inner.Load(); n > 0 {
		t.Errorf("a server beside the registry was asked %d times", n)
	}
}

// TestProxy: the operator's proxy may have any address, and its name may be spelled in any case.
func TestProxy(t *testing.T) {
	t.Parallel()
	s := &shelf{t: t}
	s.honest()
	_, port, err := net.SplitHostPort(s.start(t))
	if err != nil {
		t.Fatal(err)
	}
	o := opts("registry.example", "app:1")
	o.resolver = resolver(t, "127.0.0.1")
	o.proxy = func(*http.Request) (*url.URL, error) {
		return &url.URL{Scheme: "http", Host: "Proxy.Example:" + port}, nil
	}
	if _, err := Pull(t.Context(), openLayers(t), o); err != nil {
		t.Errorf("through a proxy: %v", err)
	}
	g := newGuard(nil, nil, o.withDefaults())
	for proxy, dialled := range map[string]string{"http://a.example": "a.example:80", "socks5://A.example": "A.example:1080", "https://a.example:3": "a.example:3"} {
		u, err := url.Parse(proxy)
		if err != nil {
			t.Fatal(err)
		}
		g.proxy = http.ProxyURL(u)
		if !g.isProxy(dialled) || g.isProxy("b.example:80") {
			t.Errorf("the proxy %s at %s is not known", proxy, dialled)
		}
	}
}

// TestOtherHostsAskForNothing: a host that a registry leads to gets no answer when it asks for credentials, not even a request
// for a token.
func TestOtherHostsAskForNothing(t *testing.T) {
	t.Parallel()
	var host string
	var asked atomic.Int64
	elsewhere := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Header.Get("Authorization") != "" {
			t.Error("another host was shown credentials")
		}
		if r.URL.Path == "/token" {
			t.Error("another host was asked for a token")
		}
		w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="test",scope="repository:secret:pull"`, r.Host))
		w.WriteHeader(http.StatusUnauthorized)
	}))
	defer elsewhere.Close()
	s := &shelf{t: t}
	s.honest()
	s.front = func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.URL.Path == "/token":
			asked.Add(1)
			_, _ = fmt.Fprint(w, `{"token":"t"}`)
		case r.Header.Get("Authorization") == "":
			w.Header().Set("WWW-Authenticate", fmt.Sprintf(`Bearer realm="http://%s/token",service="test"`, host))
			w.WriteHeader(http.StatusUnauthorized)
		case strings.Contains(r.URL.Path, "/blobs/"):
			http.Redirect(w, r, elsewhere.URL, http.StatusTemporaryRedirect)
		default:
			return false
		}
		return true
	}
	host = s.start(t)
	o := opts(host, "app:1")
	o.PlainHTTP = append(o.PlainHTTP, strings.TrimPrefix(elsewhere.URL, "http://"))
	o.Keychain = loggedIn{}
	if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != CodeDenied {
		t.Errorf("%v", err)
	}
	if n := asked.Load(); n != 1 {
		t.Errorf("the token server was asked %d times, want 1", n)
	}
}

// loggedIn has the same credentials for every host.
type loggedIn struct{}

func (loggedIn) Resolve(authn.Resource) (authn.Authenticator, error) {
	return authn.FromConfig(authn.AuthConfig{Username: "ann", Password: "secret"}), nil
}

// hangingKeychain is a credential helper that does not answer, or fails.
type hangingKeychain chan struct{}

func (k hangingKeychain) Resolve(authn.Resource) (authn.Authenticator, error) {
	<-k
	return nil, errors.New("exec: docker-credential-none: not found")
}

// TestCredentialHelper: a helper that hangs holds a pull no longer than its caller waits, and one that is missing is no broken configuration.
func TestCredentialHelper(t *testing.T) {
	t.Parallel()
	k := hangingKeychain(make(chan struct{}))
	o := opts("127.0.0.1:1", "app:1")
	o.Keychain = k
	ctx, cancel := context.WithCancelCause(t.Context())
	gone := errors.New("the caller is gone")
	time.AfterFunc(10*time.Millisecond, func() { cancel(gone) })
	if _, err := Pull(ctx, openLayers(t), o); !errors.Is(err, gone) {
		t.Errorf("%v", err)
	}
	close(k)
	if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != core.CodeInvalidField || !strings.Contains(err.Error(), "the credentials for 127.0.0.1:1") {
		t.Errorf("%v", err)
	}
}

// TestProxyForProject: a proxy looks names up itself, so only a host that the operator has named is asked through it when a project has chosen
// the reference.
func TestProxyForProject(t *testing.T) {
	t.Parallel()
	s := &shelf{t: t}
	s.honest()
	var asked atomic.Int64
	s.front = func(http.ResponseWriter, *http.Request) bool { asked.Add(1); return false }
	_, port, err := net.SplitHostPort(s.start(t))
	if err != nil {
		t.Fatal(err)
	}
	o := opts("registry.example", "app:1")
	o.Public = true
	o.resolver = resolver(t, "127.0.0.1")
	o.proxy = func(*http.Request) (*url.URL, error) {
		return &url.URL{Scheme: "http", Host: "proxy.example:" + port}, nil
	}
	if _, err := Pull(t.Context(), openLayers(t), o); err != nil {
		t.Errorf("a host that is named, through the proxy: %v", err)
	}
	asked.Store(0)
	for _, host := range []string{"other.example", "proxy.example:" + port} {
		o.Reference = host + "/app:1"
		if _, err := Pull(t.Context(), openLayers(t), o); core.CodeOf(err) != CodeRefused || asked.Load() != 0 {
			t.Errorf("%s: %v, the proxy was asked %d times", host, err, asked.Load())
		}
	}
}
