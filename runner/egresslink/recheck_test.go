package egresslink

import (
	"context"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/google/nftables"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/netns"
)

var identity = core.Identity{Hostname: "a", MAC: "02:00:00:00:00:07", IP: netip.AddrFrom4([4]byte{10, 83, 0, 7})}

// checked is a sandbox in a real namespace, which a real egress process serves.
type checked struct {
	*rig
	g  *guest
	ns *netns.Namespace
}

func newChecked(t *testing.T) *checked {
	t.Helper()
	require.Root(t)
	pool, err := netns.NewPool(netns.Config{
		ClusterID: "test of " + t.Name() + " " + string(core.NewID[core.RunnerID]()), Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { // when the link has ended
		if err := pool.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	c := &checked{rig: newRig(t)}
	if c.ns, err = pool.Acquire(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		ctx := context.WithoutCancel(t.Context())
		if c.g != nil {
			c.g.End(ctx)
		}
		if err := c.ns.Release(ctx); err != nil {
			t.Error(err)
		}
	})
	if err := c.ns.Assign(t.Context(), identity); err != nil {
		t.Fatal(err)
	}
	c.g = c.list(c.ns)
	c.g.SetFirst(core.EgressProxied, rulesOf(1, "a.test"))
	if err := c.g.Serve(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := c.ns.Open(t.Context(), core.EgressProxied); err != nil {
		t.Fatal(err)
	}
	return c
}

// spoil takes the rules away behind the runner's back.
func (c *checked) spoil() {
	c.t.Helper()
	if err := c.ns.Do(func() error {
		n, err := nftables.New()
		if err != nil {
			return err
		}
		n.FlushRuleset()
		return n.Flush()
	}); err != nil {
		c.t.Fatal(err)
	}
}

// wantOpen says whether the sandbox has a network, in its namespace and with the egress process, and how often it was cut off.
func (c *checked) wantOpen(want bool, cuts int64) {
	c.t.Helper()
	_, open := c.ns.IsOpen()
	list, err := c.process().List(c.t.Context())
	served := slices.ContainsFunc(list, func(s egressapi.Served) bool { return s.ID == c.g.id })
	if err != nil || open != want || served != want {
		c.t.Errorf("it is open: %v, want %v; served are %+v, %v", open, want, list, err)
	}
	if got := c.cuts.Load(); got != cuts {
		c.t.Errorf("%v cuts, want %v", got, cuts)
	}
}

// TestRecheck: a sandbox whose rules in the kernel were changed by somebody else is cut off, from the egress process as well, and connected
// again a round later, by rules that were read back.
func TestRecheck(t *testing.T) {
	t.Parallel()
	c := newChecked(t)
	c.g.recheck(t.Context(), time.Hour)
	c.wantOpen(true, 0)
	c.spoil()
	c.g.recheck(t.Context(), time.Hour)
	c.wantOpen(false, 1)
	// What is new meanwhile counts when it is back.
	if err := c.g.SetRules(t.Context(), rulesOf(2, "b.test")); err != nil {
		t.Error(err)
	}
	c.g.busy.Store(true)
	c.g.recheck(t.Context(), time.Hour)
	c.wantOpen(false, 1)
	c.g.busy.Store(false)
	c.g.recheck(t.Context(), time.Hour)
	c.wantOpen(true, 1)
	if err := c.ns.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if v := c.g.acked.rules.Version; v != 2 {
		t.Errorf("it is served by rules of version %d", v)
	}
}

// TestRechecks: it is done by itself, and goes on.
func TestRechecks(t *testing.T) {
	t.Parallel()
	c := newChecked(t)
	ctx, stop := context.WithCancel(t.Context())
	var checking sync.WaitGroup
	checking.Go(func() { c.Recheck(ctx, 50*time.Millisecond, func() []*Sandbox { return []*Sandbox{c.g.Sandbox} }) })
	defer checking.Wait()
	defer stop()
	for i := range 2 {
		c.spoil()
		eventually.True(t, "it was cut off", func() bool { return c.cuts.Load() == int64(i+1) })
		eventually.True(t, "it is connected again", func() bool { _, open := c.ns.IsOpen(); return open })
	}
}
