package proxy

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/elazarl/goproxy"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// serveExplicit serves a connection of a program that uses the explicit proxy.
func (b *sandbox) serveExplicit(c *conn) {
	h, err := readHead(&c.peeked, b.s.cfg.FirstTime)
	if err != nil && h.method == "" && len(c.ahead) == 0 {
		_ = c.Close() // it ended before it sent anything
		return
	}
	if err == nil && h.hasHost {
		err = sameTarget(h)
	}
	if err != nil {
		b.refuse(c, core.Flow{Spoken: core.SpokenHTTP, Method: h.method}, err)
		return
	}
	if h.method == http.MethodConnect {
		b.serveConnect(c, h)
		return
	}
	to := b.s.proxied
	if strings.HasPrefix(h.target, grant.BasePath) {
		to = b.s.based
	}
	if !to.queue.put(c) {
		_ = c.Close()
	}
}

// sameTarget checks that the target of a request to a proxy equals its Host header.
func sameTarget(h head) error {
	port, text := uint16(80), h.target
	if h.method == http.MethodConnect {
		port = 443 // the target of CONNECT has a port; its Host header need not have one
	} else {
		const scheme = "http://"
		if len(text) < len(scheme) || !strings.EqualFold(text[:len(scheme)], scheme) {
			return nil // the handler refuses it
		}
		text, _, _ = strings.Cut(text[len(scheme):], "/")
		text, _, _ = strings.Cut(text, "?")
	}
	want, err := hostPort(text, port)
	if err != nil {
		return err
	}
	got, err := hostPort(h.host, port)
	if err == nil && h.method == http.MethodConnect {
		got.port = want.port
	}
	if err != nil || got != want {
		return deny("the request's target and its Host header are not the same")
	}
	return nil
}

// refuse answers a request that was not parsed.
func (b *sandbox) refuse(c *conn, f core.Flow, why error) {
	host, _ := policy.ParseHost(f.Host)
	if _, err := b.decide(b.ctx, b.rules.Load(), f, host, nil, deny(why.Error())); errors.Is(err, errJournal) {
		why = err
	}
	status := http.StatusBadRequest
	if d, ok := isDenial(why); ok {
		status = d.status
	}
	resp := problem(nil, status, why.Error())
	defer resp.Body.Close()
	resp.Close = true
	_ = c.SetWriteDeadline(time.Now().Add(time.Second))
	_ = resp.Write(c.Conn)
	drain(c)
}

// serveRequests serves a connection of a program that believes that it is connected to the origin. All its requests go
// to one host and port.
func (b *sandbox) serveRequests(c *conn, asked *target, port uint16) {
	h, err := readHead(&c.peeked, b.s.cfg.FirstTime)
	if err != nil {
		b.refuse(c, core.Flow{Spoken: core.SpokenHTTP, Port: port, Method: h.method}, err)
		return
	}
	c.target = asked
	if asked == nil {
		c.target = &target{port: port}
	}
	if !b.s.origin.queue.put(c) {
		_ = c.Close()
	}
}

// serveOrigin gives a request the absolute target that a request to a proxy has.
func (s *Server) serveOrigin(scheme string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.URL.IsAbs() || r.Method == http.MethodConnect {
			refuseRequest(w, r, http.StatusBadRequest, "this connection is not a connection to a proxy")
			return
		}
		r.URL.Scheme, r.URL.Host = scheme, r.Host
		s.serveProxied(w, r)
	}
}

// serveBased serves the requests of a connection that began with a request to a base URL. The path alone names the
// destination and cannot be read in two ways, so the connection can be kept alive.
func (s *Server) serveBased(w http.ResponseWriter, r *http.Request) {
	if r.Method == http.MethodConnect || !s.serveBase(w, r) {
		refuseRequest(w, r, http.StatusBadRequest, "this connection began with a request to a base URL and serves only base URLs")
	}
}

func (s *Server) serveProxied(w http.ResponseWriter, r *http.Request) {
	var broken atomic.Bool
	ctx := context.WithValue(r.Context(), brokenKey{}, &broken)
	out := prompt{w, http.NewResponseController(w), new(net.Conn)}
	defer out.leave()
	s.handler.ServeHTTP(out, r.WithContext(ctx))
	if broken.Load() {
		panic(http.ErrAbortHandler) // the guest must not mistake a part for the whole answer
	}
}

// brokenKey is the context key of a request's flag that its answer broke off.
type brokenKey struct{}

// prompt flushes after each write: a guest may wait for each part of an answer.
type prompt struct {
	http.ResponseWriter
	ctl   *http.ResponseController
	taken *net.Conn // the connection that an upgrade took over; nil: the server still owns it
}

func (p prompt) WriteHeader(status int) {
	p.ResponseWriter.WriteHeader(status)
	_ = p.ctl.Flush() // a failure shows again at the next write
}

func (p prompt) Write(b []byte) (int, error) {
	n, err := p.ResponseWriter.Write(b)
	return n, errors.Join(err, p.ctl.Flush())
}

// ReadFrom writes everything that a reader gives, with a pooled buffer. io.Copy would allocate a buffer for each
// answer.
func (p prompt) ReadFrom(r io.Reader) (int64, error) {
	b, _ := copyBuffers.Get().(*[copySize]byte)
	defer copyBuffers.Put(b)
	return io.CopyBuffer(writerOnly{p}, r, b[:])
}

// writerOnly hides the other methods of a writer.
type writerOnly struct{ io.Writer }

const copySize = 32 << 10

var copyBuffers = sync.Pool{New: func() any { return new([copySize]byte) }}

func (p prompt) Flush() { _ = p.ctl.Flush() }

func (p prompt) Hijack() (net.Conn, *bufio.ReadWriter, error) {
	c, rw, err := p.ctl.Hijack()
	if err == nil {
		*p.taken = c
	}
	return c, rw, err
}

// leave ends a connection that was taken over: goproxy returns when either side has ended, and closes only the other
// side.
func (p prompt) leave() {
	if *p.taken != nil {
		drain(*p.taken)
	}
}

func (s *Server) newHandler() *goproxy.ProxyHttpServer {
	p := goproxy.NewProxyHttpServer()
	p.Logger = debugLog{s.cfg.Log}
	p.KeepAcceptEncoding = true
	p.ConnectDial = nil
	p.Tr = &http.Transport{DialContext: func(context.Context, string, string) (net.Conn, error) {
		return nil, errors.New("a request has no sandbox") // each request uses the transport of its sandbox
	}}
	p.NonproxyHandler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		refuseRequest(w, r, http.StatusBadRequest, "this is a proxy: a request must have an absolute target")
	})
	p.OnRequest().HandleConnect(goproxy.AlwaysReject) // see serveConnect
	p.OnRequest().DoFunc(s.onRequest)
	p.OnResponse().DoFunc(s.onResponse)
	return p
}

// debugLog receives the log lines of goproxy.
type debugLog struct{ log *slog.Logger }

func (d debugLog) Printf(format string, v ...any) {
	d.log.Debug("goproxy", "format", format, "args", len(v)) // without the arguments: guests may have sent them
}

// serveConnect turns a connection into a tunnel. goproxy would lose data that a client sends before it has the answer.
func (b *sandbox) serveConnect(c *conn, h head) {
	host, port, err := policy.ParseHostPort(h.target)
	if err != nil {
		b.refuse(c, core.Flow{Spoken: core.SpokenTLS}, err)
		return
	}
	if _, ok := b.rules.Load().policy.Allows(host, port, core.SpokenTLS); !ok {
		b.refuse(c, core.Flow{Spoken: core.SpokenTLS, Port: port, Host: host.String()}, deny("the workspace's policy does not allow "+describe(host, port, core.SpokenTLS)))
		return
	}
	c.ahead = c.ahead[h.size:]
	if _, err := io.WriteString(c.Conn, "HTTP/1.1 200 Connection established\r\n\r\n"); err != nil {
		_ = c.Close()
		return
	}
	b.serveUnknown(c, &target{host, port}, netip.AddrPort{})
}

// onRequest decides on a request and gives it the transport of its sandbox.
func (s *Server) onRequest(r *http.Request, ctx *goproxy.ProxyCtx) (*http.Request, *http.Response) {
	c, _ := r.Context().Value(connKey{}).(*conn)
	if c == nil {
		return r, problem(r, http.StatusForbidden, "the request does not come from a sandbox")
	}
	f := core.Flow{Spoken: core.SpokenHTTP, Method: r.Method, Path: r.URL.EscapedPath()}
	to, why := c.destination(r)
	under := c.sandbox.rules.Load()
	if base, named := brokeredOf(r); named {
		under = base.rules
	}
	var u *use
	if why == nil {
		u, why = c.sandbox.broker(under, c, r, to)
	}
	f.Port = to.port
	o, err := c.sandbox.decide(r.Context(), under, f, to.host, u, why)
	if err != nil {
		status := http.StatusForbidden
		if d, ok := isDenial(err); ok {
			status = d.status
		} else if errors.Is(err, errJournal) {
			status = http.StatusServiceUnavailable
		}
		return r, problem(r, status, err.Error())
	}
	ctx.UserData = o
	body := &counted{ReadCloser: r.Body}
	out := r.WithContext(o.traced())
	if r.Body != nil && r.Body != http.NoBody {
		out.Body = inspected(body, &inspection{
			scan: grant.NewPlaceholderScanner(), take: u.take, trailer: func() http.Header { return r.Trailer }, found: errPlaceholder,
			refuse: func(why error) { o.cancel(why) },
		})
	}
	out.URL.Host, out.Host = policy.JoinHostPort(to.host, to.port), r.Host
	ctx.RoundTripper = goproxy.RoundTripperFunc(func(r *http.Request, _ *goproxy.ProxyCtx) (*http.Response, error) {
		way := c.sandbox.transport
		if r.URL.Scheme == "https" {
			way = c.sandbox.secure
		}
		resp, err := way.RoundTrip(r)
		o.Sent = body.n.Load()
		if err == nil && way == c.sandbox.secure {
			o.Status = resp.StatusCode
			if err = c.sandbox.inspect(o, resp); err != nil {
				o.cancel(err)
				_ = resp.Body.Close()
			}
		}
		if err != nil {
			if cause := context.Cause(o.ctx); cause != nil {
				err = cause
			}
			c.sandbox.end(o, err)
			return nil, err
		}
		o.Status = resp.StatusCode
		if resp.StatusCode == http.StatusSwitchingProtocols {
			if err := c.sandbox.upgrade(o, c, resp); err != nil {
				return nil, err
			}
			return resp, nil
		}
		broken, _ := r.Context().Value(brokenKey{}).(*atomic.Bool)
		resp.Body = &endOfBody{ReadCloser: resp.Body, end: func(n int64, err error) {
			broken.Store(err != nil)
			o.Sent, o.Received = body.n.Load(), n
			c.sandbox.end(o, err)
		}}
		return resp, nil
	})
	return out, nil
}

// destination returns the host of a request.
func (c *conn) destination(r *http.Request) (target, error) {
	scheme, port := "http", uint16(80)
	if _, named := brokeredOf(r); named || c.read {
		scheme, port = "https", 443
	}
	if r.URL.Scheme != scheme {
		return target{port: 443}, deny("use CONNECT to reach an https target through a proxy")
	}
	if r.URL.User != nil {
		return target{port: port}, deny("the target contains a user name")
	}
	to, err := hostPort(r.Host, port)
	if err != nil {
		return target{port: port}, err
	}
	switch t := c.target; {
	case t == nil: // serveExplicit has checked the request's own head
	case t.port != to.port, !t.host.IsZero() && t.host != to.host:
		return to, deny("the request's Host header and the connection's target are not the same")
	}
	return to, nil
}

// onResponse answers a request that got no response from its host.
func (s *Server) onResponse(resp *http.Response, ctx *goproxy.ProxyCtx) *http.Response {
	if resp != nil {
		return resp
	}
	status, why := http.StatusBadGateway, error(errSilent)
	if ctx.Error != nil {
		why = ctx.Error
	}
	outcome, reason := outcomeOf(why)
	if outcome == core.FlowDenied {
		status = http.StatusForbidden
	}
	return problem(ctx.Req, status, reason)
}

// problemBody is the error body for the guest. Detail is bounded as in the journal.
type problemBody struct {
	Title  string `json:"title"`
	Status int    `json:"status"`
	Detail string `json:"detail"`
}

func problem(r *http.Request, status int, detail string) *http.Response {
	b, err := json.Marshal(problemBody{"coppice egress: " + http.StatusText(status), status, core.ClipText(detail, core.MaxFlowReason)})
	if err != nil {
		b = []byte("{}")
	}
	return &http.Response{
		Status: http.StatusText(status), StatusCode: status, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1, Request: r,
		Header:        http.Header{"Content-Type": {"application/problem+json"}, "Coppice-Egress": {"refused"}},
		ContentLength: int64(len(b)), Body: io.NopCloser(bytes.NewReader(append(b, '\n')[:len(b)])),
	}
}

// refuseRequest refuses a request without a valid host, and reports it to the journal.
func refuseRequest(w http.ResponseWriter, r *http.Request, status int, reason string) {
	if c, _ := r.Context().Value(connKey{}).(*conn); c != nil {
		f := core.Flow{Spoken: core.SpokenHTTP, Method: r.Method, Path: r.URL.EscapedPath()}
		if _, err := c.sandbox.decide(r.Context(), c.sandbox.rules.Load(), f, policy.Host{}, nil, &denial{reason, status}); errors.Is(err, errJournal) {
			status, reason = http.StatusServiceUnavailable, err.Error()
		}
	}
	writeProblem(w, status, reason)
}

func writeProblem(w http.ResponseWriter, status int, detail string) {
	resp := problem(nil, status, detail)
	defer resp.Body.Close()
	maps.Copy(w.Header(), resp.Header)
	w.WriteHeader(status)
	_, _ = io.Copy(w, resp.Body)
}
