package hostport_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/runner/hostport"
)

func TestMain(m *testing.M) { testleak.Main(m) }

func allow(t *testing.T, ports string, addresses ...string) *hostport.Host {
	t.Helper()
	a, err := hostport.Parse(addresses, ports)
	if err != nil {
		t.Fatal(err)
	}
	return hostport.New(a)
}

func at(s string) hostport.Want {
	if port, ok := strings.CutPrefix(s, ":"); ok {
		n, _ := strconv.ParseUint(port, 10, 16)
		return hostport.Want{Port: uint16(n)}
	}
	a := netip.MustParseAddrPort(s)
	return hostport.Want{Address: a.Addr(), Port: a.Port()}
}

// TestRefused: what a tenant may not have, whatever way it is written.
func TestRefused(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		host  *hostport.Host
		asked string
	}{
		{allow(t, ""), "0.0.0.0:2525"},
		{allow(t, ""), "[::]:2222"},
		{allow(t, ""), "[::ffff:0.0.0.0]:2222"},
		{allow(t, ""), "127.0.0.2:2222"},
		{allow(t, ""), "[::ffff:127.0.0.2]:2222"},
		{allow(t, ""), "192.0.2.1:2222"},
		{allow(t, ""), "[fe80::1%lo]:2222"},
		{allow(t, ""), "[::1%lo]:2222"},
		{allow(t, ""), "127.0.0.1:25"},
		{allow(t, ""), "[::1]:22"},
		{allow(t, ""), ":1023"},
		{allow(t, "20000-20009"), ":19999"},
		{allow(t, "20000-20009"), ":20010"},
		{allow(t, "20000-20009"), "[::1]:10250"},
		{allow(t, "", "::1"), "127.0.0.1:0"},
		{allow(t, "", "0.0.0.0"), "127.0.0.1:0"}, // the operator names each address
	} {
		l, err := c.host.Listen(t.Context(), at(c.asked))
		if err == nil {
			_ = l.Close()
		}
		if core.CodeOf(err) != core.CodePortNotAllowed {
			t.Errorf("%s: %v", c.asked, err)
		}
	}
}

// TestParse refuses what the operator cannot have meant.
func TestParse(t *testing.T) {
	t.Parallel()
	for _, ports := range []string{"20000", "-", "1-2000", "80-90", "3000-2000", "x-y", "20000-70000", "20000-29999-30000"} {
		if _, err := hostport.Parse(nil, ports); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", ports, err)
		}
	}
	for _, address := range []string{"", "host", "127.0.0.1:80", "fe80::1%eth0", "224.0.0.1", "10.0.0.0/8"} {
		if _, err := hostport.Parse([]string{address}, ""); core.CodeOf(err) != core.CodeInvalidField {
			t.Errorf("%s: %v", address, err)
		}
	}
}

// TestBind: a tenant gets the address of the host, and what listens is another one, to which an engine forwards the port.
func TestBind(t *testing.T) {
	t.Parallel()
	for _, c := range []struct{ address, bind, dial string }{
		{"192.0.2.1", "127.0.0.3", "127.0.0.3"},
		{"192.0.2.1", "0.0.0.0", "127.0.0.1"},
		{"192.0.2.1", "::", "::1"},
		{"2001:db8::1", "0.0.0.0", "127.0.0.1"}, // of another family: the engine of a container may translate
		{"192.0.2.1", "::1", "::1"},
	} {
		a, err := hostport.Parse([]string{c.address}, "")
		if err != nil {
			t.Fatal(err)
		}
		if a.Bind, err = hostport.ParseBind(c.bind); err != nil {
			t.Fatal(err)
		}
		l, err := hostport.New(a).Listen(t.Context(), hostport.Want{})
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		got := l.Address()
		port := strconv.Itoa(int(got.Port()))
		if got.Addr() != netip.MustParseAddr(c.address) || l.Addr().String() != net.JoinHostPort(c.bind, port) {
			t.Errorf("%+v: it says %s and listens on %s", c, got, l.Addr())
		}
		conn, err := net.Dial("tcp", net.JoinHostPort(c.dial, port))
		if err != nil {
			t.Errorf("%+v: %v", c, err)
		} else {
			_ = conn.Close()
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
		// A runner that starts again asks for what the tenant was given.
		if l, err = hostport.New(a).Listen(t.Context(), hostport.Want{Address: got.Addr(), Port: got.Port()}); err != nil {
			t.Fatalf("%+v: again: %v", c, err)
		}
		if l.Address() != got || l.Addr().String() != net.JoinHostPort(c.bind, port) {
			t.Errorf("%+v: again, it says %s and listens on %s", c, l.Address(), l.Addr())
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
	for _, bad := range []string{"localhost", "224.0.0.1", "fe80::1%lo"} {
		if b, err := hostport.ParseBind(bad); err == nil {
			t.Errorf("%s is read as %s", bad, b)
		}
	}
}

// TestNotTaken: what fails for another reason is not said to be taken, and a range is not tried on for nobody.
func TestNotTaken(t *testing.T) {
	t.Parallel()
	l, err := allow(t, "", "192.0.2.1").Listen(t.Context(), at("192.0.2.1:0")) // no host has it
	if err == nil {
		_ = l.Close()
	}
	if !errors.Is(err, unix.EADDRNOTAVAIL) || core.CodeOf(err) == core.CodePortTaken {
		t.Errorf("an address of another host: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	l, err = allow(t, "29120-29129").Listen(ctx, at(":0"))
	if err == nil {
		_ = l.Close()
	}
	if !errors.Is(err, context.Canceled) {
		t.Errorf("nobody waits for a port: %v", err)
	}
}

// TestNeverBesideAService has a service of the host listen on one address, and a tenant ask for the same port on all others.
func TestNeverBesideAService(t *testing.T) {
	t.Parallel()
	h := allow(t, "1024-65535", "127.0.0.1", "::1", "127.0.0.3", "0.0.0.0", "::")
	for _, service := range []struct{ network, address string }{
		{"tcp4", "127.0.0.1:0"}, {"tcp6", "[::1]:0"}, {"tcp4", "127.0.0.2:0"}, {"tcp4", "0.0.0.0:0"}, {"tcp6", "[::]:0"}, {"tcp", ":0"},
	} {
		l, err := net.Listen(service.network, service.address)
		if err != nil {
			t.Fatal(err)
		}
		port := strconv.Itoa(l.Addr().(*net.TCPAddr).Port)
		for _, address := range []string{"127.0.0.1:", "[::1]:", "127.0.0.3:", "0.0.0.0:", "[::]:", ":"} {
			got, err := h.Listen(t.Context(), at(address+port))
			if err == nil {
				_ = got.Close()
			}
			if core.CodeOf(err) != core.CodePortTaken {
				t.Errorf("beside %s %s, a tenant got %s%s: %v", service.network, service.address, address, port, err)
			}
		}
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestAServiceIsNotShadowedLater has services of the host come after a forwarded port, at the addresses that it does not listen on.
// They fail at once, rather than being reached by half of their clients. When the port is closed they can have it.
func TestAServiceIsNotShadowedLater(t *testing.T) {
	t.Parallel()
	h := allow(t, "")
	got, err := h.Listen(t.Context(), at("[::1]:0"))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := h.Listen(t.Context(), hostport.Want{Address: netip.MustParseAddr("127.0.0.1"), Port: got.Address().Port()}); core.CodeOf(err) != core.CodePortTaken {
		t.Errorf("another tenant: %v", err)
	}
	port := strconv.Itoa(int(got.Address().Port()))
	services := []struct{ network, address string }{{"tcp4", "127.0.0.1:"}, {"tcp6", "[::1]:"}, {"tcp4", "127.0.0.2:"}, {"tcp4", "0.0.0.0:"}, {"tcp6", "[::]:"}, {"tcp", ":"}}
	for _, s := range services {
		if l, err := net.Listen(s.network, s.address+port); err == nil {
			_ = l.Close()
			t.Errorf("a service listens on %s %s beside it", s.network, s.address)
		}
	}
	if err := got.Close(); err != nil {
		t.Error(err)
	}
	for _, s := range services {
		l, err := net.Listen(s.network, s.address+port)
		if err != nil {
			t.Errorf("after it was closed: %v", err)
			continue
		}
		_ = l.Close()
	}
}

// TestReopens: the port can be had again at once, although its connections have just ended.
func TestReopens(t *testing.T) {
	t.Parallel()
	h := allow(t, "")
	want := at(":0")
	for i := range 3 {
		l, err := h.Listen(t.Context(), want)
		if err != nil {
			t.Fatalf("round %d: %v", i, err)
		}
		want = hostport.Want{Address: l.Address().Addr(), Port: l.Address().Port()}
		near, err := net.Dial("tcp", l.Address().String())
		if err != nil {
			t.Fatal(err)
		}
		far, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_, _ = far.Close(), near.Close() // the listening end closes first and so has the state TIME_WAIT
		if err := l.Close(); err != nil {
			t.Error(err)
		}
	}
}

// TestRange fills a range from many goroutines: each port is had once, and no more than there are.
func TestRange(t *testing.T) {
	t.Parallel()
	h := allow(t, "29100-29119")
	var mu sync.Mutex
	ports := map[uint16]*hostport.Listener{}
	var refused atomic.Int64
	var group sync.WaitGroup
	for range 60 {
		group.Go(func() {
			l, err := h.Listen(t.Context(), at(":0"))
			if core.CodeOf(err) == core.CodePortTaken {
				refused.Add(1)
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			mu.Lock()
			defer mu.Unlock()
			if p := l.Address().Port(); ports[p] != nil || p < 29100 || p > 29119 {
				t.Errorf("port %d", p)
			}
			ports[l.Address().Port()] = l
		})
	}
	group.Wait()
	if len(ports) != 20 || refused.Load() != 40 {
		t.Errorf("%d had, %d refused", len(ports), refused.Load())
	}
	for _, l := range ports {
		_ = l.Close()
	}
}
