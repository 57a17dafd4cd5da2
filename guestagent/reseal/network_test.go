//go:build linux

package reseal

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// inNetns runs fn in a new network namespace with a tap device.
func inNetns(t *testing.T, fn func(c *nl, nic link) error) {
	t.Helper()
	require.Root(t)
	err := osthread.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("make a network namespace: %w", err)
		}
		tap, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC, 0)
		if err != nil {
			return fmt.Errorf("open /dev/net/tun: %w", err)
		}
		defer func() { _ = unix.Close(tap) }()
		ifr, err := unix.NewIfreq("eth7")
		if err != nil {
			return err
		}
		ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI)
		if err := unix.IoctlIfreq(tap, unix.TUNSETIFF, ifr); err != nil {
			return fmt.Errorf("make a tap: %w", err)
		}
		c, err := dialNetlink(unix.NETLINK_ROUTE)
		if err != nil {
			return err
		}
		defer c.close()
		links, err := c.links()
		if err != nil {
			return err
		}
		for _, l := range links {
			if l.name == "lo" {
				if err := c.do(setLink(l.index, unix.IFF_UP, unix.IFF_UP)); err != nil {
					return err
				}
			}
		}
		for _, l := range links {
			if l.name == "eth7" {
				return fn(c, l)
			}
		}
		return fmt.Errorf("the tap is not in %+v", links)
	})
	if err != nil {
		t.Fatal(err)
	}
}

// TestNetworkLongAndShortWay configures a device from nothing, then changes it like a fork of a fork does.
func TestNetworkLongAndShortWay(t *testing.T) {
	t.Parallel()
	inNetns(t, func(c *nl, nic link) error {
		if nic.kind != "tun" || nic.arp != unix.ARPHRD_ETHER {
			t.Errorf("the tap is seen as %+v", nic)
		}
		for i, way := range []string{"long", "short", "short", "long"} {
			mac := net.HardwareAddr{2, 0, 0, 0, 0, byte(i + 1)}
			addr := netip.PrefixFrom(netip.AddrFrom4([4]byte{10, 0, byte(i), 1}), 32)
			want := guestapi.Network{Prefix: 32, Gateway: netip.AddrFrom4([4]byte{10, 9, 9, byte(i)}), GatewayMAC: "02:00:00:00:00:fe"}
			if way == "long" {
				want.MTU = 1400 + i
				if err := change(c, nicState{link: nic}, mac, addr, want); err == nil {
					t.Error("the short way took an MTU")
				}
				if err := configure(c, nic.index, mac, addr, want); err != nil {
					return fmt.Errorf("%d: %w", i, err)
				}
			} else {
				state := nicState{link: nic}
				var err error
				if state.addresses, err = c.addresses(nic.index); err != nil || len(state.addresses) != 1 {
					return fmt.Errorf("%d: addresses %+v: %w", i, state.addresses, err)
				}
				state.flags |= unix.IFF_UP
				if err := change(c, state, mac, addr, want); err != nil {
					return fmt.Errorf("%d: %w", i, err)
				}
			}
			ev, err := networkEvidence(c, nic.name)
			if err != nil {
				return err
			}
			if !shows(ev, mac, addr, want) || ev[guestapi.EvidenceRoutes] != "1" {
				t.Errorf("%d: evidence %v, want %s %s", i, ev, mac, addr)
			}
		}
		// A default route of the user over another device is found, and the full configuration removes it.
		if err := c.do(addAddress(nic.index, netip.MustParsePrefix("10.5.5.5/24"))); err != nil {
			return err
		}
		extra := addDefaultRoute(nic.index, netip.MustParseAddr("10.5.5.1"))
		extra.attr32(unix.RTA_PRIORITY, 77)
		if err := c.do(extra); err != nil {
			return err
		}
		ev, err := networkEvidence(c, nic.name)
		if err != nil || ev[guestapi.EvidenceRoutes] != "2" || ev[guestapi.EvidenceGateway] != "" || !strings.Contains(ev[guestapi.EvidenceAddresses], "10.5.5.5/") {
			t.Errorf("evidence %v %v, want two routes and two addresses", ev, err)
		}
		addr, want := netip.MustParsePrefix("10.6.6.6/32"), guestapi.Network{Prefix: 32}
		if err := configure(c, nic.index, nic.mac, addr, want); err != nil {
			return err
		}
		if ev, err = networkEvidence(c, nic.name); err != nil || !shows(ev, nic.mac, addr, want) || ev[guestapi.EvidenceRoutes] != "0" {
			t.Errorf("without a gateway: %v %v", ev, err)
		}
		err = c.do(addAddress(nic.index, addr), addAddress(nic.index, netip.MustParsePrefix("10.7.7.7/32")))
		var r refused
		if !errors.As(err, &r) || r.index != 0 || !errors.Is(err, unix.EEXIST) {
			t.Errorf("an address that is there: %v, want EEXIST of the first request", err)
		}
		if list, err := c.addresses(nic.index); err != nil || len(list) != 2 {
			t.Errorf("the request after a refused one was not done: %v %v", list, err)
		}
		return nil
	})
}

// TestSocketsAreDestroyed: connections to the outside end with an error; connections inside the guest and listeners go
// on.
func TestSocketsAreDestroyed(t *testing.T) {
	t.Parallel()
	inNetns(t, func(c *nl, nic link) error {
		addr := netip.MustParsePrefix("10.0.0.1/32")
		if err := configure(c, nic.index, net.HardwareAddr{2, 0, 0, 0, 0, 1}, addr, guestapi.Network{Prefix: 32, Gateway: netip.MustParseAddr("10.0.0.2")}); err != nil {
			return err
		}
		pair := func(host string) (l net.Listener, a, b net.Conn, err error) {
			if l, err = net.Listen("tcp", host+":0"); err != nil {
				return nil, nil, nil, err
			}
			if a, err = net.Dial("tcp", l.Addr().String()); err != nil {
				return nil, nil, nil, err
			}
			b, err = l.Accept()
			return l, a, b, err
		}
		inner, ia, ib, err := pair("127.0.0.1")
		if err != nil {
			return err
		}
		outer, oa, ob, err := pair("10.0.0.1")
		if err != nil {
			return err
		}
		udp, err := net.Dial("udp", "10.0.0.9:53")
		if err != nil {
			return err
		}
		defer func() {
			for _, x := range []interface{ Close() error }{inner, ia, ib, outer, oa, ob, udp} {
				_ = x.Close()
			}
		}()
		ev, err := stepSockets(t.Context(), nil)
		if errors.Is(err, unix.ENOENT) || errors.Is(err, unix.EOPNOTSUPP) {
			require.That(t, "inet_diag_destroy", false, "use a kernel with INET_DIAG, INET_UDP_DIAG and INET_DIAG_DESTROY")
		}
		if err != nil {
			return err
		}
		if ev[guestapi.EvidenceDestroyed] != "3" || ev[guestapi.EvidenceRemaining] != "0" || ev["kept_loopback"] != "2" {
			t.Errorf("evidence %v, want 3 destroyed, 2 kept", ev)
		}
		for _, conn := range []net.Conn{oa, ob} {
			if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNABORTED) && !errors.Is(err, syscall.ECONNRESET) {
				t.Errorf("a destroyed connection reads %v", err)
			}
		}
		if _, err := ia.Write([]byte("x")); err != nil {
			t.Errorf("a connection inside of the guest: %v", err)
		}
		if _, err := ib.Read(make([]byte, 1)); err != nil {
			t.Errorf("a connection inside of the guest: %v", err)
		}
		again, err := net.Dial("tcp", outer.Addr().String())
		if err != nil {
			t.Errorf("the listener is gone: %v", err)
		} else {
			_ = again.Close()
		}
		return nil
	})
}
