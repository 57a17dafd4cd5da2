package netns

import (
	"context"
	"errors"
	"io"
	"net"
	"net/netip"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// TestDialReachesTheGuest is the forwarded port: a TCP and a UDP exchange with a guest that has a real stack.
func TestDialReachesTheGuest(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	id := identity(7)
	n := acquireOpen(t, p, id, core.EgressDenyAll)
	g := newKernelGuest(t, n, id)
	serveEcho(t, g.listen(t, ":8080"))

	before := counters(t, n)
	for _, addr := range []string{":8080", "10.83.1.7:8080"} {
		c, err := n.Dial(patience(t, watchdog), "tcp", addr)
		must(t, err)
		if got := c.RemoteAddr().String(); got != "10.83.1.7:8080" {
			t.Errorf("connected to %s", got)
		}
		echo(t, c, strings.Repeat("coppice ", 32*1024)) // 256 KiB: more than any buffer on the way
		half, ok := c.(interface{ CloseWrite() error })
		if !ok {
			t.Fatal("the connection cannot be half-closed")
		}
		must(t, half.CloseWrite())
		if rest, err := io.ReadAll(c); err != nil || len(rest) != 0 {
			t.Errorf("after the half-close: %q, %v", rest, err)
		}
		must(t, c.Close())
	}
	if rose := risen(before, counters(t, n)); rose[counterEstablished] == 0 || rose[counterDropInput] != 0 {
		t.Errorf("counters rose by %v", rose)
	}

	u, err := n.Dial(t.Context(), "udp", ":9")
	must(t, err)
	must(t, u.SetDeadline(time.Now().Add(watchdog)))
	var ears net.PacketConn
	must(t, inside(g.ns, func() (err error) {
		ears, err = (&net.ListenConfig{}).ListenPacket(t.Context(), "udp4", ":10")
		return err
	}))
	defer ears.Close()
	must(t, u.Close())
	u, err = n.Dial(t.Context(), "udp", ":10")
	must(t, err)
	defer u.Close()
	_, err = u.Write([]byte("question"))
	must(t, err)
	b := make([]byte, 64)
	must(t, ears.SetDeadline(time.Now().Add(watchdog)))
	size, from, err := ears.ReadFrom(b)
	must(t, err)
	if from.(*net.UDPAddr).IP.String() != DefaultGateway || string(b[:size]) != "question" {
		t.Errorf("the guest got %q from %s", b[:size], from)
	}
	_, err = ears.WriteTo([]byte("answer"), from)
	must(t, err)
	must(t, u.SetDeadline(time.Now().Add(watchdog)))
	if size, err = u.Read(b); err != nil || string(b[:size]) != "answer" {
		t.Errorf("the host got %q, %v", b[:size], err)
	}
}

func TestDialFailures(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	id := identity(7)
	n, w := acquireWired(t, p, id) // a guest that never answers

	ctx, cancel := context.WithCancelCause(t.Context())
	gaveUp := errors.New("gave up")
	done := make(chan error, 1)
	go func() {
		_, err := n.Dial(ctx, "tcp", ":80")
		done <- err
	}()
	must(t, w.f.SetReadDeadline(time.Now().Add(watchdog)))
	b := make([]byte, 2048)
	_, err := w.f.Read(b) // the SYN: the dial is under way
	must(t, err)
	cancel(gaveUp)
	if err := <-done; !errors.Is(err, gaveUp) {
		t.Errorf("a cancelled dial ended with %v", err)
	}
	must(t, w.f.Close())

	g := newKernelGuest(t, n, id)
	_ = g
	if _, err := n.Dial(patience(t, watchdog), "tcp", ":81"); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("dialling a closed port: %v", err)
	}
	for _, addr := range []string{"10.83.1.8:80", "127.0.0.1:80", "example.com:80", "10.83.1.7", ":http", ":70000", "[::1]:80", ""} {
		if _, err := n.Dial(t.Context(), "tcp", addr); core.CategoryOf(err) != core.Invalid {
			t.Errorf("dialling %q: %v", addr, err)
		}
	}
	if _, err := n.Dial(t.Context(), "unix", ":80"); err == nil {
		t.Error("dialling by unix succeeded")
	}
	ctx, cancel2 := context.WithCancel(t.Context())
	cancel2()
	if _, err := n.Dial(ctx, "tcp", ":81"); !errors.Is(err, context.Canceled) && !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("dialling with an ended context: %v", err)
	}
}

// TestListenIsTheOnlyPassage: the guest reaches a port of the gateway while there is a listener on it, no other one,
// and not after it has been closed.
func TestListenIsTheOnlyPassage(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	id := identity(7)
	n, err := p.Acquire(t.Context())
	must(t, err)
	must(t, n.Assign(t.Context(), id))
	early, err := n.Listen(t.Context(), "tcp", ":3128") // before Open, as a runner would
	must(t, err)
	serveEcho(t, early)
	must(t, n.Open(t.Context(), core.EgressDenyAll))
	late, err := n.Listen(t.Context(), "tcp", "10.83.0.1:0")
	must(t, err)
	serveEcho(t, late)
	g := newKernelGuest(t, n, id)

	for _, l := range []net.Listener{early, late} {
		c, err := g.dial(patience(t, watchdog), l.Addr().String())
		must(t, err)
		echo(t, c, "through the passage")
		must(t, c.Close())
	}
	for _, addr := range []string{"0.0.0.0:1", "10.83.0.2:1", "10.83.0.1"} {
		if _, err := n.Listen(t.Context(), "tcp", addr); core.CategoryOf(err) != core.Invalid {
			t.Errorf("listening on %q: %v", addr, err)
		}
	}
	before := counters(t, n)
	if c, err := g.dial(patience(t, 300*time.Millisecond), "10.83.0.1:22"); err == nil {
		t.Errorf("the guest connected to %s", c.RemoteAddr())
	}
	if rose := risen(before, counters(t, n)); rose[counterDropInput] == 0 {
		t.Errorf("counters rose by %v", rose)
	}
	held, err := g.dial(patience(t, watchdog), early.Addr().String())
	must(t, err)
	defer held.Close()
	echo(t, held, "before")
	must(t, early.Close())
	if c, err := g.dial(patience(t, 300*time.Millisecond), early.Addr().String()); err == nil {
		t.Errorf("the guest connected to a closed listener %s", c.RemoteAddr())
	}
	echo(t, held, "an accepted connection outlives its listener")
	if got := n.current().services; len(got) != 1 {
		t.Errorf("services %v are left, not one", got)
	}
}

// TestListenersAreBounded also checks that a refused one leaves nothing behind.
func TestListenersAreBounded(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	n := acquireOpen(t, p, identity(7), core.EgressDenyAll)
	for range maxServices {
		_, err := n.Listen(t.Context(), "tcp", ":0")
		must(t, err)
	}
	if _, err := n.Listen(t.Context(), "tcp", ":0"); core.CategoryOf(err) != core.Exhausted {
		t.Errorf("one listener too many: %v", err)
	}
	must(t, n.Shut(t.Context()))
	must(t, n.Assign(t.Context(), identity(8)))
	if _, err := n.Listen(t.Context(), "tcp", ":0"); err != nil {
		t.Errorf("after Shut: %v", err)
	}
}

// TestShutEndsConnections: connections in both directions end when the namespace is shut, at once and on both ends of
// the host's side, although the guest hears nothing of it.
func TestShutEndsConnections(t *testing.T) {
	t.Parallel()
	p := newTestPool(t, nil)
	id := identity(7)
	n := acquireOpen(t, p, id, core.EgressDenyAll)
	g := newKernelGuest(t, n, id)
	serveEcho(t, g.listen(t, ":8080"))
	c, err := n.Dial(patience(t, watchdog), "tcp", ":8080")
	must(t, err)
	echo(t, c, "hello")
	l, err := n.Listen(t.Context(), "tcp", ":3128")
	must(t, err)
	in, err := g.dial(patience(t, watchdog), l.Addr().String())
	must(t, err)
	defer in.Close()
	accepted, err := l.Accept()
	must(t, err)

	must(t, n.Shut(t.Context()))
	for name, end := range map[string]net.Conn{"dialled": c, "accepted": accepted} {
		if _, err := end.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
			t.Errorf("writing to the %s connection: %v", name, err)
		}
	}
	if _, err := l.Accept(); !errors.Is(err, net.ErrClosed) {
		t.Errorf("accepting: %v", err)
	}
	must(t, n.Do(func() error {
		left, err := netlink.SocketDiagTCP(unix.AF_INET)
		if len(left) != 0 {
			t.Errorf("%d TCP sockets are left", len(left))
		}
		return err
	}))
	if mac, ip, ok := n.Identity(); ok || ip != (netip.Addr{}) || mac != "" {
		t.Errorf("after Shut the identity is %s %s", mac, ip)
	}
	// The same namespace opens again for another identity: restore in place.
	must(t, n.Assign(t.Context(), identity(9)))
	must(t, n.Open(t.Context(), core.EgressDenyAll))
	if policy, open := n.IsOpen(); !open || policy != core.EgressDenyAll {
		t.Errorf("IsOpen is %q, %v", policy, open)
	}
}
