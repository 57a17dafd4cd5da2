package netns

import (
	"context"
	"errors"
	"fmt"

	"github.com/google/nftables"
)

// Check compares the rules in the kernel with those that were applied, and what allow-all has on the host. Nobody but this package changes
// them, so where they differ, or cannot be read, the guest is cut off, and the error is ErrRulesDiffer: all rules are replaced, in one batch, by
// those of a namespace that has an identity and is not open, which is read back; when that fails, the tap is down. [Namespace.Open] opens it again.
func (n *Namespace) Check(ctx context.Context) error {
	return n.change(ctx, "check", func(was plan) error {
		differ := n.compare(was)
		if differ != nil { // once more: the kernel may have been too busy to answer
			differ = n.compare(was)
		}
		if differ == nil {
			return nil
		}
		return errors.Join(fmt.Errorf("%w: %w", ErrRulesDiffer, differ), n.cut(was))
	})
}

// compare reports the first difference. op is held.
func (n *Namespace) compare(now plan) error {
	err := n.space.tables(func(c *nftables.Conn) error { return compareAll(c, rulesFor(now)) })
	if err == nil && now.forwards() {
		err = n.pool.checkUplink(n.space)
	}
	return err
}

// cut closes the namespace, whatever is in the kernel, going on after errors. The tap stays as it was: a VMM may not live with one that refuses
// its frames. op is held.
func (n *Namespace) cut(was plan) error {
	next := was
	if next.state == opened {
		next.state, next.policy = assigned, ""
	}
	next.services = nil
	err := n.replace(next)
	if err != nil {
		err = errors.Join(err, n.space.inside(tapDown))
	}
	n.closeSockets()
	err = errors.Join(err, n.space.inside(n.space.flushConnections))
	if n.uplink {
		gone := n.pool.removeUplink(n.space)
		n.uplink = gone != nil
		err = errors.Join(err, gone)
	}
	return err
}

// replace is apply where what is in the kernel is not known.
func (n *Namespace) replace(next plan) error {
	after := rulesFor(next)
	err := n.space.tables(func(c *nftables.Conn) error {
		c.FlushRuleset()
		return replaceRules(c, nil, after)
	})
	n.mu.Lock()
	n.plan = next
	n.mu.Unlock()
	if err != nil {
		return err
	}
	return n.space.tables(func(c *nftables.Conn) error { return compareAll(c, after) })
}
