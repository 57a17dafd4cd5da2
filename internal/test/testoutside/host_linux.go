package testoutside

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/testpool"
)

// Host is a network namespace for a whole installation, as a machine of its own: its way to everywhere, in IPv4 and IPv6, is a link to a
// Network, and whatever leaves by it is seen there.
type Host struct {
	Path  string // of the namespace
	Names string // the Network's name server, as it is reached from here; not by the link
	t     *testing.T

	mu   sync.Mutex // guards seen
	seen []Packet
}

// Packet is one that came to the far side of a host's link.
type Packet struct {
	Proto string // of IP: tcp, udp, icmp, or a number; another is the type of the frame
	To    netip.AddrPort
	Later bool // it belongs to a TCP connection that had begun
}

func (p Packet) String() string { return p.Proto + " to " + p.To.String() }

// The link between a host and its Network.
const (
	hostAddr, farAddr   = "192.0.2.1", "192.0.2.2"
	hostAddr6, farAddr6 = "2001:db8:1::1", "2001:db8:1::2"
)

// NewHost makes one that ends with the test.
func (o *Network) NewHost(t *testing.T) *Host {
	t.Helper()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	link, err := testpool.NewLink()
	must(err)
	t.Cleanup(func() {
		if err := link.Close(); err != nil {
			t.Error(err)
		}
	})
	h := &Host{t: t, Path: link.Path, Names: o.Names}
	here, err := netns.GetFromPath(link.Path)
	must(err)
	defer here.Close()
	there, err := netns.GetFromPath(o.path)
	must(err)
	defer there.Close()
	in, err := netlink.NewHandleAt(here)
	must(err)
	defer in.Close()
	out, err := netlink.NewHandleAt(there)
	must(err)
	defer out.Close()
	must(in.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "outside"}, PeerName: "host", PeerNamespace: netlink.NsFd(int(there))}))
	must(address(in, "outside", hostAddr+"/30", hostAddr6+"/64"))
	must(address(out, "host", farAddr+"/30", farAddr6+"/64"))
	names, _, err := net.SplitHostPort(o.Names)
	must(err)
	_, server, err := net.ParseCIDR(names + "/32")
	must(err)
	must(in.RouteAdd(&netlink.Route{Dst: server, Gw: net.ParseIP(link.Near)}))
	for _, r := range []struct{ all, via string }{{"0.0.0.0/0", farAddr}, {"::/0", farAddr6}} {
		_, dst, _ := net.ParseCIDR(r.all)
		must(in.RouteAdd(&netlink.Route{Dst: dst, Gw: net.ParseIP(r.via)}))
	}
	far, err := out.LinkByName("host")
	must(err)
	var fd int
	must(osthread.Do(func() (err error) { // the thread ends with it
		if err := netns.Set(there); err != nil {
			return err
		}
		fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
		return err
	}))
	must(unix.Bind(fd, &unix.SockaddrLinklayer{Protocol: htons(unix.ETH_P_ALL), Ifindex: far.Attrs().Index}))
	must(unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Usec: 100_000}))
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan struct{})
	go func() {
		defer close(done)
		h.capture(ctx, fd)
	}()
	t.Cleanup(func() {
		stop()
		<-done
		_ = unix.Close(fd)
	})
	return h
}

func address(h *netlink.Handle, name string, list ...string) error {
	l, err := h.LinkByName(name)
	if err != nil {
		return err
	}
	for _, text := range list {
		a, err := netlink.ParseAddr(text)
		if err != nil {
			return err
		}
		a.Flags = unix.IFA_F_NODAD
		if err := h.AddrAdd(l, a); err != nil {
			return fmt.Errorf("add %s to %s: %w", text, name, err)
		}
	}
	return h.LinkSetUp(l)
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

// capture notes what arrives.
func (h *Host) capture(ctx context.Context, fd int) {
	for b := make([]byte, 4096); ctx.Err() == nil; {
		n, from, err := unix.Recvfrom(fd, b, 0)
		if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			h.t.Errorf("the capture has ended: %v", err)
			return
		}
		link, ok := from.(*unix.SockaddrLinklayer)
		if !ok || link.Pkttype == unix.PACKET_OUTGOING {
			continue
		}
		if p, ok := packet(htons(link.Protocol), b[:n]); ok {
			h.mu.Lock()
			h.seen = append(h.seen, p)
			h.mu.Unlock()
		}
	}
}

// packet reads what arrived; not ok is what a machine's kernel says to its neighbours by itself.
func packet(kind uint16, b []byte) (Packet, bool) {
	var to netip.Addr
	var proto byte
	switch {
	case kind == unix.ETH_P_ARP:
		return Packet{}, false
	case kind == unix.ETH_P_IP && len(b) >= 20:
		to, proto = netip.AddrFrom4([4]byte(b[16:20])), b[9]
		b = b[min(len(b), int(b[0]&15)*4):]
	case kind == unix.ETH_P_IPV6 && len(b) >= 40:
		to, proto = netip.AddrFrom16([16]byte(b[24:40])), b[6]
		b = b[40:]
		const hopByHop = 0
		if proto == hopByHop && len(b) >= 8 { // as multicast listener reports have
			proto, b = b[0], b[8:]
		}
		const firstQuery, lastReport = 130, 143 // multicast listeners, neighbours and routers
		if proto == unix.IPPROTO_ICMPV6 && len(b) > 0 && b[0] >= firstQuery && b[0] <= lastReport {
			return Packet{}, false
		}
	default:
		return Packet{Proto: fmt.Sprintf("frame %#04x", kind)}, true
	}
	var port uint16
	later := false
	name := fmt.Sprint(proto)
	switch proto {
	case unix.IPPROTO_TCP, unix.IPPROTO_UDP:
		name = map[byte]string{unix.IPPROTO_TCP: "tcp", unix.IPPROTO_UDP: "udp"}[proto]
		if len(b) >= 4 {
			port = binary.BigEndian.Uint16(b[2:])
		}
		const flags, syn = 13, 2
		later = proto == unix.IPPROTO_TCP && len(b) > flags && b[flags]&syn == 0
	case unix.IPPROTO_ICMP, unix.IPPROTO_ICMPV6:
		name = "icmp"
	}
	return Packet{name, netip.AddrPortFrom(to, port), later}, true
}

// Seen is what has arrived on the far side of the link since it was asked last.
func (h *Host) Seen() []Packet {
	h.mu.Lock()
	defer h.mu.Unlock()
	out := slices.Clone(h.seen)
	h.seen = nil
	return out
}

// Do runs a function on a thread in the host's namespace: sockets that it opens are the host's.
func (h *Host) Do(f func() error) error {
	ns, err := netns.GetFromPath(h.Path)
	if err != nil {
		return err
	}
	defer ns.Close()
	return osthread.Do(func() error {
		if err := netns.Set(ns); err != nil {
			return err
		}
		return f()
	})
}

// DialContext dials from the host.
func (h *Host) DialContext(ctx context.Context, network, address string) (c net.Conn, err error) {
	err = h.Do(func() error {
		var err error
		c, err = (&net.Dialer{Timeout: 10 * time.Second}).DialContext(ctx, network, address)
		return err
	})
	return c, err
}
