package proxy

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"net/netip"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// sandbox is the proxy's state of one sandbox.
type sandbox struct {
	s  *Server
	sb Sandbox

	rules     atomic.Pointer[rules]
	transport *http.Transport // no other sandbox uses its connections
	secure    *http.Transport // the same over TLS, for requests that the proxy reads
	listeners []net.Listener
	ctx       context.Context //nolint:containedctx // ends with the sandbox
	cancel    context.CancelCauseFunc

	mu      sync.Mutex // guards the fields below
	conns   map[*conn]struct{}
	open    map[*openFlow]struct{}
	budgets map[string]*budget // by grant id
}

var errRemoved = newFault("sandbox_ended", "the sandbox has ended")

func newSandbox(s *Server, sb Sandbox, r *rules, listeners ...net.Listener) *sandbox {
	b := &sandbox{s: s, sb: sb, listeners: listeners, conns: map[*conn]struct{}{}, open: map[*openFlow]struct{}{}, budgets: map[string]*budget{}}
	b.rules.Store(r)
	b.ctx, b.cancel = context.WithCancelCause(context.Background())
	b.transport = &http.Transport{
		DialContext: b.dialText, DisableCompression: true, MaxIdleConnsPerHost: 8, MaxIdleConns: 64, IdleConnTimeout: idleTime,
		TLSHandshakeTimeout: dialTime, MaxResponseHeaderBytes: 1 << 20, ExpectContinueTimeout: time.Second,
	}
	b.secure = b.transport.Clone()
	b.secure.DisableCompression, b.secure.ForceAttemptHTTP2 = false, true // decompressed here, so that it can be inspected
	b.secure.HTTP2 = &http.HTTP2Config{MaxReceiveBufferPerStream: hostWindow, MaxReceiveBufferPerConnection: hostWindows}
	b.secure.TLSClientConfig = &tls.Config{RootCAs: s.cfg.Roots, MinVersion: tls.VersionTLS12}
	return b
}

// Bounds of what is buffered over HTTP/2 for receivers that do not read yet, in bytes. net/http would buffer 4 MiB of
// each stream from a host.
const (
	hostWindow   = 512 << 10 // from a host, for each stream
	hostWindows  = 16 << 20  // from a host, for each connection
	guestWindow  = 128 << 10 // from a guest
	guestWindows = 256 << 10
	guestStreams = 128 // streams at once in a connection
)

// dialText dials for a transport. The address is one that a flow has decided on before.
func (b *sandbox) dialText(ctx context.Context, _, address string) (net.Conn, error) {
	h, port, err := policy.ParseHostPort(address)
	if err != nil {
		return nil, err
	}
	return b.s.dial(ctx, h, port)
}

// conn is a connection of a guest.
type conn struct {
	peeked
	sandbox *sandbox
	target  *target // known before the first request; nil: the request names it
	read    bool    // the proxy terminates its TLS
	closed  sync.Once
}

// target is the destination of a connection.
type target struct {
	host policy.Host
	port uint16
}

// Close closes the connection and removes it from the sandbox.
func (c *conn) Close() error {
	c.closed.Do(func() {
		c.sandbox.mu.Lock()
		delete(c.sandbox.conns, c)
		c.sandbox.mu.Unlock()
	})
	return c.Conn.Close()
}

// accept takes connections until the listener is closed.
func (b *sandbox) accept(l net.Listener, serve func(*conn)) {
	for {
		raw, err := l.Accept()
		if err != nil {
			if b.ctx.Err() == nil && !errors.Is(err, net.ErrClosed) {
				b.s.cfg.Log.Warn("no connection was taken from a sandbox", "sandbox_id", b.sb.ID, "err", err)
				pause := time.NewTimer(100 * time.Millisecond) // probably no descriptors are left
				select {
				case <-pause.C:
					continue
				case <-b.ctx.Done():
				}
			}
			return
		}
		c := &conn{peeked: peeked{Conn: raw}, sandbox: b}
		b.mu.Lock()
		full := len(b.conns) >= b.s.cfg.MaxFlows
		if !full {
			b.conns[c] = struct{}{}
		}
		b.mu.Unlock()
		if full || b.ctx.Err() != nil {
			reset(raw)
			continue
		}
		go serve(c)
	}
}

// reset ends a connection at once; data that was not sent yet is lost.
func reset(c net.Conn) {
	if tcp, ok := c.(*net.TCPConn); ok {
		_ = tcp.SetLinger(0) // fails only on a closed socket
	}
	_ = c.Close()
}

func (b *sandbox) close() {
	b.cancel(errRemoved)
	for _, l := range b.listeners {
		_ = l.Close()
	}
	b.mu.Lock()
	conns := make([]*conn, 0, len(b.conns))
	for c := range b.conns {
		conns = append(conns, c)
	}
	b.mu.Unlock()
	for _, c := range conns {
		reset(c.Conn)
	}
	b.closeIdle()
}

func (b *sandbox) closeIdle() {
	b.transport.CloseIdleConnections()
	b.secure.CloseIdleConnections()
}

var errRevoked = deny("the workspace's policy does not allow it any more")

// openFlow is a flow that has not ended.
type openFlow struct {
	core.Flow
	host   policy.Host
	use    *use            // use of a grant; nil: none
	expiry *time.Timer     // expiry of that grant
	gone   atomic.Bool     // some of its data may have left the host
	ctx    context.Context //nolint:containedctx // ends with the flow
	cancel context.CancelCauseFunc
}

// denial is the reason why a flow is refused. The answer to the guest has the reason, because the guest knows all of it already.
type denial struct {
	reason string
	status int // HTTP status of the answer
}

func (d *denial) Error() string { return d.reason }

func deny(reason string) error { return &denial{reason, http.StatusForbidden} }

// record returns the flow for the journal. This is the only place that bounds texts from outside.
func record(f core.Flow) core.Flow { return f.Clipped() }

// decide asks the policy about a flow and reports the flow to the journal. under are the rules that the caller has used
// for the flow so far. The error is a *denial or errJournal. The caller must end a flow that was returned.
func (b *sandbox) decide(ctx context.Context, under *rules, f core.Flow, h policy.Host, u *use, why error) (*openFlow, error) {
	f.ID, f.SandboxID, f.Epoch, f.At, f.Host = b.s.nextID(), b.sb.ID, b.sb.Epoch, time.Now(), h.String()
	f.Outcome = core.FlowAllowed
	if why == nil {
		var ok bool
		if f.Rule, ok = under.policy.Allows(h, f.Port, f.Spoken); !ok {
			why = deny("the workspace's policy does not allow " + describe(h, f.Port, f.Spoken))
		}
	}
	if u != nil {
		f.Grant = u.grant.ID
	}
	f = record(f)
	o := &openFlow{Flow: f, host: h, use: u}
	o.ctx, o.cancel = context.WithCancelCause(ctx)
	if why == nil { // before the journal, so that rules that change meanwhile end this flow too
		why = b.admit(o)
	}
	if why != nil {
		f.Outcome, f.Reason = core.FlowDenied, why.Error()
		f = record(f)
		o.Flow = f
	} else {
		if now := b.rules.Load(); now != under { // they changed before it was admitted
			if ended := now.ends(o); ended != nil {
				o.cancel(ended)
			}
		}
		o.expire()
	}
	if err := b.s.cfg.Journal.Begin(f); err != nil {
		b.forget(o)
		if b.s.maySay() {
			b.s.cfg.Log.ErrorContext(ctx, "a flow was refused because it could not be recorded", "sandbox_id", b.sb.ID, "err", err)
		}
		return nil, errJournal
	}
	if why != nil {
		o.cancel(why)
		return nil, why
	}
	return o, nil
}

// admit adds a flow to those under way, unless there are too many. With HTTP/2, one connection carries many flows.
func (b *sandbox) admit(o *openFlow) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	if most := b.s.cfg.MaxFlows; len(b.open) >= most {
		return &denial{"the sandbox has " + strconv.Itoa(most) + " flows under way, which is the maximum", http.StatusTooManyRequests}
	}
	b.open[o] = struct{}{}
	return nil
}

var errJournal = errors.New("the host cannot record what leaves the sandbox, so nothing leaves it")

// expire ends a flow when its grant expires.
func (o *openFlow) expire() {
	if o.use == nil {
		return
	}
	if at := o.use.grant.Expires; !at.IsZero() {
		o.expiry = time.AfterFunc(time.Until(at), func() { o.cancel(errExpired) })
	}
}

func (b *sandbox) forget(o *openFlow) {
	o.cancel(nil)
	if o.expiry != nil {
		o.expiry.Stop()
	}
	b.mu.Lock()
	delete(b.open, o)
	b.mu.Unlock()
}

// end reports a flow's end and outcome to the journal.
func (b *sandbox) end(o *openFlow, err error) {
	if d, ok := isDenial(context.Cause(o.ctx)); ok {
		o.Outcome, o.Reason = core.FlowDenied, d.Error()
	} else if err != nil {
		o.Outcome, o.Reason = outcomeOf(err)
	}
	if o.Outcome == core.FlowDenied && o.gone.Load() {
		o.Outcome = core.FlowCut
	}
	b.forget(o)
	o.Ended = time.Now()
	b.s.cfg.Journal.End(record(o.Flow))
}

func describe(h policy.Host, port uint16, spoken core.Spoken) string {
	return string(spoken) + " to " + policy.JoinHostPort(h, port)
}

// aliased returns the host that an address stands for.
func (b *sandbox) aliased(under *rules, a netip.AddrPort) (policy.Host, bool) {
	if b.sb.Alias == nil {
		return policy.Host{}, false
	}
	return b.sb.Alias(under.policy, a)
}
