package runner

import (
	"context"
	"io"
	"net"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
)

// TestLongHeaderName: a guest whose request would make a record that no message takes is in nobody's way: the flows of the host go on, its
// egress process is the same one, and all machines run, also under the next runner.
func TestLongHeaderName(t *testing.T) {
	t.Parallel()
	reg := prometheus.NewRegistry()
	r := newEgressRig(t, func(c *Config) { c.Metrics = reg })
	base := r.boot()
	id, other := r.forkWith(base, rulesOf(1)), r.forkWith(base, rulesOf(1, "a.test"))
	c, err := net.Dial("tcp", r.gateway(id))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "GET http://x.example/ HTTP/1.1\r\nHost: x.example\r\ncoppice-brokered-"+strings.Repeat("&", 60_000)+": 1\r\n\r\n"); err != nil {
		t.Fatal(err)
	}
	if b, err := io.ReadAll(c); err != nil || !strings.Contains(string(b), http.StatusText(http.StatusForbidden)) {
		t.Errorf("the guest was told %.200q, %v", b, err)
	}
	testegress.Want(t, r.gateway(other), "a.test", allowed)
	was := testegress.Hello(t, r.egressClient()).Instance
	seen := func() {
		t.Helper()
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		all := map[core.SandboxID]bool{}
		for after := int64(0); !all[id] || !all[other]; {
			list, last, err := r.Flows(ctx, after)
			if err != nil {
				t.Fatal(err)
			}
			for _, f := range list {
				all[f.SandboxID] = true
			}
			after = last
		}
	}
	seen()
	if got := testmetrics.Of(t, reg); got["coppice_egress_restarts_total ended"]+got["coppice_egress_restarts_total hung"] != 0 {
		t.Errorf("egress processes have ended: %v", got)
	}
	r.cfg.Metrics = nil // the next runner has its own
	cleanup := r.crash()
	defer cleanup()
	r.start()
	if is := testegress.Hello(t, r.egressClient()).Instance; is != was {
		t.Errorf("the egress process is %s and was %s", is, was)
	}
	testegress.Want(t, r.gateway(other), "a.test", allowed)
	r.wantOnly(id, other)
}
