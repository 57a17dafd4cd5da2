package proxy

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/policy"
)

// serveTransparent serves a connection that the kernel has redirected.
func (b *sandbox) serveTransparent(c *conn) {
	to, err := b.s.cfg.Original(c.Conn)
	if err != nil {
		if b.s.maySay() {
			b.s.cfg.Log.Warn("a connection was refused: the kernel does not report its original destination", "sandbox_id", b.sb.ID, "err", err)
		}
		reset(c)
		return
	}
	b.serveUnknown(c, nil, to)
}

// serveUnknown detects the protocol of a connection and carries it. asked is the target of CONNECT, if there was one;
// otherwise to is the original destination of the guest's connection.
func (b *sandbox) serveUnknown(c *conn, asked *target, to netip.AddrPort) {
	_ = c.SetReadDeadline(time.Now().Add(b.s.cfg.FirstTime))
	first, err := c.first(maxHello)
	spoken := sniff(first)
	if timeout, ok := errors.AsType[net.Error](err); ok && timeout.Timeout() {
		spoken, err = core.SpokenTCP, nil // in some protocols the server speaks first
	}
	if err != nil { // it ended before it sent anything
		_ = c.Close()
		return
	}
	port := to.Port()
	if asked != nil {
		port = asked.port
	}
	switch spoken {
	case core.SpokenHTTP:
		b.serveRequests(c, asked, port)
	case core.SpokenTLS:
		b.serveTLS(c, asked, to, port)
	default:
		b.serveRaw(c, asked, to, port)
	}
}

// serveTLS carries a TLS connection whose ClientHello names the destination.
func (b *sandbox) serveTLS(c *conn, asked *target, to netip.AddrPort, port uint16) {
	name, why := readHello(b.ctx, &c.peeked)
	under := b.rules.Load()
	host := name
	switch {
	case why != nil:
	case asked != nil:
		host = asked.host
		if _, isAddr := host.Addr(); name != host && (!isAddr || !name.IsZero()) {
			why = deny("CONNECT asked for " + asked.host.String() + " and the ClientHello for " + orNone(name))
		}
	case name.IsZero():
		host, why = under.unnamed(to)
	}
	if host.IsZero() {
		host = hostOf(asked, to)
	}
	if t := (target{host, port}); why == nil && under.reads(t) {
		b.intercept(c, t)
		return
	}
	b.tunnel(c, under, core.Flow{Spoken: core.SpokenTLS, Port: port}, host, why)
}

func orNone(h policy.Host) string {
	if h.IsZero() {
		return "no name"
	}
	return h.String()
}

// unnamed returns the host of a connection that gives no name: its address, which must be allowed by a rule.
func (r *rules) unnamed(to netip.AddrPort) (policy.Host, error) {
	h, err := policy.ParseHost(to.Addr().String())
	if err != nil {
		return policy.Host{}, err
	}
	if _, ok := r.policy.Allows(h, to.Port(), core.SpokenTLS); !ok {
		return h, errNoSNI
	}
	return h, nil
}

func hostOf(asked *target, to netip.AddrPort) policy.Host {
	if asked != nil {
		return asked.host
	}
	h, err := policy.ParseHost(to.Addr().String())
	if err != nil {
		return policy.Host{}
	}
	return h
}

// serveRaw carries a connection that is neither TLS nor HTTP.
func (b *sandbox) serveRaw(c *conn, asked *target, to netip.AddrPort, port uint16) {
	host, under := hostOf(asked, to), b.rules.Load()
	if asked == nil {
		if named, ok := b.aliased(under, to); ok {
			host = named
		}
	}
	b.tunnel(c, under, core.Flow{Spoken: core.SpokenTCP, Port: port}, host, nil)
}

// tunnel carries a connection to a host in both directions, until both have ended.
func (b *sandbox) tunnel(c *conn, under *rules, f core.Flow, h policy.Host, why error) {
	defer c.Close()
	if why == nil && under.holds(target{h, f.Port}) {
		why = errHeld
	}
	o, err := b.decide(b.ctx, under, f, h, nil, why)
	if err != nil {
		refuseTLS(c, f.Spoken)
		return
	}
	up, err := b.s.dial(o.ctx, h, o.Port)
	if err != nil {
		b.end(o, err)
		refuseTLS(c, f.Spoken)
		return
	}
	o.gone.Store(true)
	b.pipe(o, c, up)
	b.end(o, nil)
}

// refuseTLS answers a TLS client with an alert and closes the connection; it resets any other connection.
func refuseTLS(c *conn, spoken core.Spoken) {
	if spoken == core.SpokenTLS {
		const alert, fatal, accessDenied = 21, 2, 49
		_ = c.SetWriteDeadline(time.Now().Add(time.Second))
		if _, err := c.Write([]byte{alert, 3, 3, 0, 2, fatal, accessDenied}); err == nil {
			return // closed in order, so that the client reads the alert
		}
	}
	reset(c.Conn)
}

// pipe copies in both directions until both have ended, one has failed, or the flow has ended.
func (b *sandbox) pipe(o *openFlow, c *conn, up net.Conn) {
	_ = c.SetDeadline(time.Time{})
	defer context.AfterFunc(o.ctx, func() {
		reset(c.Conn)
		reset(up)
	})()
	half := func(to, from net.Conn, n *int64, first []byte) {
		wrote, err := to.Write(first)
		*n = int64(wrote)
		if err == nil {
			var copied int64
			copied, err = io.Copy(to, from) // the kernel copies when both are TCP
			*n += copied
		}
		if err = errors.Join(err, closeWrite(to)); err != nil {
			o.cancel(errTunnel)
		}
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		first := c.ahead
		c.ahead = nil // frees the bytes: a tunnel may be open for long
		half(up, c.Conn, &o.Sent, first)
	})
	half(c.Conn, up, &o.Received, nil)
	wg.Wait()
	_ = up.Close()
}

var errTunnel = newFault("closed", "one side of the tunnel failed")
