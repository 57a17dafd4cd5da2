package guest

import (
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/test/testleak"
)

func TestMain(m *testing.M) { testleak.Main(m) }

// fakeGuest is whatever a test wants to stand at the other end of the channel.
type fakeGuest struct {
	t    *testing.T
	path string
	wg   sync.WaitGroup
}

// listen accepts connections as a VMM does, and hands each to serve.
func listen(t *testing.T, serve func(n int, conn net.Conn)) *fakeGuest {
	t.Helper()
	g := &fakeGuest{t: t, path: filepath.Join(t.TempDir(), "s")}
	l, err := net.Listen("unix", g.path)
	if err != nil {
		t.Fatal(err)
	}
	var mu sync.Mutex
	var conns []net.Conn
	g.wg.Go(func() {
		for n := 0; ; n++ {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			mu.Lock()
			conns = append(conns, conn)
			mu.Unlock()
			g.wg.Go(func() { serve(n, conn) })
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		mu.Lock()
		for _, c := range conns {
			_ = c.Close()
		}
		mu.Unlock()
		g.wg.Wait()
	})
	return g
}

func (g *fakeGuest) connect(ctx context.Context) (net.Conn, error) {
	var d net.Dialer
	return d.DialContext(ctx, "unix", g.path)
}

func (g *fakeGuest) dial() *Client {
	g.t.Helper()
	ctx, cancel := context.WithTimeout(g.t.Context(), 3*time.Minute)
	defer cancel()
	c, err := Dial(ctx, g.connect)
	if err != nil {
		g.t.Fatal(err)
	}
	g.t.Cleanup(func() { _ = c.Close() })
	return c
}

// greeted does the guest's part of the handshake.
func greeted(conn net.Conn) (*guestapi.Link, error) {
	s, ok := conn.(guestapi.Stream)
	if !ok {
		return nil, errors.New("not a stream")
	}
	return guestapi.NewChannel(s).Accept()
}

// serveHTTP is a guest whose agent answers with the handler.
func serveHTTP(t *testing.T, h http.HandlerFunc) *Client {
	t.Helper()
	return listen(t, func(_ int, conn net.Conn) {
		link, err := greeted(conn)
		if err != nil {
			return
		}
		cfg := yamux.DefaultConfig()
		cfg.EnableKeepAlive, cfg.LogOutput = false, io.Discard
		mux, err := yamux.Server(link, cfg)
		if err != nil {
			t.Error(err)
			return
		}
		_ = http.Serve(mux, h)
		_ = mux.Close()
	}).dial()
}

// serveRaw is a guest whose agent keeps to the handshake and to nothing else.
func serveRaw(t *testing.T, misbehave func(link *guestapi.Link)) *Client {
	t.Helper()
	return listen(t, func(_ int, conn net.Conn) {
		if link, err := greeted(conn); err == nil {
			misbehave(link)
		}
	}).dial()
}
