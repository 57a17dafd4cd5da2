package runner

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/journal"
	"github.com/coppice-dev/coppice/runner/portforward"
)

// portsOf are the forwarded ports of a new sandbox.
func portsOf(r *Runner, s *sandbox) *portforward.Ports {
	return portforward.New(r.runCtx, portforward.Config{
		Sandbox: s.info.ID, Host: r.hostPorts, Log: r.cfg.Log, Places: r.loopback,
		Dial: func(ctx context.Context, port int) (net.Conn, error) {
			return s.ns.Dial(ctx, "tcp", netip.AddrPortFrom(s.info.Identity.IP, uint16(port)).String())
		},
		Agent: func(ctx context.Context) (portforward.Agent, error) { return s.agent(ctx) },
	})
}

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
	p.Closed = s.ports.GuestRefuses(asking, p.GuestPort)
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

// ConnectPort connects to a port of the guest. ctx bounds the dial only; the connection ends with the sandbox.
func (r *Runner) ConnectPort(ctx context.Context, id core.SandboxID, guestPort int) (net.Conn, error) {
	s, err := r.find(id)
	if err != nil {
		return nil, err
	}
	if state := s.snapshot().State; state != runnerapi.SandboxReady {
		return nil, core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady, "sandbox %s is %s; its ports can be reached once it is ready", id, state)
	}
	return s.ports.Connect(ctx, guestPort)
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
