package netns

import (
	"net/netip"
	"testing"
	"time"

	"github.com/google/nftables"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// TestRate floods the tap of a guest with good frames, as fast as the machine can. What gets past the rate stays near it, in packets and in
// bytes, and a sibling loses nothing.
func TestRate(t *testing.T) { //nolint:paralleltest // it measures time
	const frameBytes = 14 + 20 + 8 + 1400
	for name, c := range map[string]struct {
		payload int
		rate    Rate
		most    func(r Rate, passed time.Duration) uint64 // frames
	}{
		"packets": {1, Rate{Bytes: 1 << 30, Packets: 2000}, func(r Rate, d time.Duration) uint64 {
			return uint64(d.Seconds()*float64(r.Packets)) + uint64(r.Packets/burstPart)
		}},
		// The kernel's bucket for bytes holds a second's worth besides the burst.
		"bytes": {1400, Rate{Bytes: 256 << 10, Packets: 1_000_000}, func(r Rate, d time.Duration) uint64 {
			return uint64(((d.Seconds()+1)*float64(r.Bytes) + leastBurst) / frameBytes)
		}},
	} {
		p := newTestPool(t, func(cfg *Config) { cfg.Rate = c.rate })
		guest, sibling := identity(3), identity(4)
		n, w := acquireWired(t, p, guest)
		other, quiet := acquireWired(t, p, sibling)
		frame := func(id core.Identity, payload int) []byte {
			body := ip4(id.IP, netip.MustParseAddr(DefaultGateway), unix.IPPROTO_UDP, udp(1, 2, string(make([]byte, payload))))
			return ether(macOf(t, GatewayMAC), macOf(t, id.MAC), unix.ETH_P_IP, body)
		}
		const frames = 20_000
		flood, few := frame(guest, c.payload), frame(sibling, c.payload)
		began := time.Now()
		for i := range frames {
			must(t, w.send(flood))
			if i%1000 == 0 {
				must(t, quiet.send(few))
			}
		}
		passed := time.Since(began)
		got, err := n.Counters(t.Context())
		must(t, err)
		most := c.most(c.rate, passed) * 11 / 10
		t.Logf("%s: of %d frames in %s, %d got past the rate and %d were dropped; at most %d may", name, frames, passed, got[counterAccepted], got[counterDropRate], most)
		if got[counterAccepted] > most || got[counterAccepted] == 0 || got[counterAccepted]+got[counterDropRate] != frames {
			t.Errorf("%s: %v of %d frames; at most %d may get past", name, got, frames, most)
		}
		still, err := other.Counters(t.Context())
		must(t, err)
		if still[counterAccepted] != frames/1000 || still[counterDropRate] != 0 {
			t.Errorf("%s: the sibling's frames were counted as %v", name, still)
		}
	}
}

// TestRateOfAdopted: a namespace that a runner without a rate, or with another one, has made gets this one's.
func TestRateOfAdopted(t *testing.T) {
	t.Parallel()
	for name, before := range map[string]Rate{"none": {}, "another": {Bytes: 1 << 20, Packets: 10}, "the same": DefaultRate} {
		p := newTestPool(t, nil)
		id := identity(5)
		n := acquireOpen(t, p, id, core.EgressDenyAll)
		old := n.current()
		old.rate = before
		must(t, n.apply(old))
		next := restart(t, p)
		again, err := next.Adopt(t.Context(), n.Name())
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		must(t, again.Check(t.Context()))
		var now Rate
		must(t, again.space.tables(func(c *nftables.Conn) (err error) {
			now, err = rateIn(c)
			return err
		}))
		if now != DefaultRate {
			t.Errorf("%s: the rate is %+v, want %+v", name, now, DefaultRate)
		}
		if _, open := again.IsOpen(); !open {
			t.Errorf("%s: it was shut", name)
		}
	}
}
