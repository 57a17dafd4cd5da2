package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"

	"github.com/coppice-dev/coppice/core"
)

// Adopt re-opens a namespace that a living VMM uses, after a restart of the runner. Its state, identity and policy
// come from the rules in the kernel, and each is compared with what it should be; if anything differs it
// fails, and the caller ends the VMM and leaves the namespace to Reconcile. An Open or Shut that the restart cut
// short is completed. Listeners did not survive, so their ports are closed: the caller calls Listen again.
func (p *Pool) Adopt(ctx context.Context, name string) (*Namespace, error) {
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	p.births.RLock()
	defer p.births.RUnlock()
	if p.owns(name) {
		return nil, core.Errorf(core.Conflict, core.CodeStateConflict, "network namespace %s is already in use by this runner", name)
	}
	s, err := openSpace(p.names, name, &p.cfg)
	if err != nil {
		return nil, fmt.Errorf("adopt: %w", err)
	}
	n := newNamespace(p, s, s.bare())
	if err := n.recover(); err != nil {
		return nil, errors.Join(fmt.Errorf("adopt %s: %w", name, err), s.close())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.used[name] = n
	p.notifyLocked()
	return n, nil
}

// recover finds out what the kernel holds and makes it whole.
func (n *Namespace) recover() error {
	if err := n.space.inside(checkTap); err != nil {
		return err
	}
	if err := n.space.tables(func(c *nftables.Conn) (err error) {
		n.plan, err = planIn(c, n.space.bare())
		return err
	}); err != nil {
		return err
	}
	if now := n.plan; len(now.services) > 0 || now.rate != n.space.cfg.Rate || now.names != now.forwards() {
		now.services, now.rate, now.names = nil, n.space.cfg.Rate, now.forwards()
		if err := n.apply(now); err != nil {
			return err
		}
	}
	finish := tapDown
	if n.plan.state == opened {
		finish = func() error { return makeReachable(n.plan) }
	}
	if err := n.space.inside(finish); err != nil {
		return err
	}
	if n.plan.forwards() {
		n.uplink = true
		return n.pool.checkUplink(n.space)
	}
	return n.pool.removeUplink(n.space)
}

// checkTap checks that the calling thread's namespace has its tap.
func checkTap() error {
	l, err := netlink.LinkByName(TapName)
	if err != nil {
		return fmt.Errorf("find %s: %w", TapName, err)
	}
	if l.Attrs().HardwareAddr.String() != GatewayMAC {
		return fmt.Errorf("%s has the address %s", TapName, l.Attrs().HardwareAddr)
	}
	return nil
}

func (p *Pool) owns(name string) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.ownsLocked(name)
}

// ownsLocked reports whether the pool counts the namespace among its own.
func (p *Pool) ownsLocked(name string) bool {
	if p.busy[name] || p.used[name] != nil {
		return true
	}
	for _, s := range p.idle {
		if s.name == name {
			return true
		}
	}
	for _, s := range p.dirty {
		if s.name == name {
			return true
		}
	}
	return false
}

// Reconcile deletes every namespace, veth and host table that carries this cluster's hash and is neither kept (by
// namespace name) nor this pool's own, and only those: what an earlier process left behind. It goes on after errors
// and returns them all. End the VMMs first: a namespace that still holds one is cut off and forgotten, but the
// kernel keeps it for as long as the VMM lives.
func (p *Pool) Reconcile(ctx context.Context, keep map[string]bool) error {
	if err := ctx.Err(); err != nil {
		return context.Cause(ctx)
	}
	p.births.Lock() // nothing shows on the host that the pool does not count
	defer p.births.Unlock()
	doomed := func(name string) bool { return !keep[name] && !p.owns(name) }
	errs := []error{p.onHost(func() error {
		return p.removeHostTraces(func(id string) bool { return doomed(p.names.namespace(id)) })
	})}
	entries, err := os.ReadDir(runDir)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		errs = append(errs, fmt.Errorf("list namespaces: %w", err))
	}
	for _, e := range entries {
		if _, ours := p.names.namespaceID(e.Name()); !ours || !doomed(e.Name()) {
			continue
		}
		err := p.discard(e.Name())
		errs = append(errs, err)
		p.cfg.Log.InfoContext(ctx, "stray network namespace deleted", "namespace", e.Name(), "clean", err == nil)
	}
	return errors.Join(errs...)
}

// discard deletes a namespace, or what is left of one whose making was cut short.
func (p *Pool) discard(name string) error {
	s, err := openSpace(p.names, name, &p.cfg)
	if err != nil {
		return removeName(name) // a file on which nothing was mounted yet
	}
	return errors.Join(s.sever(), s.remove())
}
