package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
)

// EgressSockets are sockets at the gateway of a namespace, made for a process that serves its guest through them. They are not
// the namespace's: one that is still open when it is released makes its reset fail, so that nobody serves the next guest in the name of this one.
type EgressSockets struct {
	Proxy       *os.File // listens at [PortProxy]
	Intercepted *os.File // listens at [PortIntercepted]; SO_ORIGINAL_DST says where a connection was going
	ResolverTCP *os.File // listens at [PortResolver]
	ResolverUDP *os.File // at [PortResolver]
}

// Files are the sockets in a fixed order.
func (e EgressSockets) Files() []*os.File {
	return []*os.File{e.Proxy, e.Intercepted, e.ResolverTCP, e.ResolverUDP}
}

// Close closes them here; a process that has got them keeps them.
func (e EgressSockets) Close() error {
	var errs []error
	for _, f := range e.Files() {
		if f != nil {
			errs = append(errs, f.Close())
		}
	}
	return errors.Join(errs...)
}

// EgressSockets opens the sockets of a namespace that is or will be opened with core.EgressProxied or core.EgressAllowAll. There is one set at a time.
func (n *Namespace) EgressSockets(ctx context.Context) (_ EgressSockets, err error) {
	var out EgressSockets
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("egress sockets of %s: %w", n.space.name, err), out.Close())
		}
	}()
	at := func(port uint16) string { return netip.AddrPortFrom(n.pool.cfg.Gateway, port).String() }
	listen := func(port uint16) (*os.File, error) {
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", at(port))
		if err != nil {
			return nil, err
		}
		f, err := l.(*net.TCPListener).File()
		return f, errors.Join(err, l.Close())
	}
	err = n.Do(func() (err error) {
		if out.Proxy, err = listen(PortProxy); err != nil {
			return err
		}
		if out.Intercepted, err = listen(PortIntercepted); err != nil {
			return err
		}
		if out.ResolverTCP, err = listen(PortResolver); err != nil {
			return err
		}
		u, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp4", at(PortResolver))
		if err != nil {
			return err
		}
		out.ResolverUDP, err = u.(*net.UDPConn).File()
		return errors.Join(err, u.Close())
	})
	return out, err
}
