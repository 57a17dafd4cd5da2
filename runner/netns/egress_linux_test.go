package netns

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// egressServer serves the sockets of a namespace: each connection is told which one it is at, and where it was going.
func egressServer(t *testing.T, e EgressSockets) (stop func()) {
	t.Helper()
	var open []io.Closer
	for i, f := range e.Files()[:3] {
		l, err := net.FileListener(f)
		must(t, err)
		open = append(open, l)
		name := []string{"proxy", "intercepted", "resolver"}[i]
		go func() {
			for {
				c, err := l.Accept()
				if err != nil {
					return
				}
				to := ""
				if name == "intercepted" {
					to = " " + originalOf(c)
				}
				_, _ = io.WriteString(c, name+to)
				_ = c.Close()
			}
		}()
	}
	u, err := net.FilePacketConn(e.ResolverUDP)
	must(t, err)
	open = append(open, u)
	go func() {
		b := make([]byte, 512)
		for {
			n, from, err := u.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = u.WriteTo(append([]byte("answer to "), b[:n]...), from)
		}
	}()
	must(t, e.Close())
	return func() {
		for _, c := range open {
			_ = c.Close()
		}
	}
}

func originalOf(c net.Conn) string {
	raw, err := c.(*net.TCPConn).SyscallConn()
	if err != nil {
		return err.Error()
	}
	var out string
	_ = raw.Control(func(fd uintptr) {
		v, err := unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, unix.SO_ORIGINAL_DST)
		if err != nil {
			out = err.Error()
			return
		}
		b := v.Multiaddr
		out = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), uint16(b[2])<<8|uint16(b[3])).String()
	})
	return out
}

// askOver sends a datagram from inside a namespace and returns the answer.
func askOver(t *testing.T, ns netns.NsHandle, addr string) string {
	t.Helper()
	var c net.Conn
	must(t, inside(ns, func() (err error) {
		c, err = (&net.Dialer{}).DialContext(t.Context(), "udp4", addr)
		return err
	}))
	defer c.Close()
	_, err := io.WriteString(c, "question")
	must(t, err)
	_ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond))
	b := make([]byte, 512)
	m, err := c.Read(b)
	if err != nil {
		return "nothing"
	}
	return string(b[:m])
}

// TestProxied: whatever a guest sends over TCP arrives at the proxy's sockets, with where it was going; the resolver's is the only one over
// UDP; and nothing else arrives anywhere.
func TestProxied(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, func(c *Config) { c.Max = 1 })
	hostIP := netip.MustParseAddr("203.0.113.9")
	must(t, inside(p.host, func() error { return addPair("wan", p.host, hostIP) }))
	hostEars := listenPackets(t, p.host)
	id := identity(7)
	n, err := p.Acquire(t.Context())
	must(t, err)
	sockets, err := n.EgressSockets(t.Context())
	must(t, err)
	if _, err := n.EgressSockets(t.Context()); !errors.Is(err, unix.EADDRINUSE) {
		t.Errorf("a second set of sockets: %v", err)
	}
	stop := egressServer(t, sockets)
	defer stop()
	must(t, n.Assign(t.Context(), id))
	g := newKernelGuest(t, n, id)
	must(t, n.Open(t.Context(), core.EgressProxied))
	hostEars.drain(t)

	say := func(addr string) string {
		ctx, cancel := context.WithTimeout(t.Context(), 500*time.Millisecond)
		defer cancel()
		c, err := g.dial(ctx, addr)
		if err != nil {
			return err.Error()
		}
		defer c.Close()
		_ = c.SetDeadline(time.Now().Add(watchdog))
		b, err := io.ReadAll(c)
		if err != nil {
			return err.Error()
		}
		return string(b)
	}
	for addr, want := range map[string]string{
		"1.2.3.4:443": "intercepted 1.2.3.4:443", "203.0.113.9:22": "intercepted 203.0.113.9:22", "10.84.9.9:80": "intercepted 10.84.9.9:80", "192.168.1.1:5432": "intercepted 192.168.1.1:5432",
		"198.18.0.7:65535": "intercepted 198.18.0.7:65535", "10.83.0.1:3128": "proxy", "10.83.0.1:53": "resolver", "8.8.8.8:53": "intercepted 8.8.8.8:53",
		"10.83.0.1:3129": "intercepted 10.83.0.1:3129",
	} {
		if got := say(addr); got != want {
			t.Errorf("%s: %q, want %q", addr, got, want)
		}
	}
	before := counters(t, n)
	for _, addr := range []string{"169.254.169.254:80", "127.0.0.2:80", "10.83.0.1:22", "224.0.0.1:80"} {
		if strings.HasPrefix(addr, "127.") {
			continue // the guest's own
		}
		if got := say(addr); !strings.Contains(got, "timeout") && !strings.Contains(got, "unreachable") && !strings.Contains(got, "deadline") {
			t.Errorf("%s: %q", addr, got)
		}
	}
	rose := risen(before, counters(t, n))
	if rose[counterDropSpecial] == 0 || rose[counterDropInput] == 0 || rose[counterIntercepted] != 0 {
		t.Errorf("counters rose by %v", rose)
	}

	ask := func(addr string) string { return askOver(t, g.ns, addr) }
	for addr, want := range map[string]string{"10.83.0.1:53": "answer to question", "8.8.8.8:53": "nothing", "10.83.0.1:443": "nothing", "203.0.113.9:443": "nothing"} {
		if got := ask(addr); got != want {
			t.Errorf("over UDP, %s: %q, want %q", addr, got, want)
		}
	}
	if f := hostEars.pending(t); f != nil {
		t.Errorf("the host saw %x", f)
	}

	// Nobody there: what the guest sends is refused, and still goes nowhere.
	stop()
	for _, addr := range []string{"1.2.3.4:443", "203.0.113.9:22", "10.83.0.1:3128"} {
		if got := say(addr); !strings.Contains(got, syscall.ECONNREFUSED.Error()) {
			t.Errorf("%s with nobody there: %q", addr, got)
		}
	}
	// And somebody again, in the same namespace, as after a restart of the proxy.
	sockets, err = n.EgressSockets(t.Context())
	must(t, err)
	stop2 := egressServer(t, sockets)
	defer stop2()
	if got := say("1.2.3.4:443"); got != "intercepted 1.2.3.4:443" {
		t.Errorf("served again: %q", got)
	}
	if f := hostEars.pending(t); f != nil {
		t.Errorf("the host saw %x", f)
	}
	// A shut namespace sends nothing to the proxy either.
	must(t, n.Shut(t.Context()))
	if got := say("1.2.3.4:443"); strings.Contains(got, "intercepted") {
		t.Errorf("shut: %q", got)
	}
	g.end()
	stop2()
	must(t, n.Release(t.Context()))
	again, err := p.Acquire(t.Context())
	must(t, err)
	if again.Name() != n.Name() {
		t.Error("a namespace whose proxy closed its sockets was not recycled")
	}
}
