package runner

import (
	"context"
	"slices"
	"testing"
	"time"

	"github.com/google/nftables"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/internal/eventually"
	"github.com/coppice-dev/coppice/internal/require"
	"github.com/coppice-dev/coppice/internal/testmetrics"
	"github.com/coppice-dev/coppice/runner/netns"
)

// checked is a runner on fake machines in real namespaces, with a sandbox.
type checked struct {
	*fakeRig
	reg *prometheus.Registry
	id  core.SandboxID
	s   *sandbox
	ns  *netns.Namespace
}

func newChecked(t *testing.T, every time.Duration) *checked {
	t.Helper()
	require.Root(t)
	cluster := "test of " + t.Name() + " " + string(core.NewID[core.RunnerID]())
	out := &checked{reg: prometheus.NewRegistry()}
	var pool *netns.Pool
	t.Cleanup(func() { // when the runner has ended
		if err := pool.Close(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	out.fakeRig = newEgressRig(t, func(c *Config) {
		var err error
		if pool, err = netns.NewPool(netns.Config{ClusterID: cluster, Log: c.Log}); err != nil {
			t.Fatal(err)
		}
		c.ClusterID, c.Network, c.Recheck, c.Metrics = cluster, NetworkOf(pool), every, out.reg
	})
	out.next = 6 // 10.83.0.1 is the gateway
	out.id = out.forkWith(out.boot(), rulesOf(1, "a.test"))
	var err error
	if out.s, err = out.find(out.id); err != nil {
		t.Fatal(err)
	}
	out.ns = out.s.ns.(pooledNamespace).Namespace
	return out
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

func (c *checked) cuts() float64 {
	c.t.Helper()
	return testmetrics.One(c.t, c.reg, "coppice_runner_network_cuts_total")
}

// wantOpen says whether the sandbox has a network, in its namespace and with the egress process, and how often it was cut off.
func (c *checked) wantOpen(want bool, cuts float64) {
	c.t.Helper()
	_, open := c.ns.IsOpen()
	client, err := c.egress.await(c.t.Context())
	if err != nil {
		c.t.Fatal(err)
	}
	list, err := client.List(c.t.Context())
	served := slices.ContainsFunc(list, func(s egressapi.Served) bool { return s.ID == c.id })
	if err != nil || open != want || served != want {
		c.t.Errorf("it is open: %v, want %v; served are %+v, %v", open, want, list, err)
	}
	if got := c.cuts(); got != cuts {
		c.t.Errorf("%v cuts, want %v", got, cuts)
	}
}

// TestRecheck: a sandbox whose rules in the kernel were changed by somebody else is cut off, from the egress process as well, and connected
// again a round later, by rules that were read back.
func TestRecheck(t *testing.T) {
	t.Parallel()
	c := newChecked(t, time.Hour)
	c.recheckOne(t.Context(), c.s)
	c.wantOpen(true, 0)
	c.spoil()
	c.recheckOne(t.Context(), c.s)
	c.wantOpen(false, 1)
	// What is new meanwhile counts when it is back.
	if err := c.SetEgressRules(t.Context(), c.id, rulesOf(2, "b.test")); err != nil {
		t.Error(err)
	}
	c.s.work <- struct{}{} // somebody works on it
	c.recheckOne(t.Context(), c.s)
	c.wantOpen(false, 1)
	c.s.unlock()
	c.recheckOne(t.Context(), c.s)
	c.wantOpen(true, 1)
	if err := c.ns.Check(t.Context()); err != nil {
		t.Error(err)
	}
	if v := c.s.told.rules.Version; v != 2 {
		t.Errorf("it is served by rules of version %d", v)
	}
}

// TestRechecks: it is done by itself, and goes on.
func TestRechecks(t *testing.T) {
	t.Parallel()
	c := newChecked(t, 50*time.Millisecond)
	for i := range 2 {
		c.spoil()
		eventually.True(t, "it was cut off", func() bool { return c.cuts() == float64(i+1) })
		eventually.True(t, "it is connected again", func() bool { _, open := c.ns.IsOpen(); return open })
	}
}
