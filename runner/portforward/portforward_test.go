package portforward

import (
	"context"
	"errors"
	"io"
	"net"
	"os"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// failing accepts nothing at first.
type failing struct {
	net.Listener
	left atomic.Int64
}

func (l *failing) Accept() (net.Conn, error) {
	if l.left.Add(-1) >= 0 {
		return nil, syscall.EMFILE
	}
	return l.Listener.Accept()
}

// unreachable dials a guest that accepts nothing.
func unreachable(context.Context, int) (net.Conn, error) { return nil, syscall.ECONNREFUSED }

// TestPortOutlivesErrors: a port that cannot accept for a while goes on afterwards, and ends when it is closed.
func TestPortOutlivesErrors(t *testing.T) {
	t.Parallel()
	inner, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &failing{Listener: inner}
	l.left.Store(3)
	run, stop := context.WithCancel(t.Context())
	p := &port{stop: stop}
	p.wg.Go(func() { p.serve(run, l, unreachable) })
	c, err := net.Dial("tcp4", inner.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_ = c.SetReadDeadline(time.Now().Add(time.Minute))
	if _, err := c.Read(make([]byte, 1)); errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error("nobody has accepted the connection")
	}
	p.close()
	if left := l.left.Load(); left >= 0 {
		t.Errorf("%d errors are left", left)
	}
}

// TestConnectionsOfAPortAreBounded: a forwarded port has 256 connections. Others wait in the kernel, and come in when some have ended.
func TestConnectionsOfAPortAreBounded(t *testing.T) {
	t.Parallel()
	const more = 20
	listen := func() net.Listener {
		l, err := net.Listen("tcp4", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = l.Close() })
		return l
	}
	inside, outside := listen(), listen()
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := inside.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				_, _ = io.Copy(io.Discard, c)
				_ = c.Close()
			})
		}
	})
	run, stop := context.WithCancel(t.Context())
	var dials atomic.Int64
	dial := func(ctx context.Context, _ int) (net.Conn, error) {
		var d net.Dialer
		c, err := d.DialContext(ctx, "tcp4", inside.Addr().String())
		dials.Add(1)
		return c, err
	}
	p := &port{stop: stop}
	p.wg.Go(func() { p.serve(run, outside, dial) })
	var clients []net.Conn
	for range maxConnections + more {
		c, err := net.Dial("tcp4", outside.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = c.Close() })
		clients = append(clients, c)
	}
	eventually.True(t, "connections come in", func() bool { return dials.Load() >= maxConnections })
	for end := range more { // the kernel has the connections in their order
		for range 100 { // one that comes in too early does so now
			runtime.Gosched()
		}
		if n := dials.Load(); n != int64(maxConnections+end) {
			t.Fatalf("%d connections came in, and %d have ended", n, end)
		}
		_ = clients[end].Close()
		eventually.True(t, "the next one comes in", func() bool { return dials.Load() == int64(maxConnections+end+1) })
	}
	p.close()
	_ = inside.Close()
	wg.Wait()
}
