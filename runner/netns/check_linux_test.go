package netns

import (
	"context"
	"errors"
	"net"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/coppice-dev/coppice/core"
)

// TestCheck: rules that somebody else has changed cut the guest off, whatever was changed, and it can be opened again.
func TestCheck(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	change := func(fn func(c *nftables.Conn)) func() error {
		return func() error {
			return withTables(func(c *nftables.Conn) error {
				fn(c)
				return c.Flush()
			})
		}
	}
	for what, spoil := range map[string]func(rs ruleset) func() error{
		"an extra rule": func(rs ruleset) func() error {
			return change(func(c *nftables.Conn) {
				t := rs[1].kernel()
				c.InsertRule(rule{verdict: accept}.kernel(familyInet, t, rs[1].chains[0].kernel(t)))
			})
		},
		"a rule less": func(rs ruleset) func() error {
			return change(func(c *nftables.Conn) {
				t := rs[1].kernel()
				got, err := c.GetRules(t, rs[1].chains[0].kernel(t))
				if err == nil && len(got) > 0 {
					_ = c.DelRule(got[0])
				}
			})
		},
		"an extra table": func(ruleset) func() error {
			return change(func(c *nftables.Conn) { c.AddTable(&nftables.Table{Family: nftables.TableFamilyIPv4, Name: "extra"}) })
		},
		"no rules": func(ruleset) func() error {
			return change(func(c *nftables.Conn) { c.FlushRuleset() })
		},
	} {
		id := identity(7)
		n := acquireOpen(t, p, id, core.EgressProxied)
		g := newKernelGuest(t, n, id)
		sockets, err := n.EgressSockets(t.Context())
		must(t, err)
		stop := egressServer(t, sockets)
		reaches := func(within time.Duration) bool {
			ctx, cancel := context.WithTimeout(t.Context(), within)
			defer cancel()
			c, err := g.dial(ctx, net.JoinHostPort(DefaultGateway, "3128"))
			if err != nil {
				return false
			}
			_ = c.Close()
			return true
		}
		must(t, n.Check(t.Context()))
		if !reaches(watchdog) {
			t.Errorf("%s: it does not reach the proxy before", what)
		}
		must(t, n.Do(spoil(rulesFor(n.current()))))
		if err := n.Check(t.Context()); !errors.Is(err, ErrRulesDiffer) {
			t.Errorf("%s: %v", what, err)
		}
		if _, open := n.IsOpen(); open || reaches(300*time.Millisecond) {
			t.Errorf("%s: it is not cut off", what)
		}
		must(t, n.Check(t.Context())) // cut off is what it should be now
		must(t, n.Open(t.Context(), core.EgressProxied))
		if !reaches(watchdog) {
			t.Errorf("%s: it does not reach the proxy again", what)
		}
		must(t, n.Check(t.Context()))
		g.end()
		stop()
		must(t, n.Release(t.Context()))
		if err := n.Check(t.Context()); err == nil || errors.Is(err, ErrRulesDiffer) {
			t.Errorf("%s: released, %v", what, err)
		}
	}
}

// TestCheckUplink: what allow-all has on the host is part of it.
func TestCheckUplink(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	n := acquireOpen(t, p, identity(7), core.EgressAllowAll)
	must(t, n.Check(t.Context()))
	must(t, inside(p.host, func() error {
		return withTables(func(c *nftables.Conn) error {
			c.FlushRuleset()
			return c.Flush()
		})
	}))
	if err := n.Check(t.Context()); !errors.Is(err, ErrRulesDiffer) {
		t.Errorf("without rules on the host: %v", err)
	}
	if _, open := n.IsOpen(); open {
		t.Error("it is open")
	}
	for _, trace := range tracesOf(t, p.names, p.host) {
		if trace == "link "+p.names.link(n.space.id) {
			t.Error("it has its way out")
		}
	}
	must(t, n.Open(t.Context(), core.EgressAllowAll))
	must(t, n.Check(t.Context()))
	must(t, n.Release(t.Context()))
}
