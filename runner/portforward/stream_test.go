package portforward

import (
	"context"
	"log/slog"
	"net"
	"syscall"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestConnect: a connection ends with the sandbox, a sandbox has so many, and a closed port is said to be closed.
func TestConnect(t *testing.T) {
	t.Parallel()
	guest, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer guest.Close()
	p := New(t.Context(), Config{
		Log: slog.New(slog.DiscardHandler), Places: make(RunnerPlaces, 1),
		Dial: func(ctx context.Context, port int) (net.Conn, error) {
			if port != 80 {
				return nil, syscall.ECONNREFUSED
			}
			return new(net.Dialer).DialContext(ctx, "tcp", guest.Addr().String())
		},
		Agent: func(context.Context) (Agent, error) { return agent{8080}, nil },
	})
	if _, err := p.Connect(t.Context(), 81); core.CodeOf(err) != core.CodePortClosed {
		t.Errorf("a closed port: %v", err)
	}
	loopback, err := p.Connect(t.Context(), 8080)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	open := make([]net.Conn, 0, maxStreams)
	for range maxStreams - 1 {
		c, err := p.Connect(ctx, 80)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	cancel() // it bounds dials only
	if _, err := p.Connect(t.Context(), 80); core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("one too many: %v", err)
	}
	if err := open[0].Close(); err != nil {
		t.Error(err)
	}
	again, err := p.Connect(t.Context(), 80)
	if err != nil {
		t.Fatal(err)
	}
	p.mu.Lock()
	n := len(p.streams)
	p.mu.Unlock()
	if n != maxStreams { // neither the closed port nor the one too many has a place
		t.Errorf("%d streams are counted, want %d", n, maxStreams)
	}
	p.CloseAll()
	for _, c := range []net.Conn{loopback, again, open[1]} {
		if _, err := c.Read(make([]byte, 1)); err == nil {
			t.Error("a connection goes on without its sandbox")
		}
	}
}
