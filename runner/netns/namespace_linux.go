package netns

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"sync"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// Namespace is the network namespace of one sandbox, from Acquire or Adopt to Release. It is safe for concurrent
// use. After Release every method fails, so that nobody reaches the next sandbox through it.
type Namespace struct {
	pool  *Pool
	space *space

	op     sync.Mutex // one change at a time; held across netlink calls, which is what it is for
	uplink bool       // guarded by op: allow-all has left, or may have left, something on the host

	mu       sync.RWMutex // guards what follows; read-held while a thread is inside, so that Release waits for it
	plan     plan         // what the rules in the kernel say
	released bool
	sockets  map[io.Closer]struct{} // handed out by Dial and Listen and not closed yet
}

func newNamespace(p *Pool, s *space, with plan) *Namespace {
	return &Namespace{pool: p, space: s, plan: with, sockets: map[io.Closer]struct{}{}}
}

// Name is the namespace's name, as ip-netns(8) and [Pool.Adopt] know it.
func (n *Namespace) Name() string { return n.space.name }

// Path is the file that the namespace is mounted on.
func (n *Namespace) Path() string { return pathOf(n.space.name) }

// FD is a descriptor of the namespace for setns(2), valid until Release. To start a process inside, prefer
// n.Do(cmd.Start): a child begins in the namespace of the thread that starts it. (SysProcAttr.Pdeathsig is of no use
// then: it fires when that thread ends, not the process.)
func (n *Namespace) FD() int { return int(n.space.fd) }

// errReleased is what every method returns after Release.
func (n *Namespace) errReleased() error {
	return core.Errorf(core.FailedPrecondition, core.CodeStateConflict, "network namespace %s has been released", n.space.name)
}

// Do runs fn on a thread inside the namespace and returns its error. Sockets that fn opens and processes that it
// starts stay in the namespace; goroutines that it starts are not in it. fn should not block, because Release waits
// for it, and must not call other methods of the namespace.
func (n *Namespace) Do(fn func() error) error {
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.released {
		return n.errReleased()
	}
	return n.space.inside(fn)
}

// TapFile attaches to the tap and returns the queue's descriptor for the VMM, non-blocking and close-on-exec
// (os/exec clears that in ExtraFiles). One descriptor can be attached at a time; another attempt fails until it and
// its copies are closed. Frames carry a virtio_net_hdr whose size the VMM sets (10 bytes until then).
//
// The tap is down until Open, so that no frame of a quarantined guest even reaches the rules. With up, it is up at once, for a VMM that
// fails when the tap refuses frames: then the rules, which are read back first, drop all frames.
func (n *Namespace) TapFile(up bool) (*os.File, error) {
	fd := -1
	err := n.Do(func() (err error) {
		fd, err = openTap()
		return err
	})
	if err == nil && up {
		if err = n.raise(); err != nil {
			err = errors.Join(err, unix.Close(fd))
		}
	}
	if errors.Is(err, unix.EBUSY) {
		return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeStateConflict, "the tap of %s is already attached", n.space.name)
	}
	if err != nil {
		return nil, fmt.Errorf("tap of %s: %w", n.space.name, err)
	}
	return os.NewFile(uintptr(fd), TapName), nil
}

// raise brings up the tap of a namespace whose rules are in force.
func (n *Namespace) raise() error {
	n.op.Lock()
	defer n.op.Unlock()
	if err := n.space.tables(func(c *nftables.Conn) error { return compareAll(c, rulesFor(n.current())) }); err != nil {
		return err
	}
	return n.Do(func() error {
		_, err := tapUp()
		return err
	})
}

// Assign pins the guest's MAC and IP. The namespace stays closed: tap as it was, every chain dropping. It is legal while
// quarantined or assigned; a new assignment replaces the one before.
func (n *Namespace) Assign(ctx context.Context, id core.Identity) error {
	mac, err := parseMAC(id.MAC)
	if err != nil {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "identity.mac: %v", err)
	}
	if cfg := n.pool.cfg; !usable(cfg.Subnet, id.IP) || id.IP == cfg.Gateway {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "identity.ip %s is not a guest address of %s", id.IP, cfg.Subnet)
	}
	return n.change(ctx, "assign", func(was plan) error {
		if was.state == opened {
			return core.Errorf(core.FailedPrecondition, core.CodeStateConflict, "network namespace %s is open; shut it before it gets another identity", n.space.name)
		}
		next := was
		next.state, next.mac, next.ip = assigned, mac, id.IP
		return n.apply(next)
	})
}

// Open lets the guest talk, as far as policy goes: rules first, then the tap comes up. It is legal after Assign, and
// again with the same policy. If it fails, the namespace is shut.
//
// core.EgressProxied sends what the guest sends over TCP, to wherever, to the sockets of [Namespace.EgressSockets]; while nobody
// accepts there, it is refused. Metadata and other special destinations are dropped all the same.
//
// core.EgressAllowAll gives the namespace a veth pair to the host, which masquerades what comes from it. Metadata,
// private and host addresses stay out of reach, so that the guest asks the resolver's sockets of [Namespace.EgressSockets] for names. The host's net.ipv4.ip_forward is switched on, and stays on. A
// table of somebody else's that drops forwarded packets still drops them; that is reported, not worked around.
func (n *Namespace) Open(ctx context.Context, policy core.EgressPolicy) error {
	if policy != core.EgressDenyAll && policy != core.EgressProxied && policy != core.EgressAllowAll {
		return unsupportedPolicy(policy)
	}
	return n.change(ctx, "open", func(was plan) error {
		switch {
		case was.state == opened && was.policy == policy:
			return nil
		case was.state != assigned:
			return core.Errorf(core.FailedPrecondition, core.CodeStateConflict, "network namespace %s is %s and cannot be opened with %s", n.space.name, was.state, policy)
		}
		next := was
		next.state, next.policy, next.names = opened, policy, policy == core.EgressAllowAll
		if err := n.open(ctx, next); err != nil {
			return errors.Join(err, n.shut())
		}
		return nil
	})
}

// Shut puts the namespace back into quarantine: tap down, identity forgotten, connections and sockets ended, the
// veth of allow-all gone. It is legal in every state.
func (n *Namespace) Shut(ctx context.Context) error {
	return n.change(ctx, "shut", func(plan) error { return n.shut() })
}

// Release ends the use of the namespace and gives it to the pool for reset. When it returns, the tap is down and
// every socket from Dial and Listen is closed. The VMM must have ended before; if it is found alive, or anything
// else is not as new after the reset, the namespace is deleted instead of reused. A second Release does nothing.
func (n *Namespace) Release(ctx context.Context) error {
	n.op.Lock()
	defer n.op.Unlock()
	if n.isReleased() {
		return nil
	}
	err := n.shut() // whatever fails here is put right by the reset, or found by its verification
	n.mu.Lock()
	n.released = true
	n.mu.Unlock()
	n.closeSockets() // one may have been opened meanwhile
	if err != nil {
		n.pool.cfg.Log.WarnContext(ctx, "network namespace was not shut cleanly at its release", "namespace", n.space.name, "err", err)
	}
	return n.pool.giveBack(n)
}

// Counters returns the packets that each named counter has seen since Acquire; the names are in rules.go.
func (n *Namespace) Counters(ctx context.Context) (map[string]uint64, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	var out map[string]uint64
	n.mu.RLock()
	defer n.mu.RUnlock()
	if n.released {
		return nil, n.errReleased()
	}
	err := n.space.tables(func(c *nftables.Conn) (err error) {
		out, err = countersIn(c, rulesFor(n.plan))
		return err
	})
	return out, wrapIf(err, "counters of "+n.space.name)
}

// change runs one change of state.
func (n *Namespace) change(ctx context.Context, doing string, fn func(was plan) error) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	n.op.Lock()
	defer n.op.Unlock()
	if n.isReleased() {
		return n.errReleased()
	}
	return wrapIf(fn(n.current()), doing+" "+n.space.name)
}

func (n *Namespace) isReleased() bool {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.released
}

// current returns the plan in force.
func (n *Namespace) current() plan {
	n.mu.RLock()
	defer n.mu.RUnlock()
	return n.plan
}

// apply replaces the rules in the kernel and reads them back. op is held.
func (n *Namespace) apply(next plan) error {
	before, after := rulesFor(n.current()), rulesFor(next)
	if err := n.space.tables(func(c *nftables.Conn) error { return replaceRules(c, before, after) }); err != nil {
		return err
	}
	n.mu.Lock()
	n.plan = next
	n.mu.Unlock()
	return n.space.tables(func(c *nftables.Conn) error { return compareAll(c, after) })
}

func (n *Namespace) open(ctx context.Context, next plan) error {
	if next.forwards() {
		n.uplink = true
		if err := n.pool.addUplink(ctx, n.space); err != nil {
			return fmt.Errorf("allow-all: %w", err)
		}
	}
	if err := n.apply(next); err != nil {
		return err
	}
	return n.space.inside(func() error { return makeReachable(next) })
}

// makeReachable brings the tap of the calling thread's namespace up and makes the guest reachable. Its neighbour entry is
// permanent: no ARP of the guest can change it and none is asked for. Repeating it changes nothing.
func makeReachable(p plan) error {
	tap, err := tapUp()
	if err != nil {
		return err
	}
	index := tap.Attrs().Index
	if err := netlink.NeighSet(&netlink.Neigh{
		LinkIndex: index, Family: netlink.FAMILY_V4, State: netlink.NUD_PERMANENT,
		IP: p.ip.AsSlice(), HardwareAddr: p.mac,
	}); err != nil {
		return fmt.Errorf("add neighbour %s: %w", p.ip, err)
	}
	if err := netlink.RouteReplace(&netlink.Route{
		LinkIndex: index, Dst: ipNet(single(p.ip)), Scope: netlink.SCOPE_LINK, Src: p.gateway.AsSlice(),
	}); err != nil {
		return fmt.Errorf("add route to %s: %w", p.ip, err)
	}
	return nil
}

// shut closes the namespace, going on after errors. Setting the tap down also removes routes and neighbours.
func (n *Namespace) shut() error {
	err := errors.Join(n.space.inside(tapDown), n.apply(n.space.bare()))
	n.closeSockets() // after the rules: what it sends as a farewell reaches nobody
	err = errors.Join(err, n.space.inside(n.space.flushConnections))
	if n.uplink {
		gone := n.pool.removeUplink(n.space)
		n.uplink = gone != nil
		err = errors.Join(err, gone)
	}
	return err
}

// tapUp brings up the tap of the calling thread's namespace.
func tapUp() (netlink.Link, error) {
	tap, err := netlink.LinkByName(TapName)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", TapName, err)
	}
	return tap, wrapIf(netlink.LinkSetUp(tap), "set "+TapName+" up")
}

// tapDown cuts the guest off in the calling thread's namespace.
func tapDown() error {
	tap, err := netlink.LinkByName(TapName)
	if err != nil {
		return fmt.Errorf("find %s: %w", TapName, err)
	}
	return wrapIf(netlink.LinkSetDown(tap), "set "+TapName+" down")
}

// Identity of the guest as the rules pin it; ok is false while there is none. After Adopt it tells what the living
// VMM's guest was given.
func (n *Namespace) Identity() (mac string, ip netip.Addr, ok bool) {
	p := n.current()
	return p.mac.String(), p.ip, p.state != quarantined
}

// IsOpen reports whether the guest may talk, and under which policy.
func (n *Namespace) IsOpen() (core.EgressPolicy, bool) {
	p := n.current()
	return p.policy, p.state == opened
}
