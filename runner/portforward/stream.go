package portforward

import (
	"context"
	"errors"
	"net"
	"sync"
	"syscall"

	"github.com/coppice-dev/coppice/core"
)

// maxStreams bounds the connections of one sandbox that Connect has made.
const maxStreams = 512

// stream is a connection that Connect has made, or is making.
type stream struct {
	net.Conn
	end func() // gives its place back

	cancel context.CancelFunc // ends the stream
}

// Close closes the connection. Its place is free again.
func (s *stream) Close() error {
	defer s.end()
	return s.Conn.Close()
}

// Connect connects to a port of the guest, at its address or on its loopback. ctx bounds the dial only. The connection ends with the
// sandbox. The error is PORT_CLOSED if no program listens.
func (p *Ports) Connect(ctx context.Context, guestPort int) (net.Conn, error) {
	life, cancel := context.WithCancel(p.life)
	s := &stream{cancel: cancel}
	s.end = sync.OnceFunc(func() {
		cancel()
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.streams, s)
	})
	if err := p.enter(s); err != nil {
		cancel()
		return nil, err
	}
	ctx, stop := context.WithTimeout(ctx, dialTime)
	defer stop()
	cut := context.AfterFunc(life, stop) // the sandbox may end during the dial
	conn, err := p.dial(ctx, guestPort)
	cut()
	if err != nil {
		s.end()
		if errors.Is(err, syscall.ECONNREFUSED) && core.CodeOf(err) != core.CodeCapacity {
			err = core.Wrapf(err, core.Unavailable, core.CodePortClosed, "no program in the sandbox listens on port %d", guestPort)
		}
		return nil, err
	}
	s.Conn = conn
	context.AfterFunc(life, func() { _ = conn.Close() }) // at the end of the sandbox, at once if it has ended
	return s, nil
}

func (p *Ports) enter(s *stream) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.streams) >= maxStreams {
		return core.Errorf(core.Exhausted, core.CodeCapacity, "sandbox %s has %d connections to its ports, the maximum; close some", p.cfg.Sandbox, len(p.streams))
	}
	p.streams[s] = struct{}{}
	return nil
}
