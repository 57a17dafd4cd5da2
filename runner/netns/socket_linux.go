package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// Dial connects to addr ("ip:port" or ":port") of the guest through a socket that is created inside the namespace;
// the connection is used outside like any other. network is tcp, tcp4, udp or udp4. It embeds the *net.TCPConn or
// *net.UDPConn, so CloseWrite and the kernel's splicing in io.Copy work. It fails at once unless the namespace is
// open; otherwise ctx bounds it. Shut and Release close it.
func (n *Namespace) Dial(ctx context.Context, network, addr string) (net.Conn, error) {
	p := n.current()
	if p.state != opened {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeStateConflict, "network namespace %s is %s; its guest cannot be dialled", n.space.name, p.state)
	}
	kind, ok := map[string]int{"tcp": unix.SOCK_STREAM, "tcp4": unix.SOCK_STREAM, "udp": unix.SOCK_DGRAM, "udp4": unix.SOCK_DGRAM}[network]
	if !ok {
		return nil, &net.OpError{Op: "dial", Net: network, Err: net.UnknownNetworkError(network)}
	}
	to, err := addrPort(addr, p.ip)
	if err != nil {
		return nil, err
	}
	fd := -1
	err = n.Do(func() (err error) {
		fd, err = unix.Socket(unix.AF_INET, kind|unix.SOCK_CLOEXEC|unix.SOCK_NONBLOCK, 0)
		return os.NewSyscallError("socket", err)
	})
	if err != nil {
		return nil, fmt.Errorf("dial %s in %s: %w", to, n.space.name, err)
	}
	conn, err := connect(ctx, fd, to)
	if err != nil {
		return nil, fmt.Errorf("dial %s in %s: %w", to, n.space.name, err)
	}
	return n.track(conn)
}

// addrPort parses "host:port", where host must be own or empty.
func addrPort(addr string, own netip.Addr) (netip.AddrPort, error) {
	host, port, err := net.SplitHostPort(addr)
	if err == nil && host == "" {
		addr = net.JoinHostPort(own.String(), port)
	}
	ap, err := netip.ParseAddrPort(addr)
	if err != nil || ap.Addr() != own {
		return netip.AddrPort{}, core.Errorf(core.Invalid, core.CodeInvalidField, "address %q is not a port of %s", core.Clip(addr), own)
	}
	return ap, nil
}

// connect connects the non-blocking socket fd, which it owns, and makes it a net.Conn. The socket was made in
// another namespace, which net.Dialer cannot do without holding a thread for as long as the guest takes to answer.
func connect(ctx context.Context, fd int, to netip.AddrPort) (_ net.Conn, err error) {
	f := os.NewFile(uintptr(fd), "socket")
	defer func() { err = errors.Join(err, f.Close()) }() // FileConn duplicates it
	defer context.AfterFunc(ctx, func() { _ = f.SetDeadline(time.Unix(1, 0)) })()
	raw, err := f.SyscallConn()
	if err != nil {
		return nil, err
	}
	begun := false
	var failed error
	err = raw.Write(func(uintptr) bool { // called again whenever the socket becomes writable, until it returns true
		if !begun {
			begun = true
			failed = unix.Connect(fd, &unix.SockaddrInet4{Port: int(to.Port()), Addr: to.Addr().As4()})
			return !errors.Is(failed, unix.EINPROGRESS)
		}
		code, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_ERROR)
		if failed = err; err == nil && code != 0 {
			failed = unix.Errno(code)
		}
		if failed != nil {
			return true
		}
		_, err = unix.Getpeername(fd)
		return err == nil // else a spurious wake-up: not connected yet
	})
	if cause := context.Cause(ctx); cause != nil && err != nil {
		return nil, cause
	}
	if err := errors.Join(err, os.NewSyscallError("connect", failed)); err != nil {
		return nil, err
	}
	return net.FileConn(f)
}

// Listen listens on addr (":port" or "gateway:port"; port 0 picks one) inside the namespace and lets the guest
// connect to it: the passage for the egress proxy. network is tcp or tcp4. Closing the listener closes the passage;
// so do Shut and Release, which also close the connections it accepted.
func (n *Namespace) Listen(ctx context.Context, network, addr string) (net.Listener, error) {
	if network != "tcp" && network != "tcp4" {
		return nil, &net.OpError{Op: "listen", Net: network, Err: net.UnknownNetworkError(network)}
	}
	at, err := addrPort(addr, n.pool.cfg.Gateway)
	if err != nil {
		return nil, err
	}
	var l *listener
	err = n.change(ctx, "listen", func(was plan) error {
		if len(was.services) == maxServices {
			return core.Errorf(core.Exhausted, core.CodeCapacity, "network namespace %s already has %d listeners", n.space.name, maxServices)
		}
		var inner net.Listener
		if err := n.space.inside(func() (err error) {
			inner, err = (&net.ListenConfig{}).Listen(ctx, "tcp4", at.String())
			return err
		}); err != nil {
			return err
		}
		tcp, ok := inner.(*net.TCPListener)
		if !ok {
			return errors.Join(fmt.Errorf("listener is a %T", inner), inner.Close())
		}
		l = &listener{TCPListener: tcp, ns: n, port: tcp.Addr().(*net.TCPAddr).AddrPort().Port()}
		if err := n.setService(was.withService(l.port, true)); err != nil {
			return errors.Join(err, tcp.Close())
		}
		return n.remember(tcp)
	})
	if err != nil {
		return nil, err
	}
	return l, nil
}

// setService makes the next plan, which differs in services only, the one in force. Closed namespaces have no rules
// about services, but the plan, and so its comment, changes.
func (n *Namespace) setService(next plan) error {
	if next.state == quarantined {
		n.mu.Lock()
		defer n.mu.Unlock()
		n.plan = next // a quarantined plan's rules do not depend on it
		return nil
	}
	return n.apply(next)
}

type listener struct {
	*net.TCPListener
	ns   *Namespace
	port uint16
}

// Accept returns connections that Shut and Release close.
func (l *listener) Accept() (net.Conn, error) {
	c, err := l.TCPListener.Accept()
	if err != nil {
		return nil, err
	}
	return l.ns.track(c)
}

// Close ends the listener and takes its port out of the rules.
func (l *listener) Close() error {
	err := l.TCPListener.Close()
	if !l.ns.forget(l.TCPListener) {
		return err
	}
	closed := l.ns.change(context.Background(), "stop listening", func(was plan) error {
		return l.ns.setService(was.withService(l.port, false))
	})
	if l.ns.isReleased() {
		return err
	}
	return errors.Join(err, closed)
}

type tcpConn struct {
	*net.TCPConn
	ns *Namespace
}

func (c *tcpConn) Close() error {
	c.ns.forget(c.TCPConn)
	return c.TCPConn.Close()
}

type udpConn struct {
	*net.UDPConn
	ns *Namespace
}

func (c *udpConn) Close() error {
	c.ns.forget(c.UDPConn)
	return c.UDPConn.Close()
}

// track hands out a connection that Shut and Release will close.
func (n *Namespace) track(c net.Conn) (net.Conn, error) {
	var out net.Conn
	var inner io.Closer
	switch c := c.(type) {
	case *net.TCPConn:
		out, inner = &tcpConn{c, n}, c
	case *net.UDPConn:
		out, inner = &udpConn{c, n}, c
	default:
		return nil, errors.Join(fmt.Errorf("connection is a %T", c), c.Close())
	}
	if err := n.remember(inner); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return out, nil
}

func (n *Namespace) remember(c io.Closer) error {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.released {
		return n.errReleased()
	}
	n.sockets[c] = struct{}{}
	return nil
}

// forget reports whether c was remembered.
func (n *Namespace) forget(c io.Closer) bool {
	n.mu.Lock()
	defer n.mu.Unlock()
	_, had := n.sockets[c]
	delete(n.sockets, c)
	return had
}

// closeSockets closes what was handed out, without a farewell that would leave the kernel waiting for the guest.
func (n *Namespace) closeSockets() {
	n.mu.Lock()
	sockets := n.sockets
	n.sockets = map[io.Closer]struct{}{}
	n.mu.Unlock()
	for c := range sockets {
		if tcp, ok := c.(*net.TCPConn); ok {
			_ = tcp.SetLinger(0) // fails only on a socket that is already closed
		}
		_ = c.Close() // its user gets net.ErrClosed; there is nothing else to fail
	}
}

// flushConnections ends what the kernel still keeps of connections of the calling thread's namespace, which is s,
// after their sockets were closed, and forgets what it tracked. What counts is that none is left: a socket may also
// end by itself while it is being destroyed. A kernel without CONFIG_INET_DIAG_DESTROY cannot destroy any.
func (s *space) flushConnections() error {
	var errs []error
	for range 3 {
		sockets, err := netlink.SocketDiagTCP(unix.AF_INET)
		if err != nil {
			return fmt.Errorf("list TCP sockets: %w", err)
		}
		sockets = slices.DeleteFunc(sockets, func(k *netlink.Socket) bool { return k.State == netlink.TCP_LISTEN }) // no connection
		if errs = nil; len(sockets) == 0 {
			break
		}
		for _, k := range sockets {
			err := netlink.SocketDestroy(
				&net.TCPAddr{IP: k.ID.Source, Port: int(k.ID.SourcePort)},
				&net.TCPAddr{IP: k.ID.Destination, Port: int(k.ID.DestinationPort)})
			errs = append(errs, wrapIf(err, "destroy socket"))
		}
	}
	return errors.Join(append(errs, s.forgetConnections())...)
}
