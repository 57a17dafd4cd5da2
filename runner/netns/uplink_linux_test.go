package netns

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/coppice-dev/coppice/core"
)

// world is a host with an uplink to an internet that has a public server, 203.0.113.1, and on which private
// addresses answer too, as in the network of a real host.
type world struct {
	pool     *testPool
	internet netns.NsHandle
}

const (
	publicServer  = "203.0.113.1:80"
	privateServer = "192.168.77.1:80" // routed and served, so only a rule keeps guests away
	hostAddress   = "203.0.113.9"
)

func newWorld(t *testing.T) *world {
	t.Helper()
	w := &world{pool: newTestPool(t, nil), internet: newTestSpace(t)}
	must(t, inside(w.pool.host, func() error {
		return errors.Join(
			sysctl{forwardingKey, "0"}.set(), // a new namespace has it from the first one, which may forward
			addPair("wan", w.internet, netip.MustParseAddr(hostAddress)))
	}))
	must(t, inside(w.internet, func() error {
		l, err := netlink.LinkByName("wan-peer")
		if err != nil {
			return err
		}
		return errors.Join(
			netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("203.0.113.1/24"))}),
			netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("192.168.77.1/24"))}),
			netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("169.254.169.254/32"))}),
			netlink.LinkSetUp(l))
	}))
	must(t, inside(w.pool.host, func() error {
		return netlink.RouteAdd(&netlink.Route{Gw: net.ParseIP("203.0.113.1")})
	}))
	return w
}

// serveName accepts connections on addr inside ns and tells each who it is, as seen from there.
func serveName(t *testing.T, ns netns.NsHandle, addr string) {
	t.Helper()
	var l net.Listener
	must(t, inside(ns, func() (err error) {
		l, err = (&net.ListenConfig{}).Listen(t.Context(), "tcp4", addr)
		return err
	}))
	done := make(chan struct{})
	go func() {
		defer close(done)
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			host, _, _ := net.SplitHostPort(c.RemoteAddr().String())
			_, _ = io.WriteString(c, host)
			_ = c.Close()
		}
	}()
	t.Cleanup(func() {
		_ = l.Close()
		<-done
	})
}

func dialAndRead(ctx context.Context, ns netns.NsHandle, addr string) (string, error) {
	c, err := (&kernelGuest{ns: ns}).dial(ctx, addr)
	if err != nil {
		return "", err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(watchdog)); err != nil {
		return "", err
	}
	b, err := io.ReadAll(c)
	return string(b), err
}

// TestAllowAll: with the explicit policy a guest reaches the public server, by the host's address, and still neither
// metadata, private networks, the host nor a sibling; all of it is gone after Release.
func TestAllowAll(t *testing.T) { //nolint:tparallel // several views of one world
	t.Parallel()
	w := newWorld(t)
	p := w.pool
	for _, addr := range []string{publicServer, privateServer, "169.254.169.254:80"} {
		serveName(t, w.internet, addr)
	}
	serveName(t, p.host, hostAddress+":80")
	must(t, inside(p.host, func() error { return foreignTable() }))
	for addr, want := range map[string]string{publicServer: hostAddress, privateServer: hostAddress, "169.254.169.254:80": hostAddress} {
		if got, err := dialAndRead(patience(t, watchdog), p.host, addr); err != nil || got != want {
			t.Fatalf("the world is not as the test needs it: %s from the host: %q, %v", addr, got, err)
		}
	}

	id, siblingID := identity(7), identity(8)
	n := acquireOpen(t, p, id, core.EgressAllowAll)
	g := newKernelGuest(t, n, id)
	sibling := acquireOpen(t, p, siblingID, core.EgressAllowAll)
	sg := newKernelGuest(t, sibling, siblingID)
	serveName(t, sg.ns, ":80")
	serveName(t, g.ns, ":80")
	closed := acquireOpen(t, p, identity(9), core.EgressDenyAll)
	cg := newKernelGuest(t, closed, identity(9))

	for _, ns := range []netns.NsHandle{g.ns, sg.ns} {
		if got, err := dialAndRead(patience(t, watchdog), ns, publicServer); err != nil || got != hostAddress {
			t.Errorf("the public server saw %q, %v", got, err)
		}
	}
	if rose := counters(t, n); rose[counterForwarded] == 0 || rose[counterForwardReturn] == 0 {
		t.Errorf("counters %v", rose)
	}
	sockets, err := n.EgressSockets(t.Context()) // of them the guest reaches the resolver alone
	must(t, err)
	stop := egressServer(t, sockets)
	defer stop()
	gateway := p.cfg.Gateway.String()
	if got, err := dialAndRead(patience(t, watchdog), g.ns, gateway+":53"); err != nil || got != "resolver" {
		t.Errorf("the resolver over TCP: %q, %v", got, err)
	}
	if got := askOver(t, g.ns, gateway+":53"); got != "answer to question" {
		t.Errorf("the resolver over UDP: %q", got)
	}
	if got := askOver(t, g.ns, gateway+":54"); got != "nothing" {
		t.Errorf("another port over UDP: %q", got)
	}
	if c, err := n.Dial(patience(t, watchdog), "tcp", ":80"); err != nil { // forwarded ports work as ever
		t.Error(err)
	} else {
		must(t, c.Close())
	}
	hostEnd := linkAddress(t, p, n)
	for name, from := range map[string]struct {
		ns   netns.NsHandle
		addr string
	}{
		"metadata":                    {g.ns, "169.254.169.254:80"},
		"a private network":           {g.ns, privateServer},
		"the host's public address":   {g.ns, hostAddress + ":80"},
		"the host's end of the link":  {g.ns, hostEnd + ":80"},
		"a sibling":                   {g.ns, siblingID.IP.String() + ":80"},
		"a sibling's end of the link": {g.ns, otherEnd(t, linkAddress(t, p, sibling)) + ":80"},
		"out of a deny-all sandbox":   {cg.ns, publicServer},
		"the socket of the proxy":     {g.ns, gateway + ":3128"},
	} {
		t.Run(name, func(t *testing.T) {
			if got, err := dialAndRead(patience(t, 300*time.Millisecond), from.ns, from.addr); err == nil {
				t.Errorf("the guest reached %s: %q", from.addr, got)
			}
		})
	}
	t.Run("into a sandbox from the internet", func(t *testing.T) {
		must(t, inside(w.internet, func() error { // a neighbour of the host that routes the link network to it
			return netlink.RouteAdd(&netlink.Route{Dst: ipNet(netip.MustParsePrefix("198.18.0.0/15")), Gw: net.ParseIP(hostAddress)})
		}))
		if got, err := dialAndRead(patience(t, 300*time.Millisecond), w.internet, otherEnd(t, hostEnd)+":80"); err == nil {
			t.Errorf("the internet reached the guest: %q", got)
		}
	})

	for _, want := range []string{"allow-all is for development only", "ip_forward of the host was switched on", "drops forwarded packets by default"} {
		if !strings.Contains(p.log.String(), want) {
			t.Errorf("the log does not say %q", want)
		}
	}
	g.end()
	stop()
	must(t, n.Release(t.Context()))
	checkTables(t, p, "foreign", p.names.table(sibling.space.id))
	sg.end()
	must(t, sibling.Shut(t.Context()))
	checkTables(t, p, "foreign")
	if left := tracesOf(t, p.names, p.host); len(left) != 6 { // three namespaces, each a file and a mount
		t.Errorf("the host shows %v", left)
	}
	must(t, sibling.Assign(t.Context(), siblingID))
	must(t, sibling.Open(t.Context(), core.EgressDenyAll)) // the way out does not survive a Shut
	must(t, sibling.Do(func() error {
		return sysctl{forwardingKey, "0"}.check()
	}))
}

// foreignTable is somebody else's firewall: it drops forwarded packets by default, but lets these through.
func foreignTable() error {
	return withTables(func(c *nftables.Conn) error {
		return replaceRules(c, nil, ruleset{{family: familyInet, name: "foreign", chains: []chain{{
			name: "forward", kind: "filter", hook: "forward", priority: 0, policy: drop,
			rules: []rule{{match: []match{inDevice("wan")}, verdict: accept}, {match: []match{outDevice{name: "wan"}}, verdict: accept}},
		}}}})
	})
}

func checkTables(t *testing.T, p *testPool, want ...string) {
	t.Helper()
	must(t, inside(p.host, func() error {
		got, err := tableNames()
		if strings.Join(got, " ") != strings.Join(want, " ") {
			t.Errorf("the host has the tables %v, not %v", got, want)
		}
		return err
	}))
}

// linkAddress is the address of the host's end of the namespace's veth.
func linkAddress(t *testing.T, p *testPool, n *Namespace) string {
	t.Helper()
	var out string
	must(t, inside(p.host, func() error {
		l, err := netlink.LinkByName(p.names.link(n.space.id))
		if err != nil {
			return err
		}
		addrs, err := netlink.AddrList(l, netlink.FAMILY_V4)
		if err == nil {
			out = addrs[0].IP.String()
		}
		return err
	}))
	return out
}

func otherEnd(t *testing.T, hostEnd string) string {
	t.Helper()
	return netip.MustParseAddr(hostEnd).Next().String()
}

// TestAllowAllFailure: when the way out cannot be made, the namespace is shut and nothing of it stays on the host.
func TestAllowAllFailure(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, func(c *Config) { c.LinkSubnet = netip.MustParsePrefix("198.18.0.0/30") })
	must(t, inside(p.host, func() error { // the only link network is taken
		return addPair("wan", p.host, netip.MustParseAddr("198.18.0.3"))
	}))
	n, err := p.Acquire(t.Context())
	must(t, err)
	must(t, n.Assign(t.Context(), identity(7)))
	if err := n.Open(t.Context(), core.EgressAllowAll); core.CategoryOf(err) != core.Exhausted {
		t.Errorf("open without a free link network: %v", err)
	}
	if n.current().state != quarantined {
		t.Errorf("the namespace is %s", n.current().state)
	}
	checkTables(t, p)
	must(t, n.Do(func() error { return n.space.verifyLinks() }))
	must(t, n.Assign(t.Context(), identity(7)))
	must(t, n.Open(t.Context(), core.EgressDenyAll))
}

// TestFreeLinkAvoidsWhatIsThere fills a small link network and expects every pair once.
func TestFreeLinkAvoidsWhatIsThere(t *testing.T) {
	t.Parallel()
	needNetns(t)
	subnet := netip.MustParsePrefix("198.18.0.0/28")
	must(t, inside(newTestSpace(t), func() error {
		host, err := netns.Get()
		if err != nil {
			return err
		}
		defer host.Close()
		seen := map[netip.Addr]bool{}
		for i := range 4 {
			at, guest, err := freeLink(subnet, newID())
			if err != nil {
				return err
			}
			if seen[at] || guest != at.Next() || !subnet.Contains(guest) {
				t.Errorf("pick %d is %s", i, at)
			}
			seen[at] = true
			name := "l" + newID()
			if err := addPair(name, host, netip.MustParseAddr("192.0.2.1")); err != nil {
				return err
			}
			if _, err := setUp(name, at); err != nil {
				return err
			}
		}
		if _, _, err := freeLink(subnet, newID()); core.CategoryOf(err) != core.Exhausted {
			t.Errorf("a fifth pair: %v", err)
		}
		return nil
	}))
}
