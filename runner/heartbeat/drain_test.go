package heartbeat_test

import (
	"net/netip"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// TestDrainedRunnerPreparesNothing: while answers say that the runner is drained, no machine is prepared, and those that were are gone.
func TestDrainedRunnerPreparesNothing(t *testing.T) {
	t.Parallel()
	x := newRigWith(t, nil, 1)
	f, err := x.runner.Fork(t.Context(), runnerapi.Fork{CheckpointID: x.template.ID, Children: []runnerapi.Child{{
		SandboxID: core.NewID[core.SandboxID](), WorkspaceID: core.NewID[core.WorkspaceID](), Epoch: 1, Egress: core.EgressDenyAll,
		Identity: core.Identity{Generation: "g", Hostname: "h", MachineID: "0123456789abcdef0123456789abcdef", MAC: "02:00:00:00:00:01", IP: netip.MustParseAddr("10.83.0.9")},
	}}})
	if err != nil || f.Children[0].Problem != nil {
		t.Fatal(f.Children, err)
	}
	machines := func(n int) {
		t.Helper()
		eventually.True(t, "as many machines as there should be", func() bool { return x.driver.Machines() == n })
	}
	machines(2)
	x.set(func(c *controller) { c.drains = true })
	machines(1)
	x.set(func(c *controller) { c.drains = false })
	machines(2)
}
