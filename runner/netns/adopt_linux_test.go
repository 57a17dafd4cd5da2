package netns

import (
	"context"
	"errors"
	"net/netip"
	"os"
	"slices"
	"testing"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/coppice-dev/coppice/core"
)

// restart returns a second pool of the same cluster on the same host, as the next process of the runner would make
// it. The first one is forgotten, not closed.
func restart(t *testing.T, p *testPool) *testPool {
	t.Helper()
	next := openTestPool(t, p.host, p.cfg.ClusterID, nil)
	next.checkCleanAtEnd(t)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used = map[string]*Namespace{}
	return next
}

// TestAdopt: the next process finds state, identity and policy of a namespace that a living VMM uses, and everything
// works on: its guest is pinned as before, a forwarded port can be dialled, a listener opened.
func TestAdopt(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	id := identity(7)
	open := acquireOpen(t, p, id, core.EgressDenyAll)
	_, err := open.Listen(t.Context(), "tcp", ":3128")
	must(t, err)
	g := newKernelGuest(t, open, id)
	serveEcho(t, g.listen(t, ":8080"))
	half, err := p.Acquire(t.Context())
	must(t, err)
	must(t, half.Assign(t.Context(), identity(8)))
	bare, err := p.Acquire(t.Context())
	must(t, err)
	out := acquireOpen(t, p, identity(9), core.EgressAllowAll)

	next := restart(t, p)
	n, err := next.Adopt(t.Context(), open.Name())
	must(t, err)
	if mac, ip, ok := n.Identity(); !ok || mac != id.MAC || ip != id.IP {
		t.Errorf("adopted the identity %s %s %v", mac, ip, ok)
	}
	if policy, isOpen := n.IsOpen(); !isOpen || policy != core.EgressDenyAll {
		t.Errorf("adopted %q, %v", policy, isOpen)
	}
	if got := n.current().services; len(got) != 0 {
		t.Errorf("the passages of the process before are still open: %v", got)
	}
	c, err := n.Dial(patience(t, watchdog), "tcp", ":8080")
	must(t, err)
	echo(t, c, "after the restart")
	l, err := n.Listen(t.Context(), "tcp", ":3129")
	must(t, err)
	serveEcho(t, l)
	back, err := g.dial(patience(t, watchdog), l.Addr().String())
	must(t, err)
	echo(t, back, "and back")
	must(t, back.Close())
	if _, err := next.Adopt(t.Context(), open.Name()); core.CategoryOf(err) != core.Conflict {
		t.Errorf("adopting twice: %v", err)
	}

	h, err := next.Adopt(t.Context(), half.Name())
	must(t, err)
	if _, ip, ok := h.Identity(); !ok || ip != identity(8).IP || h.current().state != assigned {
		t.Errorf("adopted %s", h.current())
	}
	must(t, h.Open(t.Context(), core.EgressDenyAll))
	b, err := next.Adopt(t.Context(), bare.Name())
	must(t, err)
	must(t, b.Assign(t.Context(), identity(10)))
	o, err := next.Adopt(t.Context(), out.Name())
	must(t, err)
	must(t, o.Release(t.Context()))
	checkTables(t, next)

	must(t, next.Reconcile(t.Context(), nil)) // its own are kept without being named
	if got := next.Stats(); got != (Stats{Used: 3, Dirty: 1}) {
		t.Errorf("stats %+v", got)
	}
	echo(t, c, "still there")
	g.end()
}

// TestAdoptCompletesWhatWasCutShort: a runner killed in the middle of Open or Shut leaves a state that the next one
// finishes in the safe direction: what the rules call open is opened, anything else is closed.
func TestAdoptCompletesWhatWasCutShort(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	id := identity(7)
	opening, w := acquireWired(t, p, id)
	must(t, opening.Do(tapDown)) // as if killed between rules and tap
	shutting, err := p.Acquire(t.Context())
	must(t, err)
	must(t, shutting.Do(func() error {
		tap, err := netlink.LinkByName(TapName)
		return errors.Join(err, netlink.LinkSetUp(tap))
	}))
	leaving := acquireOpen(t, p, identity(8), core.EgressAllowAll)
	must(t, leaving.space.inside(func() error { return leaving.apply(leaving.space.bare()) })) // veth and table still there

	next := restart(t, p)
	n, err := next.Adopt(t.Context(), opening.Name())
	must(t, err)
	mac := macOf(t, id.MAC)
	must(t, w.send(ether(broadcastMAC, mac, 0x0806, arp(1, mac, id.IP, nil6, p.cfg.Gateway))))
	if w.pending(t) == nil {
		t.Error("the adopted namespace is not open")
	}
	checkNeighbour(t, n, id)
	must(t, w.f.Close())
	s, err := next.Adopt(t.Context(), shutting.Name())
	must(t, err)
	must(t, s.Do(func() error { return s.space.verifyLinks() }))
	_, err = next.Adopt(t.Context(), leaving.Name())
	must(t, err)
	checkTables(t, next)
}

// TestAdoptRefuses what is not exactly what it should be; Reconcile then removes it.
func TestAdoptRefuses(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	names := map[string]string{}
	for what, spoil := range map[string]func() error{
		"an extra rule": func() error {
			return withTables(func(c *nftables.Conn) error {
				rs := rulesFor(testPlan(opened, core.EgressDenyAll))
				t := rs[1].kernel()
				c.InsertRule(rule{verdict: accept}.kernel(familyInet, t, rs[1].chains[0].kernel(t)))
				return c.Flush()
			})
		},
		"an extra table": func() error {
			return withTables(func(c *nftables.Conn) error {
				c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "extra"})
				return c.Flush()
			})
		},
		"no rules": func() error {
			return withTables(func(c *nftables.Conn) error {
				c.FlushRuleset()
				return c.Flush()
			})
		},
		"no tap": removeLinks,
	} {
		n := acquireOpen(t, p, identity(7), core.EgressDenyAll)
		must(t, n.Do(spoil))
		names[what] = n.Name()
	}
	gone := acquireOpen(t, p, identity(8), core.EgressAllowAll)
	must(t, inside(p.host, func() error {
		l, err := netlink.LinkByName(p.names.link(gone.space.id))
		return errors.Join(err, netlink.LinkDel(l))
	}))
	names["no link"] = gone.Name()
	names["a name that does not exist"] = p.names.namespace("zzzzz")
	names["another cluster's name"] = namesOf("other").namespace("zzzzz")
	names["a path"] = "../" + names["no tap"]

	next := restart(t, p)
	for what, name := range names {
		if n, err := next.Adopt(t.Context(), name); err == nil {
			t.Errorf("%s: adopted %s", what, n.Name())
		}
	}
	must(t, next.Reconcile(t.Context(), nil))
	if left := tracesOf(t, p.names, p.host); len(left) != 0 {
		t.Errorf("Reconcile left %v", left)
	}
}

// TestReconcileKeepsWhatIsListed: it keeps the namespaces that it is given and removes the rest, half-made things included.
func TestReconcileKeepsWhatIsListed(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	kept := acquireOpen(t, p, identity(7), core.EgressAllowAll)
	acquireOpen(t, p, identity(8), core.EgressAllowAll)
	must(t, os.WriteFile(pathOf(p.names.namespace("half2")), nil, 0o400)) // killed before the mount
	odd := pathOf(p.names.namespace("") + "not-an-id")                    // looks like ours but is not
	must(t, os.WriteFile(odd, nil, 0o400))
	t.Cleanup(func() { check(t, os.Remove(odd)) })

	next := openTestPool(t, p.host, p.cfg.ClusterID, nil)
	must(t, next.Reconcile(t.Context(), map[string]bool{kept.Name(): true}))
	got := tracesOf(t, p.names, p.host)
	if len(got) != 5 || !slices.Contains(got, "link "+p.names.link(kept.space.id)) { // file, mount, link, table; the odd one
		t.Errorf("left %v", got)
	}
	must(t, p.checkUplink(kept.space))
	must(t, os.Remove(odd))
	must(t, os.WriteFile(odd, nil, 0o400))
}

// TestReconcileWhileWorking never takes a namespace from a pool that is making, using and resetting them.
func TestReconcileWhileWorking(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, func(c *Config) { c.Warm, c.Max = 2, 4 })
	runPool(t, p)
	ctx, cancel := context.WithCancel(patience(t, watchdog))
	done := make(chan error, 1)
	go func() {
		for ctx.Err() == nil {
			if err := p.Reconcile(ctx, nil); err != nil && ctx.Err() == nil {
				done <- err
				return
			}
		}
		done <- nil
	}()
	for i := range 10 {
		n := acquireOpen(t, p, identity(i+1), core.EgressDenyAll)
		if _, err := os.Stat(n.Path()); err != nil {
			t.Error(err)
		}
		must(t, n.Release(t.Context()))
	}
	cancel()
	must(t, <-done)
}

// TestCloseLeavesTheUsed: what a VMM uses survives the pool; what is released afterwards goes at once.
func TestCloseLeavesTheUsed(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, func(c *Config) { c.Warm = 2 })
	runCtx, stop := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- p.Run(runCtx) }()
	must(t, p.await(patience(t, watchdog), func(s Stats) bool { return s.Idle == 2 }))
	n := acquireOpen(t, p, identity(7), core.EgressDenyAll)
	stop()
	must(t, <-ran)
	must(t, p.Close(t.Context()))
	if got := tracesOf(t, p.names, p.host); len(got) != 2 { // its file and mount
		t.Errorf("after Close there are %v", got)
	}
	if _, err := p.Acquire(t.Context()); core.CategoryOf(err) != core.Unavailable {
		t.Errorf("acquire after Close: %v", err)
	}
	if _, ip, ok := n.Identity(); !ok || ip != netip.AddrFrom4([4]byte{10, 83, 1, 7}) {
		t.Errorf("the used one has lost its identity: %s", ip)
	}
	must(t, n.Release(t.Context()))
	if got := tracesOf(t, p.names, p.host); len(got) != 0 {
		t.Errorf("after Release there are %v", got)
	}
}

// TestAdoptGivesNames: a guest of a runner that did not yet answer its questions for names may ask them after the next one has come.
func TestAdoptGivesNames(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	old := acquireOpen(t, p, identity(7), core.EgressAllowAll)
	was := old.current()
	was.names = false
	must(t, old.apply(was))
	next := restart(t, p)
	n, err := next.Adopt(t.Context(), old.Name())
	must(t, err)
	if now := n.current(); !now.names || now.policy != core.EgressAllowAll {
		t.Errorf("the plan is %s", now)
	}
	must(t, n.Check(t.Context()))
	must(t, n.Release(t.Context()))
}
