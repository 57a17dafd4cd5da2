//go:build linux

package guestagent

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// queue is a listener in memory; its kernel's queue has no end.
type queue struct {
	waiting chan net.Conn
	closed  chan struct{}
	once    sync.Once
	taken   atomic.Int64
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.waiting:
		q.taken.Add(1)
		return c, nil
	case <-q.closed:
		return nil, net.ErrClosed
	}
}

func (q *queue) Close() error {
	q.once.Do(func() { close(q.closed) })
	return nil
}

func (q *queue) Addr() net.Addr { return named("here") }

// named is a connection's address, and the connection.
type named string

func (n named) Network() string { return "memory" }
func (n named) String() string  { return string(n) }

type namedConn struct {
	net.Conn
	from named
}

func (c namedConn) RemoteAddr() net.Addr { return c.from }

func (q *queue) dial(from named) net.Conn {
	host, guest := net.Pipe()
	q.waiting <- namedConn{guest, from}
	return host
}

// TestHostsAreBounded: over vsock the agent holds the connections of maxHosts hosts. The next one waits until one of them has gone, and is
// answered then. Who is no host takes no place.
func TestHostsAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		a := linkAgent(t)
		l := &queue{waiting: make(chan net.Conn, 100), closed: make(chan struct{})}
		ctx, cancel := context.WithCancel(t.Context())
		ended := make(chan error, 1)
		go func() { ended <- a.serveHosts(ctx, l, func(from net.Addr) bool { return from == named("host") }) }()
		for range 3 * maxHosts { // processes of the guest
			c := l.dial("guest")
			if _, err := c.Read(make([]byte, 1)); !errors.Is(err, io.EOF) {
				t.Errorf("a process of the guest: %v, want the end of the connection", err)
			}
		}
		var hosts []net.Conn
		for range maxHosts + 2 {
			hosts = append(hosts, l.dial("host"))
		}
		taken := func(want int) {
			t.Helper()
			synctest.Wait()
			if n := int(l.taken.Load()) - 3*maxHosts; n != want {
				t.Errorf("%d hosts are served, want %d", n, want)
			}
		}
		taken(maxHosts)
		_ = hosts[0].Close()
		taken(maxHosts + 1)
		for _, i := range []int{maxHosts - 1, maxHosts} { // one who was there, and one who waited
			link, err := guestapi.Greet(ctx, hosts[i])
			if err != nil {
				t.Errorf("host %d: %v", i, err)
			} else if err := link.Close(); err != nil {
				t.Error(err)
			}
		}
		cancel()
		if err := <-ended; err != nil {
			t.Error(err)
		}
		for _, c := range hosts {
			_ = c.Close()
		}
		for len(l.waiting) > 0 {
			_ = (<-l.waiting).Close()
		}
	})
}
