package egress

import (
	"context"
	"fmt"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

// beAProxy is set in the environment of a test binary that must act as a proxy of `bench egress`.
const beAProxy = "COPPICE_TEST_BE_A_PROXY"

func TestMain(m *testing.M) {
	if os.Getenv(beAProxy) != "" {
		if err := ChildMain(context.Background(), os.Stdin, os.Stdout); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	testleak.Main(m)
}

// TestEgressReport measures a little of everything that `bench egress` measures: each way really delivers the secret to
// the server.
func TestEgressReport(t *testing.T) {
	require.Root(t)
	t.Setenv(beAProxy, "1")
	r, err := measureEgress(t.Context(), egressConfig{
		out: t.TempDir(), self: []string{os.Args[0]}, rounds: 1, requests: 5, clients: 2, sustain: 50 * time.Millisecond, tunnels: 10, sandboxes: 10, changes: 20,
	}, t.Output())
	if err != nil {
		t.Fatal(err)
	}
	var out strings.Builder
	if err := r.show(&out); err != nil {
		t.Fatal(err)
	}
	t.Log(out.String())
	if len(r.Ways) != 6 || len(r.Held) != 2 || r.RulesMS.N != 20 || r.GrantsMS.N != 20 {
		t.Errorf("the report lacks something: %+v", r)
	}
	for _, w := range r.Ways {
		if w.LatencyMS.N != 5 || w.LatencyMS.P50 <= 0 || w.PerSecond <= 0 {
			t.Errorf("%+v", w)
		}
	}
	for _, name := range []string{"tunnel_over_goproxy_p50", "header_over_goproxy_p99", "base_url_over_direct_p50", "header_over_goproxy_per_second"} {
		if r.Ratios[name] <= 0 {
			t.Errorf("%s is %v", name, r.Ratios[name])
		}
	}
}
