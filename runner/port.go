package runner

import (
	"context"
	"net"
	"net/netip"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
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

// dialPort connects to a port of the guest. The socket is made inside the sandbox's namespace and used from outside.
func (s *sandbox) dialPort(ctx context.Context, port int) (net.Conn, error) {
	return s.ns.Dial(ctx, "tcp", netip.AddrPortFrom(s.info.Identity.IP, uint16(port)).String())
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
