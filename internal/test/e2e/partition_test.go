package e2e

import (
	"testing"

	"github.com/google/nftables"
	"github.com/google/nftables/expr"
	"github.com/vishvananda/netns"
)

// cutTable is the table by which the far host is cut off. It is no cluster's.
const cutTable = "e2e_partition"

// cut drops what comes to the far host and, unless it may still send, what leaves it.
func (h *farHost) cut(t *testing.T, maySend bool) {
	t.Helper()
	h.change(t, func(c *nftables.Conn) {
		table := c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: cutTable})
		hooks := map[string]*nftables.ChainHook{"in": nftables.ChainHookInput}
		if !maySend {
			hooks["out"] = nftables.ChainHookOutput
		}
		for name, hook := range hooks {
			chain := c.AddChain(&nftables.Chain{
				Name: name, Table: table, Type: nftables.ChainTypeFilter, Hooknum: hook, Priority: nftables.ChainPriorityFilter,
			})
			c.AddRule(&nftables.Rule{Table: table, Chain: chain, Exprs: []expr.Any{&expr.Verdict{Kind: expr.VerdictDrop}}})
		}
	})
}

// mend ends a cut.
func (h *farHost) mend(t *testing.T) {
	t.Helper()
	h.change(t, func(c *nftables.Conn) {
		// Added first, so that there is one to delete.
		c.DelTable(c.AddTable(&nftables.Table{Family: nftables.TableFamilyINet, Name: cutTable}))
	})
}

func (h *farHost) change(t *testing.T, do func(*nftables.Conn)) {
	t.Helper()
	ns, err := netns.GetFromPath(h.path)
	if err != nil {
		t.Fatal(err)
	}
	defer ns.Close()
	c, err := nftables.New(nftables.WithNetNSFd(int(ns)))
	if err != nil {
		t.Fatal(err)
	}
	do(c)
	if err := c.Flush(); err != nil {
		t.Fatal(err)
	}
}
