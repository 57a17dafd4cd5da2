package portforward

import (
	"context"
	"errors"
	"log/slog"
	"net"
	"syscall"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// agent is that of a guest in which a program listens on one port, on its loopback.
type agent struct{ port int }

func (a agent) Ports(context.Context) (guestapi.Ports, error) {
	return guestapi.Ports{Ports: []guestapi.Port{{Port: a.port}}}, nil
}

func (a agent) DialPort(_ context.Context, port int) (net.Conn, error) {
	if port != a.port {
		return nil, syscall.ECONNREFUSED
	}
	c, _ := net.Pipe()
	return c, nil
}

// TestDial: a connection goes to the guest's address. If nobody listens there, and for no other reason, it goes to the guest's loopback, which has
// places.
func TestDial(t *testing.T) {
	t.Parallel()
	gone := errors.New("the agent is gone")
	for name, test := range map[string]struct {
		port    int
		outside error // what a connection to the guest's address fails with
		agent   error
		places  int
		want    error
		code    core.Code
	}{
		"outside":             {port: 80, agent: gone},
		"loopback":            {port: 80, outside: syscall.ECONNREFUSED, places: 1},
		"nobody listens":      {port: 81, outside: syscall.ECONNREFUSED, places: 1, want: syscall.ECONNREFUSED},
		"the guest is silent": {port: 80, outside: context.DeadlineExceeded, places: 1, want: context.DeadlineExceeded},
		"the agent is gone":   {port: 80, outside: syscall.ECONNREFUSED, agent: gone, places: 1, want: gone},
		"no place is free":    {port: 80, outside: syscall.ECONNREFUSED, want: syscall.ECONNREFUSED, code: core.CodeCapacity},
	} {
		p := New(t.Context(), Config{
			Log: slog.New(slog.DiscardHandler), Places: make(RunnerPlaces, test.places),
			Dial: func(context.Context, int) (net.Conn, error) {
				if test.outside != nil {
					return nil, test.outside
				}
				c, _ := net.Pipe()
				return c, nil
			},
			Agent: func(context.Context) (Agent, error) { return agent{80}, test.agent },
		})
		c, err := p.dial(t.Context(), test.port)
		if !errors.Is(err, test.want) || (err == nil) != (test.want == nil) || test.code != "" && core.CodeOf(err) != test.code {
			t.Errorf("%s: %v, want %v", name, err, test.want)
		}
		if err == nil {
			_ = c.Close()
		}
		if n := len(p.loopback.sandbox) + len(p.cfg.Places); n != 0 {
			t.Errorf("%s: %d places are taken", name, n)
		}
		if refuses := p.GuestRefuses(t.Context(), test.port); refuses != (test.port != 80 && test.agent == nil) {
			t.Errorf("%s: the guest refuses: %t", name, refuses)
		}
	}
}
