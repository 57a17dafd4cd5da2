// Package portforward owns the forwarded ports of one sandbox. Each port forwards connections from an
// address of the host to a port of the guest. It listens only on addresses that package hostport
// allows, and connects to the guest through a callback. It opens no route into the sandbox's network
// or out of it.
package portforward

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/hostport"
)

// Config configures the ports of a sandbox. Every field is required.
type Config struct {
	Sandbox core.SandboxID
	Host    *hostport.Host
	Log     *slog.Logger
	// Dial connects to a port of the guest, at the guest's address.
	Dial func(ctx context.Context, guestPort int) (net.Conn, error)
	// Agent returns the guest's agent, which connects to the guest's loopback.
	Agent  func(ctx context.Context) (Agent, error)
	Places RunnerPlaces // for connections of the agents
}

// Agent is what Ports need of the agent of a guest.
type Agent interface {
	// Ports lists the ports of the guest on which a program listens.
	Ports(ctx context.Context) (guestapi.Ports, error)
	// DialPort connects to a port on the guest's loopback.
	DialPort(ctx context.Context, port int) (net.Conn, error)
}

// Ports are the forwarded ports of one sandbox. Its methods are safe for concurrent use.
type Ports struct {
	cfg      Config
	life     context.Context // of the runner
	loopback places

	mu      sync.Mutex // guards what follows; it is also held while a port begins to listen on an address
	ports   map[core.PortID]*port
	streams map[*stream]struct{} // that Connect has made
}

// port is one forwarded port.
type port struct {
	runnerapi.Port
	stop  context.CancelFunc
	wg    sync.WaitGroup
	state atomic.Value // a State
}

// State says whether a port forwards.
type State string

// The states of a forwarded port.
const (
	Listening State = "listening"
	Waiting   State = "waiting" // another process has the address; the port tries again
	Refused   State = "refused" // the operator does not allow the address any more
)

// dialTime bounds how long a guest may take to accept a connection. A guest that has lost the address never accepts one.
const dialTime = 10 * time.Second

// maxConnections bounds the connections of one forwarded port. Further ones wait in the kernel's queue.
const maxConnections = 256

// acceptPause is how long a port waits after it could not accept a connection.
const acceptPause = 50 * time.Millisecond

// Max bounds the forwarded ports of one sandbox.
const Max = 64

// reopenPause is how long a port waits before it tries again to listen on an address that was taken.
const reopenPause = 2 * time.Second

// New returns ports that close when life ends, at the latest.
func New(life context.Context, cfg Config) *Ports {
	return &Ports{cfg: cfg, life: life, ports: make(map[core.PortID]*port), streams: make(map[*stream]struct{}), loopback: places{
		sandbox: make(chan struct{}, maxSandboxLoopback), runner: cfg.Places, refused: func() {
			cfg.Log.DebugContext(life, "connection to a forwarded port is refused: too many lead to the loopback of guests", "sandbox_id", cfg.Sandbox)
		},
	}}
}

// Open begins to forward a port. If there is a port with the same id, Open returns that one.
func (p *Ports) Open(ctx context.Context, want runnerapi.Port) (runnerapi.Port, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if there, ok := p.ports[want.ID]; ok {
		return there.Port, nil
	}
	if len(p.ports) >= Max {
		return runnerapi.Port{}, core.Errorf(core.Exhausted, core.CodeQuotaExceeded,
			"the workspace has %d forwarded ports, the maximum; close one first", len(p.ports))
	}
	l, err := p.listen(ctx, want)
	if err != nil {
		return runnerapi.Port{}, err
	}
	want.Listen, want.HostPort = l.Address(), 0
	run, one := p.add(want, Listening)
	one.wg.Go(func() { one.serve(run, l, p.dial) })
	return one.Port, nil
}

// add makes a port and the context run, which ends with the port. The caller holds mu.
func (p *Ports) add(want runnerapi.Port, state State) (run context.Context, one *port) {
	run, stop := context.WithCancel(p.life)
	one = &port{Port: want, stop: stop}
	one.state.Store(state)
	p.ports[want.ID] = one
	return run, one
}

func (p *Ports) listen(ctx context.Context, at runnerapi.Port) (*hostport.Listener, error) {
	want := hostport.Want{Address: at.Listen.Addr(), Port: at.Listen.Port()}
	if !want.Address.IsValid() {
		want.Port = at.HostPort
	}
	return p.cfg.Host.Listen(ctx, want)
}

// Reopen forwards the ports of an earlier runner again, at the addresses that they had. If another process has taken an address, the
// port tries again until the address is free or the port is closed. If the operator does not allow an address any more, its port stays
// refused. Count shows both.
func (p *Ports) Reopen(ports []runnerapi.Port) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, want := range ports {
		run, one := p.add(want, Listening)
		l, err := p.listen(run, want)
		if core.CodeOf(err) == core.CodePortNotAllowed {
			one.state.Store(Refused)
			p.cfg.Log.Warn("port is not forwarded: its address is not allowed any more",
				"sandbox_id", p.cfg.Sandbox, "port_id", want.ID, "listen", want.Listen, "err", err)
			continue
		}
		if err != nil {
			one.state.Store(Waiting)
			p.cfg.Log.Warn("port is not forwarded for now", "sandbox_id", p.cfg.Sandbox, "port_id", want.ID, "listen", want.Listen, "err", err)
		}
		one.wg.Go(func() {
			tick := time.NewTicker(reopenPause)
			defer tick.Stop()
			for l == nil {
				select {
				case <-run.Done():
					return
				case <-tick.C:
				}
				l, _ = p.listen(run, want) // an error is already in the log
			}
			one.state.Store(Listening)
			one.serve(run, l, p.dial)
		})
	}
}

// dial connects to a port of the guest. If nobody listens on the guest's address, the agent connects to its loopback,
// where most development servers listen.
func (p *Ports) dial(ctx context.Context, port int) (net.Conn, error) {
	conn, err := p.cfg.Dial(ctx, port)
	if err == nil || !errors.Is(err, syscall.ECONNREFUSED) {
		return conn, err
	}
	conn, agentErr := p.loopback.dial(func() (net.Conn, error) {
		agent, err := p.cfg.Agent(ctx)
		if err != nil {
			return nil, err
		}
		return agent.DialPort(ctx, port)
	})
	if agentErr != nil {
		return nil, errors.Join(agentErr, err)
	}
	return conn, nil
}

// GuestRefuses reports whether the agent says that no program listens on a port of the guest.
func (p *Ports) GuestRefuses(ctx context.Context, port int) bool {
	agent, err := p.cfg.Agent(ctx)
	if err != nil {
		return false
	}
	list, err := agent.Ports(ctx)
	return err == nil && !slices.ContainsFunc(list.Ports, func(p guestapi.Port) bool { return p.Port == port })
}

// List returns the ports, in no order.
func (p *Ports) List() []runnerapi.Port {
	p.mu.Lock()
	defer p.mu.Unlock()
	out := make([]runnerapi.Port, 0, len(p.ports))
	for _, one := range p.ports {
		out = append(out, one.Port)
	}
	return out
}

// Close closes a port and its connections. It is no error if there is no such port.
func (p *Ports) Close(id core.PortID) {
	p.mu.Lock()
	one := p.ports[id]
	delete(p.ports, id)
	p.mu.Unlock()
	if one != nil {
		one.close()
	}
}

// CloseAll closes all ports, and all connections that Connect has made.
func (p *Ports) CloseAll() {
	p.mu.Lock()
	all := p.ports
	p.ports = make(map[core.PortID]*port)
	streams := p.streams
	p.streams = make(map[*stream]struct{})
	p.mu.Unlock()
	for s := range streams {
		s.cancel()
	}
	for _, one := range all {
		one.close()
	}
}

// Count adds the ports to the numbers by state.
func (p *Ports) Count(n map[State]int) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, one := range p.ports {
		n[one.state.Load().(State)]++
	}
}

func (p *port) close() {
	p.stop()
	p.wg.Wait()
}

func (p *port) serve(ctx context.Context, listener net.Listener, dial func(context.Context, int) (net.Conn, error)) {
	cut := context.AfterFunc(ctx, func() { _ = listener.Close() }) // this ends Accept
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
			pause := time.NewTimer(acceptPause) // the process may have no file descriptor left
			select {
			case <-pause.C:
			case <-ctx.Done():
			}
			pause.Stop()
			continue
		}
		p.wg.Go(func() {
			defer func() { <-places }()
			_ = p.forward(ctx, c, dial) // either end may close the connection at any time; nobody needs this error
		})
	}
}

// forward copies in both directions. It returns when both directions are done, or ctx ends.
func (p *port) forward(ctx context.Context, outside net.Conn, dial func(context.Context, int) (net.Conn, error)) error {
	defer outside.Close()
	dialing, cancel := context.WithTimeout(ctx, dialTime)
	defer cancel()
	inside, err := dial(dialing, p.GuestPort)
	if err != nil {
		return fmt.Errorf("reach port %d of the guest: %w", p.GuestPort, err)
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
