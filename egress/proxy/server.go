package proxy

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"encoding/hex"
	"errors"
	"log/slog"
	"maps"
	"net"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/elazarl/goproxy"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/egress/policy"
)

// Config describes a proxy.
type Config struct {
	Reach    func() policy.Reach // of this moment; required
	Resolver Resolver            // default: the host's
	Journal  Journal             // required
	Roots    *x509.CertPool      // of hosts that sandboxes have grants for; nil: the host's own
	Log      *slog.Logger
	// MaxFlows bounds the connections of one sandbox, and its flows that are under way, default 1024. A connection beyond is reset, a flow refused.
	MaxFlows int
	// FirstTime bounds how long it may take until it is known what a connection is for, and the head of a request; default 15 s.
	FirstTime time.Duration
	// Original tells where a redirected connection was going; default [OriginalDestination].
	Original func(net.Conn) (netip.AddrPort, error)
}

// Sandbox is one whose traffic is carried.
type Sandbox struct {
	ID     core.SandboxID
	Epoch  int64
	Policy policy.Policy
	Grants grant.Bundle
	// Held are hosts that are not reached but through a grant. Those of grants in [grant.ModeHeader] are held anyway.
	Held []grant.Target
	// Alias names the host that the sandbox's resolver gave an address for; nil: no such addresses.
	Alias func(p policy.Policy, a netip.AddrPort) (policy.Host, bool)
}

// Server carries the traffic of sandboxes. It is safe for concurrent use.
type Server struct {
	cfg      Config
	instance string // begins the ids of flows
	flows    atomic.Int64
	said     atomic.Int64 // the second in which something was logged last that a guest can bring about

	handler *goproxy.ProxyHttpServer
	proxied server // requests to a proxy
	based   server // requests to base URLs
	origin  server // requests that think they speak to their origin
	read    server // the same over TLS that ends here

	mu    sync.Mutex // guards boxes
	boxes map[core.SandboxID]*box
	done  bool
}

// server is an HTTP server for connections that are handed to it.
type server struct {
	*http.Server
	queue *queue
}

// idleTime is how long a connection may be kept between requests.
const idleTime = 2 * time.Minute

const maxHead = 64 << 10 // bytes of the head of a request

// New returns a proxy that has no sandboxes yet.
func New(cfg Config) *Server {
	if cfg.Resolver == nil {
		cfg.Resolver = net.DefaultResolver
	}
	if cfg.MaxFlows == 0 {
		cfg.MaxFlows = 1024
	}
	if cfg.FirstTime == 0 {
		cfg.FirstTime = 15 * time.Second
	}
	if cfg.Original == nil {
		cfg.Original = OriginalDestination
	}
	var id [8]byte
	_, _ = rand.Read(id[:]) // never fails
	s := &Server{cfg: cfg, instance: hex.EncodeToString(id[:]), boxes: map[core.SandboxID]*box{}}
	s.handler = s.newHandler()
	s.proxied, s.based = s.newServer(s.serveProxied), s.newServer(s.serveBased)
	s.origin, s.read = s.newServer(s.serveOrigin("http")), s.newServer(s.serveOrigin("https"))
	s.proxied.SetKeepAlivesEnabled(false) // the head of each request is looked at before it is parsed: one for each connection
	return s
}

func (s *Server) newServer(h http.HandlerFunc) server {
	out := server{queue: newQueue(), Server: &http.Server{
		Handler: h, ReadHeaderTimeout: s.cfg.FirstTime, IdleTimeout: idleTime, MaxHeaderBytes: maxHead,
		HTTP2:    &http.HTTP2Config{MaxConcurrentStreams: guestStreams, MaxReceiveBufferPerStream: guestWindow, MaxReceiveBufferPerConnection: guestWindows},
		ErrorLog: slog.NewLogLogger(s.cfg.Log.Handler(), slog.LevelDebug),
		ConnContext: func(ctx context.Context, c net.Conn) context.Context {
			if t, ok := c.(*tls.Conn); ok {
				c = t.NetConn()
			}
			return context.WithValue(ctx, connKey{}, c)
		},
	}}
	go func() {
		if err := out.Serve(out.queue); !errors.Is(err, http.ErrServerClosed) {
			s.cfg.Log.Error("the proxy's server of requests has ended", "err", err)
		}
	}()
	return out
}

type connKey struct{}

// Add begins to serve a sandbox at its listeners, which are the server's from now on; it closes them when it has ended with the sandbox.
// A sandbox that is there already is replaced.
func (s *Server) Add(sb Sandbox, explicit, transparent net.Listener) error {
	g, err := newGranted(sb.Grants, sb.Held)
	if err != nil {
		return errors.Join(err, explicit.Close(), transparent.Close())
	}
	s.Remove(sb.ID)
	b := newBox(s, sb, explicit, transparent)
	b.grants.Store(g)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done {
		return errors.Join(core.Errorf(core.Unavailable, core.CodeInternal, "the egress proxy is stopping"), explicit.Close(), transparent.Close())
	}
	s.boxes[sb.ID] = b
	go b.accept(explicit, b.serveExplicit)
	go b.accept(transparent, b.serveTransparent)
	return nil
}

// SetPolicy gives a sandbox another policy. What is under way and is not allowed any more is ended before it returns. It reports whether the
// sandbox is there.
func (s *Server) SetPolicy(id core.SandboxID, p policy.Policy) bool {
	b := s.box(id)
	if b == nil {
		return false
	}
	b.setPolicy(p)
	return true
}

// SetGrants gives a sandbox other grants. What was begun with one that is not among them, as it was, is ended before it returns, and so are
// tunnels to hosts that are held now. It reports whether the sandbox is there.
func (s *Server) SetGrants(id core.SandboxID, b grant.Bundle, held ...grant.Target) (bool, error) {
	g, err := newGranted(b, held)
	if err != nil {
		return false, err
	}
	box := s.box(id)
	if box == nil {
		return false, nil
	}
	box.setGrants(g)
	return true, nil
}

// Remove ends all that a sandbox has open, and its listeners.
func (s *Server) Remove(id core.SandboxID) {
	s.mu.Lock()
	b := s.boxes[id]
	delete(s.boxes, id)
	s.mu.Unlock()
	if b != nil {
		b.close()
	}
}

func (s *Server) box(id core.SandboxID) *box {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.boxes[id]
}

// Close ends everything.
func (s *Server) Close() error {
	s.mu.Lock()
	s.done = true
	ids := slices.Collect(maps.Keys(s.boxes))
	s.mu.Unlock()
	for _, id := range ids {
		s.Remove(id)
	}
	return errors.Join(s.proxied.Close(), s.based.Close(), s.origin.Close(), s.read.Close())
}

// maySay reports whether to log an event that a guest can cause at will: once a second, so that the log does not fill the host's disk.
func (s *Server) maySay() bool {
	now := time.Now().Unix()
	return s.said.Swap(now) != now
}

func (s *Server) nextID() string {
	return s.instance + "-" + strconv.FormatInt(s.flows.Add(1), 36)
}

// queue is a listener of connections that come from elsewhere.
type queue struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newQueue() *queue { return &queue{conns: make(chan net.Conn), done: make(chan struct{})} }

// put hands a connection over; false when nobody takes any more.
func (q *queue) put(c net.Conn) bool {
	select {
	case q.conns <- c:
		return true
	case <-q.done:
		return false
	}
}

func (q *queue) Accept() (net.Conn, error) {
	select {
	case c := <-q.conns:
		return c, nil
	case <-q.done:
		return nil, net.ErrClosed
	}
}

func (q *queue) Close() error {
	q.once.Do(func() { close(q.done) })
	return nil
}

func (q *queue) Addr() net.Addr { return &net.TCPAddr{} }
