// Package testegress gives tests of runners a real egress process, without the namespaces of real
// sandboxes. The process is the test program itself.
package testegress

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/egress/egressapi"
	"github.com/coppice-dev/coppice/egress/host"
	"github.com/coppice-dev/coppice/internal/sidecar"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/netns"
)

const argument = "be-an-egress-process"

// Settings configure an egress process.
type Settings struct {
	Names   string         // host:port of a name server; empty: no name has an address
	Private []netip.Prefix // see host.Config

	Dir, Spool string // set by Process
}

// Enter makes this program an egress process if Process has started it as one. TestMain calls it first.
func Enter() {
	if len(os.Args) < 2 || os.Args[1] != argument {
		return
	}
	if err := serve(os.Stdin); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	os.Exit(0)
}

func serve(config io.Reader) error {
	var cfg Settings
	if err := json.NewDecoder(config).Decode(&cfg); err != nil {
		return err
	}
	if err := os.MkdirAll(cfg.Spool, 0o700); err != nil {
		return err
	}
	spool, err := os.OpenRoot(cfg.Spool)
	if err != nil {
		return err
	}
	listen, err := sidecar.Listen(egress.SocketPath(cfg.Dir))
	if err != nil {
		return err
	}
	names := []string{cfg.Names}
	if cfg.Names == "" {
		names[0] = "127.0.0.1:0" // nobody
	}
	s, err := host.New(context.Background(), host.Config{
		NamesAt: names,
		Listen:  listen, Spool: spool, UID: uint32(os.Geteuid()), //nolint:gosec // G115: the id of a user
		Log: slog.New(slog.NewTextHandler(os.Stderr, nil)), Private: cfg.Private,
		Resolver: &net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			if cfg.Names == "" {
				return nil, syscall.ECONNREFUSED
			}
			var d net.Dialer
			return d.DialContext(ctx, network, cfg.Names)
		}},
	})
	if err != nil {
		return err
	}
	return s.Run(context.Background())
}

// Process returns an egress process that a runner can start. It ends with the test, if it still runs then.
func Process(tb testing.TB, cfg Settings) *egress.Process {
	tb.Helper()
	dir := ShortDir(tb)
	tb.Cleanup(func() { _ = egress.NewClient(egress.SocketPath(dir)).Stop(context.WithoutCancel(tb.Context())) })
	cfg.Dir, cfg.Spool = dir, filepath.Join(dir, "spool")
	config, err := json.Marshal(cfg)
	if err != nil {
		tb.Fatal(err)
	}
	return &egress.Process{Dir: dir, Command: []string{os.Args[0], argument}, Config: config}
}

// ShortDir makes a directory whose path is short enough for sockets. It is removed with the test.
func ShortDir(tb testing.TB) string {
	tb.Helper()
	dir, err := os.MkdirTemp("", "egress") //nolint:usetesting // the path of a socket must be short
	if err != nil {
		tb.Fatal(err)
	}
	tb.Cleanup(func() { _ = os.RemoveAll(dir) })
	return dir
}

// Client returns a client of a process, once the process runs.
func Client(tb testing.TB, p *egress.Process) *egress.Client {
	tb.Helper()
	c := egress.NewClient(egress.SocketPath(p.Dir))
	eventually.True(tb, "the egress process answers", func() bool { _, err := c.Hello(tb.Context()); return err == nil })
	return c
}

// Hello asks a process who it is.
func Hello(tb testing.TB, c *egress.Client) egressapi.Hello {
	tb.Helper()
	h, err := c.Hello(tb.Context())
	if err != nil {
		tb.Fatal(err)
	}
	return h
}

// What a guest is answered when it asks the proxy for a host. No host has an address.
const (
	Allowed = http.StatusBadGateway
	Denied  = http.StatusForbidden
)

// Ask asks for a host through a proxy. It returns 0 when the proxy does not answer.
func Ask(tb testing.TB, proxy, name string) int {
	tb.Helper()
	c := &http.Client{Timeout: time.Minute, Transport: &http.Transport{Proxy: http.ProxyURL(&url.URL{Scheme: "http", Host: proxy}), DisableKeepAlives: true}}
	resp, err := c.Get("http://" + name + "/") //nolint:noctx // it has a limit
	if err != nil {
		return 0
	}
	_ = resp.Body.Close()
	return resp.StatusCode
}

// Want wants an answer for a host through a proxy.
func Want(tb testing.TB, proxy, name string, status int) {
	tb.Helper()
	if got := Ask(tb, proxy, name); got != status {
		tb.Errorf("%s: %d, want %d", name, got, status)
	}
}

// Sockets are egress sockets of a sandbox on the loopback device. The zero value is ready for use.
type Sockets struct {
	mu sync.Mutex // guards at
	at [3]string  // their addresses, once they were opened: the proxy's, that of intercepted connections, the resolver's
}

// Proxy is the address of the proxy; empty before the first Open.
func (s *Sockets) Proxy() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at[0]
}

// Resolver is the address of the resolver; empty before the first Open.
func (s *Sockets) Resolver() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.at[2]
}

// Open opens the sockets, every time at the same addresses.
func (s *Sockets) Open(ctx context.Context) (out netns.EgressSockets, err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	defer func() {
		if err != nil {
			err = errors.Join(err, out.Close())
		}
	}()
	for i, f := range []**os.File{&out.Proxy, &out.Intercepted, &out.ResolverTCP} {
		if s.at[i] == "" {
			s.at[i] = "127.0.0.1:0"
		}
		l, err := (&net.ListenConfig{}).Listen(ctx, "tcp4", s.at[i])
		if err != nil {
			return out, err
		}
		s.at[i] = l.Addr().String()
		*f, err = l.(*net.TCPListener).File()
		if err = errors.Join(err, l.Close()); err != nil {
			return out, err
		}
	}
	u, err := (&net.ListenConfig{}).ListenPacket(ctx, "udp4", s.at[2])
	if err != nil {
		return out, err
	}
	out.ResolverUDP, err = u.(*net.UDPConn).File()
	return out, errors.Join(err, u.Close())
}
