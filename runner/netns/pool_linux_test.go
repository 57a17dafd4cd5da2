package netns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"strings"
	"sync"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// runPool runs the pool's background work until the test ends.
func runPool(t testing.TB, p *testPool) {
	t.Helper()
	ctx, cancel := context.WithCancel(context.WithoutCancel(t.Context()))
	done := make(chan error, 1)
	go func() { done <- p.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		check(t, <-done)
	})
}

func TestRunKeepsNamespacesWarm(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, func(c *Config) { c.Warm, c.Max = 3, 5 })
	runPool(t, p)
	ctx := patience(t, watchdog)
	must(t, p.await(ctx, func(s Stats) bool { return s.Idle == 3 }))
	if got := p.Stats(); got != (Stats{Idle: 3}) {
		t.Errorf("stats %+v", got)
	}
	var taken []*Namespace
	for range 5 {
		n, err := p.Acquire(ctx)
		must(t, err)
		taken = append(taken, n)
	}
	if got := p.Stats(); got != (Stats{Used: 5}) {
		t.Errorf("stats %+v", got)
	}
	_, err := p.Acquire(ctx)
	if core.CategoryOf(err) != core.Exhausted || core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("one too many: %v", err)
	}
	for _, n := range taken {
		must(t, n.Release(ctx))
	}
	must(t, p.await(ctx, func(s Stats) bool { return s.Idle == 5 }))
	_, err = p.Acquire(contextEnded(t))
	if !errors.Is(err, context.Canceled) {
		t.Errorf("with an ended context: %v", err)
	}
}

func contextEnded(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	return ctx
}

// TestRecycledIsAsNew takes the only namespace of a pool, leaves all kinds of traces in it, and gets the same one
// back without any.
func TestRecycledIsAsNew(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, func(c *Config) { c.Max = 1 })
	ctx := t.Context()
	var name string
	for i, traces := range []func(*testing.T, *Namespace){
		func(*testing.T, *Namespace) {}, // as a sandbox that did nothing
		leaveConnections,
		func(t *testing.T, n *Namespace) {
			t.Helper()
			must(t, n.Do(leaveTraces))
		},
		func(t *testing.T, n *Namespace) { // what a VMM that was taken over can do with its descriptor
			t.Helper()
			f, err := n.TapFile(false)
			must(t, err)
			raw := int(f.Fd())
			must(t, unix.IoctlSetPointerInt(raw, unix.TUNSETVNETHDRSZ, 12))
			must(t, unix.IoctlSetPointerInt(raw, unix.TUNSETSNDBUF, 1))
			must(t, unix.IoctlSetInt(raw, unix.TUNSETPERSIST, 0))
			must(t, f.Close()) // the tap is gone
		},
		func(*testing.T, *Namespace) {},
	} {
		n, err := p.Acquire(ctx)
		must(t, err)
		if i == 0 {
			name = n.Name()
		} else if n.Name() != name {
			t.Fatalf("step %d got %s, not the recycled %s", i, n.Name(), name)
		}
		if _, _, ok := n.Identity(); ok || n.current().state != quarantined {
			t.Errorf("step %d got the plan %s", i, n.current())
		}
		must(t, n.Do(func() error { return n.space.verify(ctx) }))
		must(t, n.Assign(ctx, identity(i+1)))
		must(t, n.Open(ctx, core.EgressDenyAll))
		w := newWire(t, n)
		must(t, w.send(ether(broadcastMAC, macOf(t, "02:00:00:00:00:99"), 0x8035, nil)))
		if got := counters(t, n)[counterDropSpoof]; got != 1 {
			t.Errorf("step %d counts %d spoofed frames, not the one it sent", i, got)
		}
		must(t, w.f.Close())
		traces(t, n)
		must(t, n.Release(ctx))
	}
	if strings.Contains(p.log.String(), "could not be verified") {
		t.Error("a namespace was deleted, not recycled")
	}
}

// leaveConnections leaves a connection open, one half-closed, one in TIME_WAIT and a listener.
func leaveConnections(t *testing.T, n *Namespace) {
	t.Helper()
	_, ip, _ := n.Identity()
	mac, _, _ := n.Identity()
	g := newKernelGuest(t, n, core.Identity{MAC: mac, IP: ip})
	serveEcho(t, g.listen(t, ":80"))
	ctx := patience(t, watchdog)
	for i := range 3 {
		c, err := n.Dial(ctx, "tcp", ":80")
		must(t, err)
		echo(t, c, "hello")
		switch i {
		case 1:
			must(t, c.(interface{ CloseWrite() error }).CloseWrite())
		case 2:
			must(t, c.Close()) // we close first, so the TIME_WAIT is ours
		}
	}
	_, err := n.Listen(ctx, "tcp", ":3128")
	must(t, err)
	_, err = n.Dial(ctx, "udp", ":53")
	must(t, err)
	g.end()
}

// leaveTraces changes whatever root can change in the calling thread's namespace.
func leaveTraces() error {
	tap, err := netlink.LinkByName(TapName)
	if err != nil {
		return err
	}
	_, route, _ := net.ParseCIDR("192.0.2.0/24")
	return errors.Join(
		netlink.AddrAdd(tap, &netlink.Addr{IPNet: ipNet(netip.MustParsePrefix("10.83.9.9/32"))}),
		netlink.LinkSetMTU(tap, 1400),
		netlink.NeighSet(&netlink.Neigh{
			LinkIndex: tap.Attrs().Index, State: netlink.NUD_PERMANENT, Family: netlink.FAMILY_V4,
			IP: net.ParseIP("10.83.3.3"), HardwareAddr: net.HardwareAddr{2, 0, 0, 0, 0, 9},
		}),
		netlink.RouteAdd(&netlink.Route{LinkIndex: tap.Attrs().Index, Dst: route, Scope: netlink.SCOPE_LINK}),
		netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "extra"}, PeerName: "extra-peer"}),
		sysctl{forwardingKey, "1"}.set(),
		sysctl{"ipv4/conf/default/proxy_arp", "1"}.set(),
		withTables(func(c *nftables.Conn) error {
			c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "extra"})
			return c.Flush()
		}))
}

// TestUnverifiableIsDeleted: a namespace that somebody else can still use is never given to the next sandbox.
func TestUnverifiableIsDeleted(t *testing.T) {
	t.Parallel()
	for name, hold := range map[string]func(*testing.T, *Namespace) (letGo func()){
		"a living process": func(t *testing.T, n *Namespace) func() {
			t.Helper()
			cmd := exec.Command("cat")
			stdin, err := cmd.StdinPipe()
			must(t, err)
			must(t, n.Do(cmd.Start))
			return func() {
				check(t, stdin.Close())
				check(t, cmd.Wait())
			}
		},
		"an unbound socket": func(t *testing.T, n *Namespace) func() {
			t.Helper()
			fd := -1
			must(t, n.Do(func() (err error) {
				fd, err = unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
				return err
			}))
			return func() { check(t, unix.Close(fd)) }
		},
		"the sockets of a proxy": func(t *testing.T, n *Namespace) func() {
			t.Helper()
			sockets, err := n.EgressSockets(t.Context())
			must(t, err)
			return func() { check(t, sockets.Close()) }
		},
		"an abstract unix socket": func(t *testing.T, n *Namespace) func() {
			t.Helper()
			var l net.Listener
			must(t, n.Do(func() (err error) {
				l, err = (&net.ListenConfig{}).Listen(t.Context(), "unix", "@left-behind")
				return err
			}))
			return func() { check(t, l.Close()) }
		},
		"a tap descriptor": func(t *testing.T, n *Namespace) func() {
			t.Helper()
			f, err := n.TapFile(false)
			must(t, err)
			return func() { check(t, f.Close()) }
		},
		"a routing rule": func(t *testing.T, n *Namespace) func() {
			t.Helper()
			must(t, n.Do(func() error {
				rule := netlink.NewRule()
				rule.Priority, rule.Table = 5, 100
				return netlink.RuleAdd(rule)
			}))
			return func() {}
		},
		"an interface that came up": func(t *testing.T, n *Namespace) func() {
			t.Helper()
			must(t, n.Do(func() error {
				lo, err := netlink.LinkByName("lo")
				return errors.Join(err, netlink.LinkSetUp(lo))
			}))
			return func() {}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			p := newTestPool(t, func(c *Config) { c.Max = 1 })
			n := acquireOpen(t, p, identity(1), core.EgressDenyAll)
			letGo := hold(t, n)
			defer letGo()
			must(t, n.Release(t.Context()))
			next, err := p.Acquire(t.Context())
			must(t, err)
			if next.Name() == n.Name() {
				t.Fatal("it was recycled")
			}
			if _, err := os.Stat(n.Path()); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("its name is still there: %v", err)
			}
			if !strings.Contains(p.log.String(), "could not be verified") {
				t.Error("the log does not say so")
			}
		})
	}
}

// TestReleasedIsUnusable: nothing of a released handle works, so nobody reaches the next sandbox through it.
func TestReleasedIsUnusable(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, func(c *Config) { c.Max = 1 })
	n := acquireOpen(t, p, identity(1), core.EgressDenyAll)
	must(t, n.Release(t.Context()))
	next := acquireOpen(t, p, identity(2), core.EgressDenyAll)
	if next.Name() != n.Name() {
		t.Fatalf("%s was not recycled but %s made", n.Name(), next.Name())
	}
	ctx := t.Context()
	_, tapErr := n.TapFile(false)
	_, dialErr := n.Dial(ctx, "tcp", "10.83.1.2:80")
	_, listenErr := n.Listen(ctx, "tcp", ":1")
	_, countErr := n.Counters(ctx)
	for what, err := range map[string]error{
		"Assign": n.Assign(ctx, identity(3)), "Open": n.Open(ctx, core.EgressDenyAll), "Shut": n.Shut(ctx),
		"Do": n.Do(func() error { return nil }), "TapFile": tapErr, "Dial": dialErr, "Listen": listenErr, "Counters": countErr,
	} {
		if core.CategoryOf(err) != core.FailedPrecondition && core.CategoryOf(err) != core.Invalid {
			t.Errorf("%s after Release: %v", what, err)
		}
	}
	must(t, n.Release(ctx)) // again: nothing happens
	if _, ip, _ := next.Identity(); ip != identity(2).IP {
		t.Errorf("the next sandbox has the address %s", ip)
	}
	if got := p.Stats(); got != (Stats{Used: 1}) {
		t.Errorf("stats %+v", got)
	}
}

func TestStatesAndInput(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	ctx := t.Context()
	n, err := p.Acquire(ctx)
	must(t, err)
	if err := n.Open(ctx, core.EgressDenyAll); core.CategoryOf(err) != core.FailedPrecondition {
		t.Errorf("open without an identity: %v", err)
	}
	good := identity(7)
	for _, bad := range []core.Identity{
		{MAC: "", IP: good.IP},
		{MAC: "01:00:00:00:00:01", IP: good.IP},
		{MAC: "00:00:00:00:00:00", IP: good.IP},
		{MAC: GatewayMAC, IP: good.IP},
		{MAC: "02:fc:00:00:00:00:00:01", IP: good.IP},
		{MAC: good.MAC},
		{MAC: good.MAC, IP: netip.MustParseAddr(DefaultGateway)},
		{MAC: good.MAC, IP: netip.MustParseAddr("10.83.0.0")},
		{MAC: good.MAC, IP: netip.MustParseAddr("10.83.255.255")},
		{MAC: good.MAC, IP: netip.MustParseAddr("10.84.0.1")},
		{MAC: good.MAC, IP: netip.MustParseAddr("::ffff:10.83.1.7")},
	} {
		if err := n.Assign(ctx, bad); core.CategoryOf(err) != core.Invalid {
			t.Errorf("assign %+v: %v", bad, err)
		}
	}
	must(t, n.Assign(ctx, identity(6)))
	must(t, n.Assign(ctx, good))
	if err := n.Open(ctx, "allow-some"); core.CategoryOf(err) != core.Invalid {
		t.Errorf("open with an unknown policy: %v", err)
	}
	must(t, n.Open(ctx, core.EgressDenyAll))
	must(t, n.Open(ctx, core.EgressDenyAll))
	if err := n.Open(ctx, core.EgressAllowAll); core.CategoryOf(err) != core.FailedPrecondition {
		t.Errorf("open again with another policy: %v", err)
	}
	if err := n.Assign(ctx, identity(8)); core.CategoryOf(err) != core.FailedPrecondition {
		t.Errorf("assign while open: %v", err)
	}
	if err := n.Shut(contextEnded(t)); !errors.Is(err, context.Canceled) {
		t.Errorf("shut with an ended context: %v", err)
	}
	first, err := n.TapFile(false)
	must(t, err)
	if _, err := n.TapFile(false); core.CategoryOf(err) != core.FailedPrecondition {
		t.Errorf("a second tap descriptor: %v", err)
	}
	must(t, first.Close())
	again, err := n.TapFile(false)
	must(t, err)
	must(t, again.Close())
}

func TestConfigFaultsAreReportedAtOnce(t *testing.T) {
	t.Parallel()
	_, err := NewPool(Config{
		Warm: 3, Max: 2,
		Subnet: netip.MustParsePrefix("10.1.2.3/16"), Gateway: netip.MustParseAddr("10.2.0.1"),
		LinkSubnet: netip.MustParsePrefix("10.1.0.0/31"),
	})
	for _, want := range []string{"cluster id", "log", "warm 3", "subnet 10.1.2.3/16", "gateway 10.2.0.1", "link subnet"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("the error does not mention %q: %v", want, err)
		}
	}
}

// TestThirtyTwoAtOnce lives 32 sandboxes' lives at once, several rounds, and never hands one namespace to two.
func TestThirtyTwoAtOnce(t *testing.T) {
	t.Parallel()
	const workers, rounds = 32, 4
	p := newTestPool(t, func(c *Config) { c.Warm, c.Max = 8, 24 }) // fewer than workers, so that some wait for a reset
	runPool(t, p)
	var mu sync.Mutex
	held := map[string]int{}
	var all sync.WaitGroup
	ctx := patience(t, watchdog)
	for w := range workers {
		all.Go(func() {
			for r := range rounds {
				if err := liveOnce(ctx, p, w*rounds+r, &mu, held); err != nil {
					t.Error(err)
					return
				}
			}
		})
	}
	all.Wait()
	must(t, p.await(ctx, func(s Stats) bool { return s.Busy == 0 && s.Dirty == 0 }))
	if got := p.Stats(); got.Used != 0 || got.Idle > 24 {
		t.Errorf("stats %+v", got)
	}
}

func liveOnce(ctx context.Context, p *testPool, i int, mu *sync.Mutex, held map[string]int) error {
	var n *Namespace
	for {
		var err error
		if n, err = p.Acquire(ctx); err == nil {
			break
		}
		if core.CategoryOf(err) != core.Exhausted {
			return err
		}
		if err := p.await(ctx, func(s Stats) bool { return s.Idle > 0 || s.Dirty > 0 || s.total() < p.cfg.Max }); err != nil {
			return err
		}
	}
	mu.Lock()
	held[n.Name()]++
	twice := held[n.Name()] > 1
	mu.Unlock()
	if twice {
		return fmt.Errorf("%s is held twice", n.Name())
	}
	id := identity(i + 1)
	if err := errors.Join(n.Assign(ctx, id), n.Open(ctx, core.EgressDenyAll)); err != nil {
		return err
	}
	if _, ip, ok := n.Identity(); !ok || ip != id.IP {
		return fmt.Errorf("%s has the address %s, not %s", n.Name(), ip, id.IP)
	}
	mu.Lock()
	held[n.Name()]--
	mu.Unlock()
	return n.Release(ctx)
}

// TestOneNamespaceManyCallers uses one namespace from many goroutines at once, through several of its lives.
func TestOneNamespaceManyCallers(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	ctx := patience(t, watchdog)
	n, err := p.Acquire(ctx)
	must(t, err)
	var all sync.WaitGroup
	done := make(chan struct{})
	busy := func(fn func() error) {
		all.Go(func() {
			for {
				select {
				case <-done:
					return
				default:
				}
				// Whether it succeeds depends on the state it meets; that it ends, and races with nothing, is the test.
				if err := fn(); core.CategoryOf(err) == core.TimedOut {
					t.Error(err)
					return
				}
			}
		})
	}
	for range 2 {
		busy(func() error { _, err := n.Counters(ctx); return err })
		busy(func() error { return n.Do(func() error { return nil }) })
		busy(func() error {
			l, err := n.Listen(ctx, "tcp", ":0")
			if err != nil {
				return err
			}
			return l.Close()
		})
		busy(func() error {
			c, err := n.Dial(ctx, "udp", ":9")
			if err != nil {
				return err
			}
			return c.Close()
		})
		busy(func() error { _, _, _ = n.Identity(); _, _ = n.IsOpen(); return nil })
	}
	for i := range 20 {
		must(t, n.Assign(ctx, identity(i+1)))
		must(t, n.Open(ctx, core.EgressDenyAll))
		must(t, n.Shut(ctx))
	}
	must(t, n.Release(ctx))
	close(done)
	all.Wait()
}

// TestThreadsComeHome: after a thousand visits every new goroutine is where it was, and so is the process as others
// see it.
func TestThreadsComeHome(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	n, err := p.Acquire(t.Context())
	must(t, err)
	home, err := os.Readlink("/proc/self/ns/net")
	must(t, err)
	var all sync.WaitGroup
	for w := range 8 {
		all.Go(func() {
			for i := range 125 {
				err := n.Do(func() error {
					if here, err := os.Readlink("/proc/thread-self/ns/net"); err != nil || here == home {
						return fmt.Errorf("inside is %s: %w", here, err)
					}
					return nil
				})
				if err != nil {
					t.Errorf("visit %d of %d: %v", i, w, err)
					return
				}
			}
		})
	}
	all.Wait()
	for range 200 {
		all.Go(func() {
			for _, who := range []string{"thread-self", "self"} {
				if here, err := os.Readlink("/proc/" + who + "/ns/net"); err != nil || here != home {
					t.Errorf("%s runs in %s: %v", who, here, err)
				}
			}
		})
	}
	all.Wait()
}
