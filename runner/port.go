package runner

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/hostport"
)

// port forwards connections from an address of the host to a port of one guest. The socket to the guest is made inside the
// sandbox's namespace and used from outside, so that no route leads in or out.
type port struct {
	runnerapi.Port
	stop  context.CancelFunc
	wg    sync.WaitGroup
	state atomic.Value // of string: one of the states below
}

// The states of a forwarded port.
const (
	portListening = "listening"
	portWaiting   = "waiting" // somebody else has the address; it is tried again
	portRefused   = "refused" // the operator allows its address no longer
)

func newPort(p runnerapi.Port, stop context.CancelFunc, state string) *port {
	out := &port{Port: p, stop: stop}
	out.state.Store(state)
	return out
}

// dialTime bounds how long a guest may take to accept a connection. One that has no such address any more never does.
const dialTime = 10 * time.Second

// maxConnections bounds the connections of one forwarded port; further ones wait in the kernel's queue.
const maxConnections = 256

// acceptPause is how long a port rests that could not accept a connection.
const acceptPause = 50 * time.Millisecond

// maxPorts bounds the forwarded ports of one sandbox.
const maxPorts = 64

// OpenPort starts forwarding. Repeating it with the same id returns what is there.
func (r *Runner) OpenPort(ctx context.Context, id core.SandboxID, want runnerapi.Port) (runnerapi.Port, error) {
	s, err := r.find(id)
	if err != nil {
		return runnerapi.Port{}, err
	}
	if want.GuestPort < 1 || want.GuestPort > 65535 {
		return runnerapi.Port{}, core.Errorf(core.Invalid, core.CodeInvalidField, "guest_port is %d; it must be between 1 and 65535", want.GuestPort)
	}
	if err := s.lock(ctx); err != nil {
		return runnerapi.Port{}, err
	}
	defer s.unlock()
	if state := s.snapshot().State; state != runnerapi.SandboxReady {
		return runnerapi.Port{}, core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "sandbox %s is %s; a port can be forwarded once it is ready", id, state)
	}
	p, err := r.listen(ctx, s, want)
	if err != nil {
		return runnerapi.Port{}, err
	}
	if err := s.recordPorts(); err != nil {
		s.closePort(want.ID)
		return runnerapi.Port{}, err
	}
	return p, nil
}

func (r *Runner) listen(ctx context.Context, s *sandbox, want runnerapi.Port) (runnerapi.Port, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if p, ok := s.ports[want.ID]; ok {
		return p.Port, nil
	}
	if len(s.ports) >= maxPorts {
		return runnerapi.Port{}, core.Errorf(core.Exhausted, core.CodeQuotaExceeded, "the workspace has %d forwarded ports, the maximum; close one first", len(s.ports))
	}
	l, err := r.listenOn(ctx, want)
	if err != nil {
		return runnerapi.Port{}, err
	}
	run, stop := context.WithCancel(r.runCtx)
	want.Listen, want.HostPort = l.Address(), 0
	p := newPort(want, stop, portListening)
	p.wg.Go(func() { p.serve(run, l, s.ns, s.target(want)) })
	s.ports[want.ID] = p
	return p.Port, nil
}

func (r *Runner) listenOn(ctx context.Context, p runnerapi.Port) (*hostport.Listener, error) {
	want := hostport.Want{Address: p.Listen.Addr(), Port: p.Listen.Port()}
	if !want.Address.IsValid() {
		want.Port = p.HostPort
	}
	return r.hostPorts.Listen(ctx, want)
}

func (s *sandbox) target(p runnerapi.Port) netip.AddrPort {
	return netip.AddrPortFrom(s.info.Identity.IP, uint16(p.GuestPort))
}

// reopenPorts forwards the ports of an adopted sandbox again, at the addresses that they had. If somebody else has taken one
// meanwhile, the runner tries again until it is free or the port is closed. If the operator allows an address no longer, its port is
// refused for good. The metric coppice_runner_ports shows both.
func (r *Runner) reopenPorts(s *sandbox) {
	const again = 2 * time.Second
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, want := range s.Sandbox.Ports {
		run, stop := context.WithCancel(r.runCtx)
		p := newPort(want, stop, portListening)
		s.ports[want.ID] = p
		l, err := r.listenOn(run, want)
		if core.CodeOf(err) == core.CodePortNotAllowed {
			p.state.Store(portRefused)
			r.cfg.Log.Warn("port is not forwarded: its address is not allowed any more", "sandbox_id", s.info.ID, "port_id", want.ID, "listen", want.Listen, "err", err)
			continue
		}
		if err != nil {
			p.state.Store(portWaiting)
			r.cfg.Log.Warn("port is not forwarded for now", "sandbox_id", s.info.ID, "port_id", want.ID, "listen", want.Listen, "err", err)
		}
		p.wg.Go(func() {
			tick := time.NewTicker(again)
			defer tick.Stop()
			for l == nil {
				select {
				case <-run.Done():
					return
				case <-tick.C:
				}
				l, _ = r.listenOn(run, want) // the log has said so already
			}
			p.state.Store(portListening)
			p.serve(run, l, s.ns, s.target(want))
		})
	}
}

// recordPorts notes the ports that there are in the journal.
func (s *sandbox) recordPorts() error {
	s.mu.Lock()
	ports := make([]runnerapi.Port, 0, len(s.ports))
	for _, p := range s.ports {
		ports = append(ports, p.Port)
	}
	s.mu.Unlock()
	return s.record(func(j *sandboxJournal) { j.Ports = ports })
}

// ClosePort stops forwarding and ends its connections. Closing an absent port is no error.
func (r *Runner) ClosePort(id core.SandboxID, portID core.PortID) error {
	s, err := r.find(id)
	if core.CategoryOf(err) == core.NotFound {
		return nil
	}
	s.closePort(portID)
	return ignoreAbsent(s.recordPorts()) // the sandbox may be taken down meanwhile
}

func (s *sandbox) closePort(id core.PortID) {
	s.mu.Lock()
	p := s.ports[id]
	delete(s.ports, id)
	s.mu.Unlock()
	if p != nil {
		p.close()
	}
}

func (s *sandbox) closePorts() {
	s.mu.Lock()
	all := s.ports
	s.ports = make(map[core.PortID]*port)
	s.mu.Unlock()
	for _, p := range all {
		p.close()
	}
}

func (p *port) close() {
	p.stop()
	p.wg.Wait()
}

func (p *port) serve(ctx context.Context, listener net.Listener, ns Namespace, target netip.AddrPort) {
	cut := context.AfterFunc(ctx, func() { _ = listener.Close() }) // its only effect is that Accept ends
	defer cut()
	defer listener.Close()
	places := make(chan struct{}, maxConnections)
	for {
		select {
		case places <- struct{}{}:
		case <-ctx.Done():
			return
		}
		c, err := listener.Accept()
		if err != nil {
			<-places
			if errors.Is(err, net.ErrClosed) || ctx.Err() != nil {
				return
			}
			pause(ctx, acceptPause) // for one, the process has no file descriptor left
			continue
		}
		p.wg.Go(func() {
			defer func() { <-places }()
			_ = forward(ctx, c, ns, target) // either end may hang up at any time; there is nobody to tell
		})
	}
}

// forward copies both ways until either end has finished and the other was told, or ctx ends.
func forward(ctx context.Context, outside net.Conn, ns Namespace, target netip.AddrPort) error {
	defer outside.Close()
	dial, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	inside, err := ns.Dial(dial, "tcp", target.String())
	if err != nil {
		return fmt.Errorf("reach port %d of the guest: %w", target.Port(), err)
	}
	defer inside.Close()
	cut := context.AfterFunc(ctx, func() { _ = errors.Join(outside.Close(), inside.Close()) })
	defer cut()
	var wg sync.WaitGroup
	for _, way := range [][2]net.Conn{{outside, inside}, {inside, outside}} {
		wg.Go(func() {
			_, _ = io.Copy(way[1], way[0])
			if half, ok := way[1].(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite()
			}
		})
	}
	wg.Wait()
	return nil
}

// portStates counts the forwarded ports of all sandboxes by their state.
func (r *Runner) portStates() map[string]int {
	r.mu.Lock()
	list := slices.Collect(maps.Values(r.sandboxes))
	r.mu.Unlock()
	n := map[string]int{portListening: 0, portWaiting: 0, portRefused: 0}
	for _, s := range list {
		s.mu.Lock()
		for _, p := range s.ports {
			n[p.state.Load().(string)]++
		}
		s.mu.Unlock()
	}
	return n
}
