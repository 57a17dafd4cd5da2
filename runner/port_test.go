package runner

import (
	"maps"
	"net"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/hostport"
	"github.com/coppice-dev/coppice/runner/portforward"
)

func (r *fakeRig) forward(s core.SandboxID, listen string) (runnerapi.Port, error) {
	want := runnerapi.Port{ID: core.NewID[core.PortID](), GuestPort: 80}
	if listen != "" {
		want.Listen = netip.MustParseAddrPort(listen)
	}
	return r.OpenPort(r.t.Context(), s, want)
}

// TestPortsAreTheOperators asks the runner itself for addresses that its operator does not allow, as a controller that was taken over
// would.
func TestPortsAreTheOperators(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(c *Config) { c.Forward.First, c.Forward.Last = hostport.Lowest, 65535 })
	s := r.fork(r.boot())
	service, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer service.Close()
	for listen, code := range map[string]core.Code{
		"0.0.0.0:2525": core.CodePortNotAllowed, "[::]:2222": core.CodePortNotAllowed, "127.0.0.1:25": core.CodePortNotAllowed, "[::1]:22": core.CodePortNotAllowed,
		"127.0.0.9:3000": core.CodePortNotAllowed, netip.AddrPortFrom(netip.IPv6Loopback(), service.Addr().(*net.TCPAddr).AddrPort().Port()).String(): core.CodePortTaken,
	} {
		if p, err := r.forward(s, listen); core.CodeOf(err) != code {
			t.Errorf("%s: %+v, %v", listen, p, err)
		}
	}
	for range portforward.Max {
		if p, err := r.forward(s, ""); err != nil || p.Listen.Addr() != netip.MustParseAddr("127.0.0.1") || p.Listen.Port() < 1024 {
			t.Fatalf("%+v, %v", p, err)
		}
	}
	if _, err := r.forward(s, ""); core.CodeOf(err) != core.CodeQuotaExceeded {
		t.Errorf("one more than %d: %v", portforward.Max, err)
	}
	if err := r.Destroy(t.Context(), s); err != nil {
		t.Fatal(err)
	}
}

// TestPortsAreReopened starts the runner again on its sandboxes: as it was, and with an address less and one that is taken meanwhile. What
// is not forwarded is counted and does not stop the rest.
func TestPortsAreReopened(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(c *Config) { c.Leave = true })
	s := r.fork(r.boot())
	var addresses []string
	for _, listen := range []string{"127.0.0.1:0", "127.0.0.1:0", "[::1]:0"} {
		p, err := r.forward(s, listen)
		if err != nil {
			t.Fatal(err)
		}
		addresses = append(addresses, p.Listen.String())
	}
	reached := func(want ...bool) {
		t.Helper()
		got := make([]bool, len(addresses))
		for i, address := range addresses {
			c, err := net.Dial("tcp", address)
			if got[i] = err == nil; got[i] {
				_ = c.Close()
			}
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("who is reached: %s", diff)
		}
	}
	states := func(listening, waiting, refused int) {
		t.Helper()
		want := map[portforward.State]int{portforward.Listening: listening, portforward.Waiting: waiting, portforward.Refused: refused}
		eventually.True(t, "the ports are as they should be", func() bool { return maps.Equal(portStates(r.all()), want) })
	}
	reached(true, true, true)
	r.stop()
	reached(false, false, false)
	r.start()
	states(3, 0, 0)
	reached(true, true, true)
	r.stop()
	taker, err := net.Listen("tcp", addresses[1])
	if err != nil {
		t.Fatal(err)
	}
	if r.cfg.Forward, err = hostport.Parse([]string{"127.0.0.1"}, ""); err != nil {
		t.Fatal(err)
	}
	r.start()
	states(1, 1, 1)
	reached(true, true, false) // the second one is who took it
	if err := taker.Close(); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the port that was taken is forwarded again", func() bool { return portStates(r.all())[portforward.Listening] == 2 })
	if err := r.Destroy(t.Context(), s); err != nil {
		t.Fatal(err)
	}
	states(0, 0, 0)
}
