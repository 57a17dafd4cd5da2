package registry

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// The bounds of one answer.
const (
	maxHeader    = 64 << 10 // bytes
	maxAnswer    = 4 << 20  // bytes of every body but a layer's
	maxRedirects = 5
)

// guard is the transport of all requests. It decides which hosts are reached, and bounds what they answer.
type guard struct {
	named map[string]bool // host:port by the operator's word
	plain map[string]bool // host:port that are spoken to without TLS
	base  *http.Transport
	stall time.Duration

	cure   string // the flag that allows a host
	public bool   // Options.Public

	proxy    func(*http.Request) (*url.URL, error)
	resolver *net.Resolver
}

func newGuard(named, plain map[string]bool, o Options) *guard {
	stall := o.Stall
	g := &guard{named: named, plain: plain, stall: stall, cure: "--trusted-host", proxy: o.proxy, resolver: o.resolver}
	if o.Public {
		g.cure, g.public = "--image-registry", true
	}
	protocols := new(http.Protocols)
	protocols.SetHTTP1(true) // a layer has a connection of its own; HTTP/2 would gain nothing
	g.base = &http.Transport{
		Proxy: g.proxyOf, DialContext: g.dial, Protocols: protocols,
		TLSHandshakeTimeout: stall, ResponseHeaderTimeout: stall, IdleConnTimeout: time.Minute,
		MaxResponseHeaderBytes: maxHeader, MaxConnsPerHost: 8, DisableCompression: true,
	}
	return g
}

func (g *guard) close() { g.base.CloseIdleConnections() }

// RoundTrip sends a request. The body of its answer ends with an error when it is too long or too slow.
func (g *guard) RoundTrip(req *http.Request) (*http.Response, error) {
	host := hostPort(req.URL)
	switch {
	case req.URL.Scheme == "https":
	case req.URL.Scheme == "http" && g.plain[host]:
	default:
		return nil, refuse("%s would be asked without TLS; if you want that, use --plain-http %s", core.Clip(host), core.Clip(host))
	}
	if g.public && !g.named[host] && g.isProxy(host) {
		return nil, refuse("%s is the operator's proxy", core.Clip(host))
	}
	// Behind a proxy the address is the proxy's, and only what the URL says can be checked here.
	if err := g.check(host, netip.Addr{}); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancelCause(req.Context())
	resp, err := g.base.RoundTrip(req.WithContext(ctx))
	if err != nil {
		cancel(nil)
		return nil, err
	}
	limit, ok := req.Context().Value(bodyLimit{}).(int64)
	if !ok {
		limit = maxAnswer
	}
	resp.Body = newBoundedBody(ctx, resp.Body, limit, g.stall, cancel)
	return resp, nil
}

// bodyLimit is the key of the context's value for the bytes that the body of an answer may have.
type bodyLimit struct{}

func (g *guard) dial(ctx context.Context, network, addr string) (net.Conn, error) {
	d := net.Dialer{Timeout: g.stall, Resolver: g.resolver, ControlContext: func(_ context.Context, _, address string, _ syscall.RawConn) error {
		// The address that is really dialled: a name may have another one at every look-up.
		to, err := netip.ParseAddrPort(address)
		if err != nil {
			return fmt.Errorf("dial %s: %w", core.Clip(address), err)
		}
		if g.isProxy(addr) {
			return nil
		}
		return g.check(strings.ToLower(addr), to.Addr())
	}}
	return d.DialContext(ctx, network, addr)
}

// proxyOf is the operator's proxy for a request. A proxy looks names up itself, so the address of a host could not be checked behind it:
// if a project has chosen the reference, only hosts that the operator has named are asked through it.
func (g *guard) proxyOf(req *http.Request) (*url.URL, error) {
	if g.public && !g.named[hostPort(req.URL)] {
		return nil, nil //nolint:nilnil // no proxy
	}
	return g.proxy(req)
}

// isProxy reports whether the address is that of the operator's proxy.
func (g *guard) isProxy(addr string) bool {
	for _, scheme := range []string{"http", "https"} {
		u, err := g.proxy(&http.Request{URL: &url.URL{Scheme: scheme, Host: "registry.invalid"}})
		if err == nil && u != nil && hostPort(u) == strings.ToLower(addr) {
			return true
		}
	}
	return false
}

// check returns an error unless the host may be reached at the address. Without an address it checks the host alone.
func (g *guard) check(hostport string, addr netip.Addr) error {
	host, _, err := net.SplitHostPort(hostport)
	if err != nil {
		return refuse("%q is not a host with a port", core.Clip(hostport))
	}
	literal, err := netip.ParseAddr(host)
	if isAddress := err == nil; !addr.IsValid() {
		switch {
		case isAddress:
			addr = literal
		case !g.named[hostport] && (host == "localhost" || strings.HasSuffix(host, ".localhost")):
			addr = netip.AddrFrom4([4]byte{127, 0, 0, 1})
		default:
			return nil
		}
	}
	addr = addr.Unmap()
	if g.named[hostport] {
		// The name is the operator's word, but its address is that of whoever answers for the name.
		if literal.Unmap() != addr && (addr.IsLinkLocalUnicast() || addr.IsMulticast() || addr.IsUnspecified()) {
			return refuse("%s has the address %s, which no registry has", core.Clip(hostport), addr)
		}
		return nil
	}
	if why := (policy.Reach{}).Refusal(addr); why != "" {
		return refuse("%s has the address %s (%s); if you want that, use %s %s", core.Clip(hostport), addr, why, g.cure, core.Clip(hostport))
	}
	return nil
}

// hostPort returns the host of a URL with its port.
func hostPort(u *url.URL) string {
	port := u.Port()
	if port == "" {
		port = map[string]string{"http": "80", "https": "443", "socks5": "1080", "socks5h": "1080"}[u.Scheme]
	}
	return net.JoinHostPort(strings.ToLower(u.Hostname()), port)
}

// minRate is how many bytes of a body must come in the time after which a registry counts as stalled. An answer that is
// shorter must be complete by then.
const minRate = 16 << 10

// boundedBody is the body of an answer that ends with an error when it is too long or too slow.
type boundedBody struct {
	body   io.ReadCloser
	left   int64
	since  int64 // bytes since the timer began
	stall  time.Duration
	timer  *time.Timer
	cause  func() error
	cancel context.CancelCauseFunc
}

var errStalled = errors.New("the registry stopped sending")

func newBoundedBody(ctx context.Context, body io.ReadCloser, limit int64, stall time.Duration, cancel context.CancelCauseFunc) *boundedBody {
	return &boundedBody{
		body: body, left: limit, stall: stall, cancel: cancel, cause: func() error { return context.Cause(ctx) },
		timer: time.AfterFunc(stall, func() { cancel(errStalled) }),
	}
}

func (b *boundedBody) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	most := min(int64(len(p)), b.left)
	n, err := b.body.Read(p[:max(most, 1)])
	if int64(n) > most {
		return 0, refuse("the registry's answer is longer than it may be")
	}
	b.left -= int64(n)
	if b.since += int64(n); b.since >= minRate {
		b.since = 0
		b.timer.Reset(b.stall)
	}
	if err != nil && !errors.Is(err, io.EOF) && b.cause() != nil {
		err = b.cause()
	}
	return n, err
}

func (b *boundedBody) Close() error {
	b.timer.Stop()
	err := b.body.Close()
	b.cancel(nil)
	return err
}
