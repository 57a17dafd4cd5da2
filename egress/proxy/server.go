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
	"github.com/coppice-dev/coppice/egress/policy"
)

// Config describes a proxy.
type Config struct {
	Reach    func() policy.Reach // returns the current value; required
	Resolver Resolver            // default: the host's
	Journal  Journal             // required
	Roots    *x509.CertPool      // for the certificates of hosts with grants; nil: those of this machine
	Log      *slog.Logger
	// MaxFlows bounds the connections of one sandbox, and also its flows under way; default 1024. Beyond it, a
	// connection is reset and a flow is refused.
	MaxFlows int
	// FirstTime bounds the time until the destination of a connection is known, and the time for the head of a request;
	// default 15 s.
	FirstTime time.Duration
	// Original returns the destination of a connection before it was redirected; default [OriginalDestination].
	Original func(net.Conn) (netip.AddrPort, error)
}

// Sandbox describes a sandbox whose traffic the proxy carries.
type Sandbox struct {
	ID    core.SandboxID
	Epoch int64
	Rules Rules
	// Alias returns the host for which the sandbox's resolver gave an address; nil: the resolver gives no such
	// addresses.
	Alias func(p policy.Policy, a netip.AddrPort) (policy.Host, bool)
}

// Server carries the traffic of sandboxes. It is safe for concurrent use.
type Server struct {
	cfg      Config
	instance string // prefix of flow ids
	flows    atomic.Int64
	said     atomic.Int64 // the second of the last log line about an event that a guest can cause

	handler *goproxy.ProxyHttpServer
	proxied server // requests to a proxy
	based   server // requests to base URLs
	origin  server // requests from programs that do not know of the proxy
	read    server // the same, over TLS that the proxy terminates

	mu        sync.Mutex // guards sandboxes
	sandboxes map[core.SandboxID]*sandbox
	done      bool
}

// server is an HTTP server for connections that are passed to its queue.
type server struct {
	*http.Server
	queue *queue
}

// idleTime is the time that a connection may be idle between requests.
const idleTime = 2 * time.Minute

const maxHead = 64 << 10 // of a request's head, in bytes

// New returns a proxy without sandboxes.
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
	s := &Server{cfg: cfg, instance: hex.EncodeToString(id[:]), sandboxes: map[core.SandboxID]*sandbox{}}
	s.handler = s.newHandler()
	s.proxied, s.based = s.newServer(s.serveProxied), s.newServer(s.serveBased)
	s.origin, s.read = s.newServer(s.serveOrigin("http")), s.newServer(s.serveOrigin("https"))
	s.proxied.SetKeepAlivesEnabled(false) // only the head of a connection's first request is checked before net/http parses it, so one request for each connection
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
			s.cfg.Log.Error("the proxy's HTTP server has ended", "err", err)
		}
	}()
	return out
}

type connKey struct{}

// Add begins to serve a sandbox at its listeners. The server owns them from now on: it closes them when the sandbox
// ends, or when the server ends. A sandbox with the same id is replaced.
func (s *Server) Add(sb Sandbox, explicit, transparent net.Listener) error {
	r, err := newRules(sb.Rules)
	if err != nil {
		return errors.Join(err, explicit.Close(), transparent.Close())
	}
	s.Remove(sb.ID)
	b := newSandbox(s, sb, r, explicit, transparent)
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.done {
		return errors.Join(core.Errorf(core.Unavailable, core.CodeInternal, "the egress proxy is stopping"), explicit.Close(), transparent.Close())
	}
	s.sandboxes[sb.ID] = b
	go b.accept(explicit, b.serveExplicit)
	go b.accept(transparent, b.serveTransparent)
	return nil
}

// SetRules replaces the rules of a sandbox. No decision about a flow mixes the old rules and the new ones. When it
// returns, all of these have ended: flows that the new policy does not allow, flows of a grant that is missing or
// different now, and tunnels to hosts that are held now. After an error the old rules are in force. It reports whether
// the sandbox exists.
func (s *Server) SetRules(id core.SandboxID, next Rules) (bool, error) {
	r, err := newRules(next)
	if err != nil {
		return false, err
	}
	b := s.sandbox(id)
	if b == nil {
		return false, nil
	}
	b.setRules(r)
	return true, nil
}

// Remove ends everything that a sandbox has open, and closes its listeners.
func (s *Server) Remove(id core.SandboxID) {
	s.mu.Lock()
	b := s.sandboxes[id]
	delete(s.sandboxes, id)
	s.mu.Unlock()
	if b != nil {
		b.close()
	}
}

func (s *Server) sandbox(id core.SandboxID) *sandbox {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.sandboxes[id]
}

// Close ends everything.
func (s *Server) Close() error {
	s.mu.Lock()
	s.done = true
	ids := slices.Collect(maps.Keys(s.sandboxes))
	s.mu.Unlock()
	for _, id := range ids {
		s.Remove(id)
	}
	return errors.Join(s.proxied.Close(), s.based.Close(), s.origin.Close(), s.read.Close())
}

// maySay reports whether to log an event that a guest can cause at will: at most once a second, so that the log does
// not fill the host's disk.
func (s *Server) maySay() bool {
	now := time.Now().Unix()
	return s.said.Swap(now) != now
}

func (s *Server) nextID() string {
	return s.instance + "-" + strconv.FormatInt(s.flows.Add(1), 36)
}

// queue is a listener whose connections are passed to it by put.
type queue struct {
	conns chan net.Conn
	once  sync.Once
	done  chan struct{}
}

func newQueue() *queue { return &queue{conns: make(chan net.Conn), done: make(chan struct{})} }

// put passes a connection on; it returns false when the queue is closed.
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
