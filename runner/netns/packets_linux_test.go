package netns

import (
	"bytes"
	"context"
	"errors"
	"maps"
	"net"
	"net/netip"
	"os/exec"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// tableNames lists the tables of the calling thread's namespace.
func tableNames() ([]string, error) {
	var out []string
	err := withTables(func(c *nftables.Conn) error {
		tables, err := c.ListTables()
		for _, t := range tables {
			out = append(out, t.Name)
		}
		return err
	})
	return out, err
}

// TestRulesAgainstNft loads every golden ruleset the way the pool does and compares what nft prints with the text.
func TestRulesAgainstNft(t *testing.T) {
	t.Parallel()
	needNetns(t)
	nft := require.Program(t, "nft", "nftables")
	for name, rs := range goldenRulesets() {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			must(t, inside(newTestSpace(t), func() error {
				if err := createTap(); err != nil {
					return err
				}
				if err := withTables(func(c *nftables.Conn) error {
					return errors.Join(replaceRules(c, nil, rs), compareAll(c, rs))
				}); err != nil {
					return err
				}
				got, err := exec.CommandContext(t.Context(), nft, "-s", "list", "ruleset").Output()
				if diff := cmp.Diff(rs.String(), string(got)); diff != "" {
					t.Errorf("nft sees other rules (-ours +nft)\n%s", diff)
				}
				return err
			}))
		})
	}
}

// TestReadBackFindsTampering changes one thing at a time with nft and expects the comparison to fail.
func TestReadBackFindsTampering(t *testing.T) {
	t.Parallel()
	needNetns(t)
	nft := require.Program(t, "nft", "nftables")
	rs := rulesFor(testPlan(opened, core.EgressDenyAll))
	for _, change := range []string{
		"insert rule inet coppice input accept",
		"add rule netdev coppice ip_in accept",
		"flush chain netdev coppice ingress",
		"chain inet coppice forward { policy accept; }",
		"add chain inet coppice extra",
		"add table inet other",
		"delete table inet coppice",
		"flush chain inet coppice forward; add rule inet coppice forward drop",
	} {
		t.Run(change, func(t *testing.T) {
			t.Parallel()
			must(t, inside(newTestSpace(t), func() error {
				err := createTap()
				must(t, withTables(func(c *nftables.Conn) error { return replaceRules(c, nil, rs) }))
				if out, err := exec.CommandContext(t.Context(), nft, change).CombinedOutput(); err != nil {
					t.Fatalf("nft %s: %v\n%s", change, err, out)
				}
				if got := withTables(func(c *nftables.Conn) error { return compareAll(c, rs) }); got == nil {
					t.Error("the change was not noticed")
				}
				return err
			}))
		})
	}
}

// hostileFrame is something a guest may send, and what must become of it.
type hostileFrame struct {
	name    string
	frame   []byte
	counter string
}

func hostileFrames(t *testing.T, id core.Identity, sibling core.Identity, hostIP netip.Addr) []hostileFrame {
	t.Helper()
	mac, gw := macOf(t, id.MAC), macOf(t, GatewayMAC)
	other := macOf(t, sibling.MAC)
	ip, gwIP := id.IP, netip.MustParseAddr(DefaultGateway)
	a := netip.MustParseAddr
	syn := func(dst netip.Addr, port uint16) []byte {
		return ether(gw, mac, unix.ETH_P_IP, ip4(ip, dst, unix.IPPROTO_TCP, tcpSYN(ip, dst, port)))
	}
	good := ip4(ip, gwIP, unix.IPPROTO_UDP, udp(1, 3128, "x"))
	v6 := append([]byte{0x60, 0, 0, 0, 0, 16, 58, 255}, make([]byte, 48)...) // ICMPv6, hop limit 255
	v6[40] = 134                                                             // router advertisement
	frames := []hostileFrame{
		{"wrong source MAC", ether(gw, other, unix.ETH_P_IP, good), counterDropSpoof},
		{"wrong source IP", ether(gw, mac, unix.ETH_P_IP, ip4(sibling.IP, gwIP, unix.IPPROTO_UDP, udp(1, 2, "x"))), counterDropSpoof},
		{"the gateway's source IP", ether(gw, mac, unix.ETH_P_IP, ip4(gwIP, gwIP, unix.IPPROTO_UDP, udp(1, 2, "x"))), counterDropSpoof},
		{"ARP with another sender MAC inside", ether(broadcastMAC, mac, unix.ETH_P_ARP, arp(1, other, ip, nil6, gwIP)), counterDropSpoof},
		{"ARP reply in the gateway's name", ether(broadcastMAC, mac, unix.ETH_P_ARP, arp(2, mac, gwIP, gw, gwIP)), counterDropSpoof},
		{"ARP reply in a sibling's name", ether(broadcastMAC, mac, unix.ETH_P_ARP, arp(2, mac, sibling.IP, gw, gwIP)), counterDropSpoof},
		{"ARP request for a sibling", ether(broadcastMAC, mac, unix.ETH_P_ARP, arp(1, mac, ip, nil6, sibling.IP)), counterDropARP},
		{"gratuitous ARP", ether(broadcastMAC, mac, unix.ETH_P_ARP, arp(1, mac, ip, nil6, ip)), counterDropARP},
		{"ARP reply of its own", ether(gw, mac, unix.ETH_P_ARP, arp(2, mac, ip, gw, gwIP)), counterDropARP},
		{"RARP", ether(broadcastMAC, mac, 0x8035, arp(3, mac, a("0.0.0.0"), mac, a("0.0.0.0"))), counterDropType},
		{"LLDP", ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0xe}, mac, 0x88cc, nil), counterDropType},
		{"spanning tree", ether(net.HardwareAddr{1, 0x80, 0xc2, 0, 0, 0}, mac, 38, []byte{0x42, 0x42, 3}), counterDropType},
		{"VLAN tag around good IPv4", ether(gw, mac, unix.ETH_P_8021Q, append([]byte{0, 5, 8, 0}, good...)), counterDropType},
		{"priority tag around good IPv4", ether(gw, mac, unix.ETH_P_8021Q, append([]byte{0xe0, 0, 8, 0}, good...)), counterDropType},
		{"double VLAN tag", ether(gw, mac, unix.ETH_P_8021AD, append([]byte{0, 5, 0x81, 0, 0, 6, 8, 0}, good...)), counterDropType},
		{"VLAN tag around ARP", ether(broadcastMAC, mac, unix.ETH_P_8021Q, append([]byte{0, 5, 8, 6}, arp(1, mac, ip, nil6, gwIP)...)), counterDropType},
		{"IPv6 router advertisement", ether(net.HardwareAddr{0x33, 0x33, 0, 0, 0, 1}, mac, unix.ETH_P_IPV6, v6), counterDropV6},
		{"DHCP discover", ether(broadcastMAC, mac, unix.ETH_P_IP, ip4(a("0.0.0.0"), a("255.255.255.255"), unix.IPPROTO_UDP, udp(68, 67, "x"))), counterDropSpoof},
		{"broadcast", ether(broadcastMAC, mac, unix.ETH_P_IP, ip4(ip, a("255.255.255.255"), unix.IPPROTO_UDP, udp(1, 2, "x"))), counterDropSpecial},
		{"multicast DNS", ether(net.HardwareAddr{1, 0, 0x5e, 0, 0, 0xfb}, mac, unix.ETH_P_IP, ip4(ip, a("224.0.0.251"), unix.IPPROTO_UDP, udp(5353, 5353, "x"))), counterDropSpecial},
		{"metadata", syn(a("169.254.169.254"), 80), counterDropSpecial},
		{"task metadata", syn(a("169.254.170.2"), 80), counterDropSpecial},
		{"Azure metadata", syn(a("168.63.129.16"), 80), counterDropSpecial},
		{"loopback", syn(a("127.0.0.1"), 5432), counterDropSpecial},
		{"this network", syn(a("0.0.0.0"), 80), counterDropSpecial},
		{"reserved", syn(a("240.0.0.1"), 80), counterDropSpecial},
		{"the host's address", syn(hostIP, 22), counterDropForward},
		{"a sibling", syn(sibling.IP, 22), counterDropForward},
		{"a sibling by its MAC", ether(other, mac, unix.ETH_P_IP, ip4(ip, sibling.IP, unix.IPPROTO_UDP, udp(1, 2, "x"))), counterDropForward},
		{"the internet", syn(a("192.0.2.1"), 443), counterDropForward},
		{"Alibaba metadata", syn(a("100.100.100.200"), 80), counterDropForward},
		{"TCP to a closed port of the gateway", syn(gwIP, 22), counterDropInput},
		{"UDP to the gateway", ether(gw, mac, unix.ETH_P_IP, good), counterDropInput},
		{"ping of the gateway", ether(gw, mac, unix.ETH_P_IP, ip4(ip, gwIP, unix.IPPROTO_ICMP, []byte{8, 0, 0xf7, 0xff, 0, 0, 0, 0})), counterDropInput},
	}
	return frames
}

var nil6 = net.HardwareAddr{0, 0, 0, 0, 0, 0}

// TestHostileFrames sends each frame from an open deny-all sandbox. Exactly its counter rises, the next thing that
// comes out of the tap is the answer to an honest question, and neither a sibling nor the host sees a frame.
func TestHostileFrames(t *testing.T) { //nolint:tparallel // the frames go over one tap, one after the other
	t.Parallel()
	p := newTestPool(t, nil)
	id, siblingID := identity(7), identity(8)
	hostIP := netip.MustParseAddr("203.0.113.9")
	must(t, inside(p.host, func() error { return addPair("wan", p.host, hostIP) }))
	n, w := acquireWired(t, p, id)
	sibling, sw := acquireWired(t, p, siblingID)
	hostEars := listenPackets(t, p.host)
	ask := ether(broadcastMAC, macOf(t, id.MAC), unix.ETH_P_ARP, arp(1, macOf(t, id.MAC), id.IP, nil6, p.cfg.Gateway))
	answer := arp(2, macOf(t, GatewayMAC), p.cfg.Gateway, macOf(t, id.MAC), id.IP)

	for _, c := range hostileFrames(t, id, siblingID, hostIP) {
		t.Run(c.name, func(t *testing.T) {
			before := counters(t, n)
			must(t, w.send(c.frame))
			if f := w.pending(t); f != nil {
				t.Errorf("it was answered: %x", f)
			}
			must(t, w.send(ask))
			if f := w.pending(t); len(f) < 42 || !bytes.Equal(f[14:42], answer) {
				t.Errorf("the gateway does not answer ARP any more: %x", f)
			}
			want := map[string]uint64{c.counter: 1, counterAccepted: 1}
			if c.counter == counterDropInput { // passed the tap's own checks
				want[counterAccepted] = 2
			}
			if diff := cmp.Diff(want, risen(before, counters(t, n))); diff != "" {
				t.Errorf("counters (-want +got)\n%s", diff)
			}
		})
	}
	if f := sw.pending(t); f != nil {
		t.Errorf("the sibling saw %x", f)
	}
	if total := risen(map[string]uint64{}, counters(t, sibling)); len(total) != 0 {
		t.Errorf("the sibling's counters rose: %v", total)
	}
	if f := hostEars.pending(t); f != nil {
		t.Errorf("the host saw %x", f)
	}
	checkNeighbour(t, n, id)
}

// checkNeighbour checks that the namespace believes only the assigned MAC.
func checkNeighbour(t *testing.T, n *Namespace, id core.Identity) {
	t.Helper()
	must(t, n.Do(func() error {
		list, err := netlink.NeighList(0, netlink.FAMILY_V4)
		for _, e := range list {
			if e.State == netlink.NUD_PERMANENT && e.IP.String() == id.IP.String() && e.HardwareAddr.String() == id.MAC {
				continue
			}
			if e.State != netlink.NUD_NOARP {
				t.Errorf("neighbour %v", e)
			}
		}
		return err
	}))
}

// packetEars hears every frame of a namespace, whatever the rules say.
type packetEars struct{ fd int }

func listenPackets(t *testing.T, ns netns.NsHandle) *packetEars {
	t.Helper()
	e := &packetEars{fd: -1}
	must(t, inside(ns, func() (err error) {
		e.fd, err = unix.Socket(unix.AF_PACKET, unix.SOCK_RAW|unix.SOCK_NONBLOCK|unix.SOCK_CLOEXEC, int(htons(unix.ETH_P_ALL)))
		return err
	}))
	t.Cleanup(func() { _ = unix.Close(e.fd) })
	return e
}

func (e *packetEars) pending(t *testing.T) []byte {
	t.Helper()
	b := make([]byte, 65536)
	n, _, err := unix.Recvfrom(e.fd, b, 0)
	if errors.Is(err, unix.EAGAIN) {
		return nil
	}
	must(t, err)
	return b[:n]
}

func (e *packetEars) drain(t *testing.T) {
	t.Helper()
	for e.pending(t) != nil {
	}
}

func htons(v uint16) uint16 { return v<<8 | v>>8 }

func counters(t testing.TB, n *Namespace) map[string]uint64 {
	t.Helper()
	c, err := n.Counters(context.WithoutCancel(t.Context()))
	must(t, err)
	return c
}

// risen returns the counters that rose, and by how much.
func risen(before, after map[string]uint64) map[string]uint64 {
	out := maps.Clone(after)
	maps.DeleteFunc(out, func(k string, v uint64) bool { return v == before[k] })
	for k := range out {
		out[k] -= before[k]
	}
	return out
}

// TestQuarantineIsSilent: while quarantined and while assigned the tap is down, so frames go neither way; and were
// it up, every frame would be dropped and counted.
func TestQuarantineIsSilent(t *testing.T) { //nolint:tparallel // the states of one namespace, one after the other
	t.Parallel()
	p := newTestPool(t, nil)
	n, err := p.Acquire(t.Context())
	must(t, err)
	id := identity(7)
	w := newWire(t, n)
	ears := listenPackets(t, n.space.fd)
	frames := hostileFrames(t, id, identity(8), netip.MustParseAddr("203.0.113.9"))
	ask := ether(broadcastMAC, macOf(t, id.MAC), unix.ETH_P_ARP, arp(1, macOf(t, id.MAC), id.IP, nil6, p.cfg.Gateway))
	frames = append(frames, hostileFrame{"honest ARP", ask, ""})

	silent := func(t *testing.T, tapUp bool) {
		t.Helper()
		before := counters(t, n)
		for _, f := range frames {
			if err := w.send(f.frame); (err == nil) != tapUp {
				t.Errorf("%s: writing to the tap: %v", f.name, err)
			}
		}
		must(t, n.Do(func() error { // the host cannot reach the guest either
			fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return err
			}
			if err := unix.Sendto(fd, []byte("x"), 0, &unix.SockaddrInet4{Port: 9, Addr: id.IP.As4()}); err == nil {
				t.Error("a packet was sent to the guest")
			}
			return unix.Close(fd)
		}))
		if f := w.pending(t); f != nil {
			t.Errorf("the guest got %x", f)
		}
		rose := risen(before, counters(t, n))
		var want uint64
		if tapUp {
			want = uint64(len(frames))
		} else if f := ears.pending(t); f != nil {
			t.Errorf("an observer on the tap saw %x", f)
		}
		delete(rose, counterDropOutput) // our own attempt to reach the guest
		if got := rose[counterDropQuarant] + rose[counterDropSpoof]; got != want || len(rose) > 2 {
			t.Errorf("%d frames were sent, counters rose by %v", want, rose)
		}
		if _, err := n.Dial(t.Context(), "tcp", ":22"); core.CategoryOf(err) != core.FailedPrecondition {
			t.Errorf("dial into quarantine: %v", err)
		}
	}
	// As for a VMM that needs it.
	forceUp := func(t *testing.T) {
		t.Helper()
		must(t, n.raise())
	}
	t.Run("quarantined", func(t *testing.T) { silent(t, false) })
	t.Run("quarantined, tap forced up", func(t *testing.T) {
		forceUp(t)
		silent(t, true)
	})
	ears.drain(t)
	must(t, n.Shut(t.Context()))
	must(t, n.Assign(t.Context(), id))
	t.Run("assigned", func(t *testing.T) { silent(t, false) })
	t.Run("assigned, tap forced up", func(t *testing.T) {
		forceUp(t)
		silent(t, true)
	})
	must(t, n.Open(t.Context(), core.EgressDenyAll))
	if f := w.pending(t); f != nil {
		t.Errorf("opening sent the guest %x", f)
	}
	must(t, w.send(ask)) // the control: once open, the same frame is answered
	if f := w.pending(t); f == nil {
		t.Error("an open namespace does not answer ARP for the gateway")
	}
	must(t, n.Shut(t.Context()))
	ears.drain(t)
	t.Run("shut again", func(t *testing.T) { silent(t, false) })
}

// addPair adds a veth pair, the first end up and with an address, to the calling thread's namespace.
func addPair(name string, peer netns.NsHandle, ip netip.Addr) error {
	l := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: name}, PeerName: name + "-peer", PeerNamespace: netlink.NsFd(peer)}
	return errors.Join(
		sysctl{"ipv6/conf/default/disable_ipv6", "1"}.set(),
		netlink.LinkAdd(l),
		netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(ip, 24))}),
		netlink.LinkSetUp(l))
}
