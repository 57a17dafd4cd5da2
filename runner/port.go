package runner

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/portforward"
)

// OpenPort starts forwarding a port. If a port with the same id exists, it returns that port.
func (r *Runner) OpenPort(ctx context.Context, id core.SandboxID, want runnerapi.Port) (runnerapi.Port, error) {
	s, err := r.find(id)
	if err != nil {
		return runnerapi.Port{}, err
	}
	if want.GuestPort < 1 || want.GuestPort > 65535 {
		return runnerapi.Port{}, core.Errorf(core.Invalid, core.CodeInvalidField, "guest_port is %d; it must be between 1 and 65535", want.GuestPort)
	}
	p, err := s.openPort(ctx, want)
	if err != nil {
		return runnerapi.Port{}, err
	}
	// Without the lock: the agent may answer late or never.
	asking, cancel := context.WithTimeout(ctx, closedTime)
	defer cancel()
	p.Closed = s.closed(asking, p.GuestPort)
	return p, nil
}

// closedTime bounds how long a new port waits for the agent to say whether anybody listens.
const closedTime = 2 * time.Second

func (s *sandbox) openPort(ctx context.Context, want runnerapi.Port) (runnerapi.Port, error) {
	if err := s.lock(ctx); err != nil {
		return runnerapi.Port{}, err
	}
	defer s.unlock()
	if state := s.snapshot().State; state != runnerapi.SandboxReady {
		return runnerapi.Port{}, core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady,
			"sandbox %s is %s; a port can be forwarded once it is ready", s.info.ID, state)
	}
	p, err := s.ports.Open(ctx, want)
	if err != nil {
		return runnerapi.Port{}, err
	}
	if err := s.recordPorts(); err != nil {
		s.ports.Close(want.ID)
		return runnerapi.Port{}, err
	}
	return p, nil
}

// ClosePort stops forwarding a port and ends its connections. It is no error if there is no such port.
func (r *Runner) ClosePort(id core.SandboxID, portID core.PortID) error {
	s, err := r.find(id)
	if core.CategoryOf(err) == core.NotFound {
		return nil
	}
	s.ports.Close(portID)
	err = s.recordPorts()
	if errors.Is(err, journal.ErrNotAnnounced) { // a sandbox that is being made has no ports
		return nil
	}
	return ignoreAbsent(err) // the sandbox may be taken down meanwhile
}

// recordPorts notes the ports in the journal, for the next runner.
func (s *sandbox) recordPorts() error {
	ports := s.ports.List()
	return s.notes.Change(func(j *journal.Sandbox) { j.Ports = ports })
}

// dialPort connects to a port of the guest. The socket is made inside the sandbox's namespace and
// used from outside. If nobody listens on the guest's address, the agent connects to its loopback,
// where most development servers listen.
func (s *sandbox) dialPort(ctx context.Context, port int) (net.Conn, error) {
	conn, err := s.ns.Dial(ctx, "tcp", netip.AddrPortFrom(s.info.Identity.IP, uint16(port)).String())
	if err == nil || !errors.Is(err, syscall.ECONNREFUSED) {
		return conn, err
	}
	conn, agentErr := s.loopback.dial(func() (net.Conn, error) {
		agent, err := s.agent(ctx)
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

// The bounds of connections to the loopback of guests. Each holds up to 256 KiB of the runner's memory.
const (
	maxSandboxLoopback = 128
	maxRunnerLoopback  = 1024
)

// loopbackPlaces are the places for connections to the loopback of a sandbox.
type loopbackPlaces struct {
	sandbox, runner chan struct{}
	refused         func() // hears of every connection that has no place
}

// dial takes a place of the sandbox and one of the runner. Both are free again when the connection is closed.
func (p loopbackPlaces) dial(dial func() (net.Conn, error)) (net.Conn, error) {
	var taken []chan struct{}
	free := func() {
		for _, c := range taken {
			<-c
		}
	}
	for _, c := range []chan struct{}{p.sandbox, p.runner} {
		select {
		case c <- struct{}{}:
			taken = append(taken, c)
		default:
			free()
			p.refused()
			return nil, core.Errorf(core.Exhausted, core.CodeCapacity, "the sandbox or its runner has too many connections to the loopback of guests; close some")
		}
	}
	conn, err := dial()
	if err != nil {
		free()
		return nil, err
	}
	return &loopbackConn{Conn: conn, free: sync.OnceFunc(free)}, nil
}

// loopbackConn is a connection that has its places.
type loopbackConn struct {
	net.Conn
	free func()
}

func (c *loopbackConn) Close() error {
	defer c.free()
	return c.Conn.Close()
}

// CloseWrite ends the direction to the guest. The connection keeps its places.
func (c *loopbackConn) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}

// closed reports whether the agent says that nobody listens on a port of the guest.
func (s *sandbox) closed(ctx context.Context, port int) bool {
	agent, err := s.agent(ctx)
	if err != nil {
		return false
	}
	list, err := agent.Ports(ctx)
	return err == nil && !slices.ContainsFunc(list.Ports, func(p guestapi.Port) bool { return p.Port == port })
}

// loopbackOf are the places of a new sandbox.
func loopbackOf(r *Runner, s *sandbox) loopbackPlaces {
	return loopbackPlaces{sandbox: make(chan struct{}, maxSandboxLoopback), runner: r.loopback, refused: func() {
		r.cfg.Log.Debug("connection to a forwarded port is refused: too many lead to the loopback of guests", "sandbox_id", s.info.ID)
	}}
}

// portsOf are the forwarded ports of a new sandbox.
func portsOf(r *Runner, s *sandbox) *portforward.Ports {
	return portforward.New(r.runCtx, portforward.Config{Sandbox: s.info.ID, Host: r.hostPorts, Log: r.cfg.Log, Dial: s.dialPort})
}

// portStates counts the forwarded ports of sandboxes by their state.
func portStates(sandboxes []*sandbox) map[portforward.State]int {
	n := map[portforward.State]int{portforward.Listening: 0, portforward.Waiting: 0, portforward.Refused: 0}
	for _, s := range sandboxes {
		s.ports.Count(n)
	}
	return n
}
