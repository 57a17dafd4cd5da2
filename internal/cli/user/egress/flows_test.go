package egress

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/cli/clitest"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

func TestTables(t *testing.T) {
	t.Parallel()
	var b strings.Builder
	flow := coppice.Flow{At: clitest.Dawn, Outcome: coppice.FlowAllowed, Protocol: coppice.FlowHTTP, Host: "api.example.com", Port: 443, Method: "POST", Path: "/v1/\x1b[2J", Status: 201, SentBytes: 2048, ReceivedBytes: 10, Rule: "*.example.com"}
	tunnel := coppice.Flow{At: clitest.Dawn, Outcome: coppice.FlowDenied, Protocol: coppice.FlowTLS, Host: "evil.example", Port: 443, Opaque: true, Reason: "no rule allows it"}
	several := coppice.Flow{At: clitest.Dawn, LastAt: clitest.Dawn.Add(time.Minute), Count: 240_000, Outcome: coppice.FlowDenied, Protocol: coppice.FlowTCP, Opaque: true, Reason: "denied, to more hosts"}
	count := coppice.Flow{At: clitest.Dawn, LastAt: clitest.Dawn.Add(time.Minute), Count: 7000, Counted: true, Outcome: coppice.FlowAllowed, Protocol: coppice.FlowTLS, Host: "a.example", Port: 443, Rule: "*.example"}
	ofRule := count
	ofRule.Host, ofRule.Port, ofRule.Opaque = "*.example", 0, true
	b.WriteString("-- egress\n")
	if err := errors.Join(printFlows(&b, nil), printFlows(&b, []coppice.Flow{flow, tunnel, several, count, ofRule})); err != nil {
		t.Error(err)
	}
	b.WriteString("-- effects\n")
	if err := errors.Join(printEffects(&b, nil), printEffects(&b, []coppice.Effect{{CheckpointID: clitest.ID("ckpt", 2), Depth: 1, Flow: flow}, {CheckpointID: clitest.ID("ckpt", 2), Depth: 1, Flow: count}})); err != nil {
		t.Error(err)
	}
	b.WriteString("-- what may be reached\n")
	for _, n := range []coppice.Network{{EgressPolicy: coppice.EgressDenyAll}, {EgressPolicy: coppice.EgressDenyAll, Allow: []string{"a.example", "bundle:go"}, RulesPending: true}} {
		b.WriteString(Describe(n) + "\n")
	}
	clitest.Golden(t, "tables.txt", b.String())
}
