package runner

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
	"syscall"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
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
	if err := s.lock(ctx); err != nil {
		return runnerapi.Port{}, err
	}
	defer s.unlock()
	if state := s.snapshot().State; state != runnerapi.SandboxReady {
		return runnerapi.Port{}, core.Errorf(core.FailedPrecondition, core.CodeWorkspaceNotReady,
			"sandbox %s is %s; a port can be forwarded once it is ready", id, state)
	}
	p, err := s.ports.Open(ctx, want)
	if err != nil {
		return runnerapi.Port{}, err
	}
	if err := s.recordPorts(); err != nil {
		s.ports.Close(want.ID)
		return runnerapi.Port{}, err
	}
	p.Closed = s.closed(ctx, p.GuestPort)
	return p, nil
}

// ClosePort stops forwarding a port and ends its connections. It is no error if there is no such port.
func (r *Runner) ClosePort(id core.SandboxID, portID core.PortID) error {
	s, err := r.find(id)
	if core.CategoryOf(err) == core.NotFound {
		return nil
	}
	s.ports.Close(portID)
	return ignoreAbsent(s.recordPorts()) // the sandbox may be taken down meanwhile
}

// recordPorts notes the ports in the journal, for the next runner.
func (s *sandbox) recordPorts() error {
	ports := s.ports.List()
	return s.record(func(j *sandboxJournal) { j.Ports = ports })
}

// dialPort connects to a port of the guest. The socket is made inside the sandbox's namespace and used from outside. Where nobody listens
// on the guest's address, the agent connects to its loopback, where most development servers listen.
func (s *sandbox) dialPort(ctx context.Context, port int) (net.Conn, error) {
	conn, err := s.ns.Dial(ctx, "tcp", netip.AddrPortFrom(s.info.Identity.IP, uint16(port)).String())
	if err == nil || !errors.Is(err, syscall.ECONNREFUSED) {
		return conn, err
	}
	agent, agentErr := s.agent(ctx)
	if agentErr != nil {
		return nil, errors.Join(err, agentErr)
	}
	if conn, agentErr = agent.DialPort(ctx, port); agentErr != nil {
		return nil, errors.Join(agentErr, err)
	}
	return conn, nil
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
