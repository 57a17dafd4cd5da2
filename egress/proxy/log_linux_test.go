package proxy_test

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync/atomic"
	"syscall"
	"testing"

	"github.com/coppice-dev/coppice/egress/proxy"
)

// countingLog counts what is logged.
type countingLog struct {
	slog.Handler
	n *atomic.Int64
}

func (c countingLog) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelInfo {
		c.n.Add(1)
	}
	return c.Handler.Handle(ctx, r)
}

// TestQuietLog: events that a guest can cause at will do not fill the host's log.
func TestQuietLog(t *testing.T) {
	var n atomic.Int64
	w := newWorldWith(t, func(c *proxy.Config) {
		c.Log = slog.New(countingLog{slog.NewTextHandler(t.Output(), nil), &n})
		c.Original = func(net.Conn) (netip.AddrPort, error) { return netip.AddrPort{}, syscall.ENOENT } // as on a host without connection tracking
	})
	for range 300 { // directly to the listener for redirected connections
		c, err := net.Dial("tcp", w.transparent.String())
		if err != nil {
			t.Fatal(err)
		}
		_, _ = c.Read(make([]byte, 1)) // until it is reset
		_ = c.Close()
	}
	if n := n.Load(); n == 0 || n > 30 {
		t.Errorf("300 connections made %d lines", n)
	}
}
