package proxy

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/egress/policy"
)

// Resolver finds the addresses of names, like net.Resolver.
type Resolver interface {
	LookupNetIP(ctx context.Context, network, host string) ([]netip.Addr, error)
}

// dialTime bounds a dial, including name resolution.
const dialTime = 20 * time.Second

// dialError wraps the reason why a dial failed, to tell it from a denial.
type dialError struct {
	denied bool
	err    error
}

func (e *dialError) Error() string { return e.err.Error() }
func (e *dialError) Unwrap() error { return e.err }

// dial connects to a host. It checks the very address that it dials.
func (s *Server) dial(ctx context.Context, h policy.Host, port uint16) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	addrs, err := s.resolve(ctx, h)
	if err != nil {
		return nil, err
	}
	d := net.Dialer{ControlContext: s.guard}
	var errs []error
	for _, a := range addrs {
		c, err := d.DialContext(ctx, "tcp", netip.AddrPortFrom(a, port).String())
		if err == nil {
			return c, nil
		}
		errs = append(errs, err)
	}
	return nil, &dialError{err: errors.Join(errs...)}
}

// resolve returns the addresses of a host. If any of them may not be dialled, it refuses the whole name.
func (s *Server) resolve(ctx context.Context, h policy.Host) ([]netip.Addr, error) {
	if addr, ok := h.Addr(); ok {
		if err := s.cfg.Reach().Check(addr); err != nil {
			return nil, &dialError{true, err}
		}
		return []netip.Addr{addr}, nil
	}
	addrs, err := s.cfg.Resolver.LookupNetIP(ctx, "ip", h.Name()+".")
	if err != nil {
		return nil, &dialError{err: err}
	}
	const most = 16
	addrs = addrs[:min(len(addrs), most)]
	for i, a := range addrs {
		addrs[i] = a.Unmap() // ::ffff:1.2.3.4 from a resolver is an IPv4 address
		if err := s.cfg.Reach().Check(addrs[i]); err != nil {
			return nil, &dialError{true, fmt.Errorf("%s is at %w", h, err)}
		}
	}
	if len(addrs) == 0 {
		return nil, &dialError{err: errNoAddress}
	}
	return addrs, nil
}

// guard checks the address to which a socket is about to connect.
func (s *Server) guard(_ context.Context, network, address string, _ syscall.RawConn) error {
	ap, err := netip.ParseAddrPort(address)
	if err != nil || network != "tcp4" && network != "tcp6" {
		return fmt.Errorf("dial of %s %s: %w", network, address, errors.Join(err, errors.ErrUnsupported))
	}
	return s.cfg.Reach().Check(ap.Addr())
}
