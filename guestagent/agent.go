//go:build linux

package guestagent

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/guestagent/files"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/reseal"
	"github.com/coppice-dev/coppice/guestagent/sessions"
	"github.com/coppice-dev/coppice/guestagent/userthread"
	"github.com/coppice-dev/coppice/guestagent/watch"
	"github.com/coppice-dev/coppice/guestagent/workload"
)

// Config configures the agent.
type Config struct {
	Logger *slog.Logger
	// Wrap, unless it is nil, is put in front of every route. The agent of an image has none; tests that simulate a
	// lying agent have one.
	Wrap func(http.Handler) http.Handler
}

// Agent serves a host for one guest.
type Agent struct {
	log       *slog.Logger
	work      work
	sessions  *sessions.Server
	files     *files.Server
	watches   watch.Watches
	gate      *gate
	reseal    *reseal.Resealer
	disk      *flusher
	bootNonce string
	http      *http.Server
	idle      idler
}

// work is the workload, as the agent uses it.
type work interface {
	sessions.Workload
	reseal.Workload

	// Join moves the calling thread for good to where Inside runs functions. The thread must be locked to its goroutine.
	Join() error
	// Freeze stops every process of the workload and returns their number. If it fails, everything runs again.
	Freeze(ctx context.Context, timeout time.Duration) (int, error)
	// Thaw undoes Freeze. It is idempotent.
	Thaw(ctx context.Context) error
	// Proc is the directory under which the agent sees the workload's own /proc.
	Proc() string
}

// newAgent makes an agent. statePath is the file with the state that outlives the agent.
func newAgent(cfg Config, w work, statePath string) *Agent {
	var nonce [8]byte
	_, _ = rand.Read(nonce[:]) // never fails
	a := &Agent{log: cfg.Logger, work: w, bootNonce: hex.EncodeToString(nonce[:]), disk: newFlusher(workload.DiskMount)}
	a.files = &files.Server{Inside: w.Inside, As: userthread.New(w.Join).As}
	a.gate = loadGate(statePath, a.bootNonce)
	a.sessions = sessions.New(w, a.gate.pass)
	a.reseal = reseal.New(w, reseal.Steps())
	handler := a.routes()
	if cfg.Wrap != nil {
		handler = cfg.Wrap(handler)
	}
	a.http = &http.Server{
		Handler:           handler,
		ReadHeaderTimeout: 30 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          log.New(io.Discard, "", 0), // only the host causes connections that end midway
		BaseContext:       baseContext,
	}
	return a
}

// linkListener hands the streams of one link's multiplexer to the HTTP server, with the context of the link.
type linkListener struct {
	*yamux.Session
	ctx context.Context // context of the link: ends with the link, whatever its streams do
}

// Accept returns the next stream.
func (l *linkListener) Accept() (net.Conn, error) { return l.Session.Accept() }

func baseContext(l net.Listener) context.Context {
	if ll, ok := l.(*linkListener); ok {
		return ll.ctx
	}
	return context.Background()
}

// serveChannel serves hosts on one channel, one after the other, until the channel fails.
func (a *Agent) serveChannel(ctx context.Context, c *guestapi.Channel) error {
	stop := context.AfterFunc(ctx, func() { _ = c.Close() })
	defer stop()
	for {
		link, err := c.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil // the channel was closed because the agent stops
			}
			return err
		}
		a.serveLink(ctx, link)
	}
}

// serveLink serves one host. When it returns, no request of that host is running any more, so nothing that this host
// asked for happens after the next host got an answer.
func (a *Agent) serveLink(ctx context.Context, link *guestapi.Link) {
	ctx, cancel := context.WithCancelCause(ctx)
	mux, err := yamux.Server(link, muxConfig())
	if err != nil {
		a.log.ErrorContext(ctx, "the multiplexer was not set up", "err", err)
		_ = link.Close()
		cancel(err)
		return
	}
	stop := context.AfterFunc(ctx, func() { _ = mux.Close() })
	var wg sync.WaitGroup
	l := &linkListener{Session: mux, ctx: context.WithValue(ctx, linkKey{}, &wg)}
	go func() {
		<-mux.CloseChan()
		cancel(errLinkEnded)
	}()
	if err := a.http.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
		a.log.DebugContext(ctx, "connection ended", "err", err)
	}
	stop()
	_ = mux.Close()
	_ = link.Close()
	cancel(errLinkEnded)
	waitAtMost(&wg, linkGrace)
}

// linkGrace bounds how long a request of an old link can delay the next link: it may hang in a file system that the
// frozen workload itself serves.
const linkGrace = time.Second

func waitAtMost(wg *sync.WaitGroup, d time.Duration) {
	done := make(chan struct{})
	go func() {
		wg.Wait()
		close(done)
	}()
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-done:
	case <-timer.C:
	}
}

var errLinkEnded = errors.New("the host's connection ended")

// linkKey is the context key for the group of a link's requests.
type linkKey struct{}

// muxConfig disables keep-alive and every timeout that would be a timer in an idle guest.
func muxConfig() *yamux.Config {
	cfg := yamux.DefaultConfig()
	cfg.EnableKeepAlive = false
	cfg.StreamOpenTimeout = 0
	cfg.StreamCloseTimeout = 10 * time.Second
	cfg.ConnectionWriteTimeout = time.Minute
	cfg.LogOutput = io.Discard
	return cfg
}
