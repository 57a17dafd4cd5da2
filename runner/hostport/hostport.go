// Package hostport decides which addresses of the host forward to guests, and listens on them. A
// tenant asks for an address among those that the operator has allowed.
package hostport

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// Lowest is the first port that may be forwarded: those below belong to services of the host.
const Lowest = 1024

// Allowed are the addresses and ports that the operator allows tenants. The zero value is that of Default.
type Allowed struct {
	Addresses   []netip.Addr // the first one is for requests that name none
	First, Last uint16
	// Bind is the address that listens in place of Addresses; none: they listen themselves. In a container, Addresses are those of the host,
	// whose engine forwards their ports to it.
	Bind netip.Addr
}

// Default allows the loopback addresses, and the ports from Lowest up that the kernel does not give to outgoing connections: usually those up to
// 32767.
func Default() Allowed {
	ports := outside(outgoing())
	return Allowed{
		Addresses: []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()},
		First:     uint16(ports.first), Last: uint16(ports.last),
	}
}

// Parse reads what the operator wrote: addresses, and a range of ports as FIRST-LAST. What is empty is as in Default.
func Parse(addresses []string, ports string) (Allowed, error) {
	a := Default()
	if len(addresses) > 0 {
		a.Addresses = nil
	}
	for _, text := range addresses {
		address, err := netip.ParseAddr(text)
		if err != nil || address.Zone() != "" || address.IsMulticast() {
			return a, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not an IP address to listen on", core.Clip(text))
		}
		a.Addresses = append(a.Addresses, address.Unmap())
	}
	if ports == "" {
		return a, nil
	}
	first, last, _ := strings.Cut(ports, "-")
	low, err1 := strconv.ParseUint(first, 10, 16)
	high, err2 := strconv.ParseUint(last, 10, 16)
	if err := errors.Join(err1, err2); err != nil || low < Lowest || high < low {
		return a, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not a range of ports from %d up, as in 20000-29999", core.Clip(ports), Lowest)
	}
	a.First, a.Last = uint16(low), uint16(high)
	return a, nil
}

// ParseBind reads Bind. The empty text is none.
func ParseBind(text string) (netip.Addr, error) {
	if text == "" {
		return netip.Addr{}, nil
	}
	address, err := netip.ParseAddr(text)
	if err != nil || address.Zone() != "" || address.IsMulticast() {
		return netip.Addr{}, core.Errorf(core.Invalid, core.CodeInvalidField, "%q is not an IP address to listen on", core.Clip(text))
	}
	return address.Unmap(), nil
}

func (a Allowed) withDefaults() Allowed {
	d := Default()
	if len(a.Addresses) == 0 {
		a.Addresses = d.Addresses
	}
	if a.Last == 0 {
		a.First, a.Last = d.First, d.Last
	}
	return a
}

// all reports whether every port may be used, so that the kernel can choose one.
func (a Allowed) all() bool { return a.First == Lowest && a.Last == 65535 }

// check returns the address to listen on. Port 0 stays for a free one.
func (a Allowed) check(want Want) (netip.Addr, error) {
	address := a.Addresses[0]
	if want.Address.IsValid() {
		address = want.Address.Unmap()
	}
	if !slices.Contains(a.Addresses, address) {
		return address, core.Errorf(core.PermissionDenied, core.CodePortNotAllowed,
			"this host forwards no port of %s; leave the address out, or use one that its operator allows (--forward-address): %s", address, a.addresses())
	}
	if want.Port != 0 && (want.Port < a.First || want.Port > a.Last) {
		return address, core.Errorf(core.PermissionDenied, core.CodePortNotAllowed,
			"this host does not forward port %d; use one from %d to %d, or 0 for a free one (the operator sets the range with --forward-ports)", want.Port, a.First, a.Last)
	}
	return address, nil
}

func (a Allowed) addresses() string {
	var list []string
	for _, address := range a.Addresses {
		list = append(list, address.String())
	}
	return strings.Join(list, ", ")
}

// Want is a tenant's request: an address, or none; a port, or 0 for a free one.
type Want struct {
	Address netip.Addr
	Port    uint16
}

// Host listens on ports of this host for guests.
type Host struct {
	allowed Allowed
	mu      sync.Mutex // one claims at a time
}

// New makes a Host.
func New(a Allowed) *Host { return &Host{allowed: a.withDefaults()} }

// Listen listens on an allowed address. The port must be free on all addresses of the host, in both families: else what listens for a guest
// would receive what is meant for a service of the host with the same port. As long as the listener is open, nobody else can have
// the port on another address either.
func (h *Host) Listen(ctx context.Context, want Want) (*Listener, error) {
	address, err := h.allowed.check(want)
	if err != nil {
		return nil, err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	switch {
	case want.Port != 0:
		return h.listen(ctx, address, want.Port)
	case h.allowed.all():
		return h.listen(ctx, address, 0)
	}
	size := int(h.allowed.Last-h.allowed.First) + 1
	start := rand.IntN(size) //nolint:gosec // G404: it is no secret
	for i := range size {
		if ctx.Err() != nil {
			return nil, context.Cause(ctx)
		}
		port := h.allowed.First + uint16((start+i)%size)
		l, err := h.listen(ctx, address, port)
		if core.CodeOf(err) != core.CodePortTaken {
			return l, err
		}
	}
	return nil, core.Errorf(core.Conflict, core.CodePortTaken, "all ports from %d to %d of the host are taken; close forwarded ports, or ask its operator for more (--forward-ports)", h.allowed.First, h.allowed.Last)
}

// Listener listens for a guest and keeps the port on all other addresses.
type Listener struct {
	net.Listener
	at    netip.Addr // what the tenant was given
	close func() error
}

// Close gives the port back.
func (l *Listener) Close() error { return l.close() }

// Address is where tenants reach it: where it listens, or what is forwarded to there.
func (l *Listener) Address() netip.AddrPort {
	return netip.AddrPortFrom(l.at, l.Addr().(*net.TCPAddr).AddrPort().Port())
}

// listen listens on an address of Allowed, or in its place.
func (h *Host) listen(ctx context.Context, address netip.Addr, port uint16) (*Listener, error) {
	bind := address
	if h.allowed.Bind.IsValid() {
		bind = h.allowed.Bind
	}
	l, err := listen(ctx, bind, port)
	if err != nil {
		return nil, err
	}
	l.at = address
	return l, nil
}

// listen claims a port on all addresses and listens on one. Port 0 is one that the kernel chooses.
func listen(ctx context.Context, address netip.Addr, port uint16) (*Listener, error) {
	fd, port, err := claim(port)
	if err != nil {
		return nil, err
	}
	// The claim and the listener have SO_REUSEADDR and the claim does not listen: so the kernel lets both have the port.
	network := "tcp6" // with "tcp", net takes 0.0.0.0 for all addresses of both families
	if address.Is4() {
		network = "tcp4"
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, network, netip.AddrPortFrom(address, port).String())
	if err != nil {
		return nil, errors.Join(taken(err, port), unix.Close(fd))
	}
	// Without it, the claim is in the way of everybody who comes later.
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 0); err != nil {
		return nil, errors.Join(err, l.Close(), unix.Close(fd))
	}
	return &Listener{l, address, sync.OnceValue(func() error { return errors.Join(l.Close(), unix.Close(fd)) })}, nil
}

// claim binds a socket to a port of all addresses of both families. It fails where anybody listens on the port, at any address.
func claim(port uint16) (fd int, got uint16, err error) {
	if fd, err = bound(unix.AF_INET6, &unix.SockaddrInet6{Port: int(port)}); errors.Is(err, unix.EAFNOSUPPORT) || errors.Is(err, unix.EADDRNOTAVAIL) {
		fd, err = bound(unix.AF_INET, &unix.SockaddrInet4{Port: int(port)}) // a host without IPv6
	}
	if err != nil {
		return -1, port, taken(err, port)
	}
	name, err := unix.Getsockname(fd)
	if err != nil {
		return -1, port, errors.Join(err, unix.Close(fd))
	}
	switch a := name.(type) {
	case *unix.SockaddrInet6:
		return fd, uint16(a.Port), nil
	case *unix.SockaddrInet4:
		return fd, uint16(a.Port), nil
	}
	return -1, port, errors.Join(fmt.Errorf("a socket is bound to %T", name), unix.Close(fd))
}

func bound(family int, at unix.Sockaddr) (int, error) {
	fd, err := unix.Socket(family, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	if family == unix.AF_INET6 {
		err = unix.SetsockoptInt(fd, unix.IPPROTO_IPV6, unix.IPV6_V6ONLY, 0)
	}
	if err = errors.Join(err, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1)); err == nil {
		err = unix.Bind(fd, at)
	}
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	return fd, nil
}

// taken says that somebody has a port, if that is what an error means.
func taken(err error, port uint16) error {
	if errors.Is(err, unix.EADDRINUSE) {
		return core.Wrapf(err, core.Conflict, core.CodePortTaken, "port %d is used on an address of the host; use another one, or 0 for a free one", port)
	}
	return fmt.Errorf("listen on port %d of the host: %w", port, err)
}
