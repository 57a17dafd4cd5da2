// Package link serves HTTP to hosts over the agent's channel: one host after the other, each over a multiplexer.
package link

import (
	"context"
	"errors"
	"io"
	"log"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/hashicorp/yamux"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Server answers hosts.
type Server struct {
	log  *slog.Logger
	http *http.Server
}

// New makes a server that answers requests with a handler.
func New(h http.Handler, l *slog.Logger) *Server {
	return &Server{log: l, http: &http.Server{
		Handler:           counted(h),
		ReadHeaderTimeout: 30 * time.Second,
		MaxHeaderBytes:    16 << 10,
		ErrorLog:          log.New(io.Discard, "", 0), // only the host causes connections that end midway
		BaseContext:       baseContext,
	}}
}

// counted runs a request as part of its link's requests.
func counted(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if wg, ok := r.Context().Value(linkKey{}).(*sync.WaitGroup); ok {
			wg.Add(1)
			defer wg.Done()
		}
		if r.Context().Err() != nil {
			return // the link has ended, and the next one may have been answered
		}
		h.ServeHTTP(w, r)
	})
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

// Serve serves hosts on one channel, one after the other, until the channel fails. It closes the channel when ctx ends.
func (s *Server) Serve(ctx context.Context, c *guestapi.Channel) error {
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
		s.serveLink(ctx, link)
	}
}

// serveLink serves one host. When it returns, no request of that host is running any more, so nothing that this host
// asked for happens after the next host got an answer.
func (s *Server) serveLink(ctx context.Context, link *guestapi.Link) {
	ctx, cancel := context.WithCancelCause(ctx)
	mux, err := yamux.Server(link, MuxConfig())
	if err != nil {
		s.log.ErrorContext(ctx, "the multiplexer was not set up", "err", err)
		_ = link.Close()
		cancel(err)
		return
	}
	stop := context.AfterFunc(ctx, func() { _ = mux.Close() })
	var wg sync.WaitGroup
	l := &linkListener{Session: mux, ctx: context.WithValue(ctx, linkKey{}, &wg)}
	go func() {
		<-mux.CloseChan()
		cancel(errEnded)
	}()
	if err := s.http.Serve(l); err != nil && !errors.Is(err, http.ErrServerClosed) {
		s.log.DebugContext(ctx, "connection ended", "err", err)
	}
	stop()
	_ = mux.Close()
	_ = link.Close()
	cancel(errEnded)
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

var errEnded = errors.New("the host's connection ended")

// linkKey is the context key for the group of a link's requests.
type linkKey struct{}

// MuxConfig disables keep-alive and every timeout that would be a timer in an idle guest.
func MuxConfig() *yamux.Config {
	cfg := yamux.DefaultConfig()
	cfg.EnableKeepAlive = false
	cfg.StreamOpenTimeout = 0
	cfg.StreamCloseTimeout = 10 * time.Second
	cfg.ConnectionWriteTimeout = time.Minute
	cfg.LogOutput = io.Discard
	return cfg
}
