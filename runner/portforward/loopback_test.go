package portforward

import (
	"errors"
	"net"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestLoopbackConnectionsAreBounded: a sandbox and a runner have places, and one is free again when its connection is closed or never made.
func TestLoopbackConnectionsAreBounded(t *testing.T) {
	t.Parallel()
	refused := 0
	all := make(chan struct{}, 3)
	one := places{sandbox: make(chan struct{}, 2), runner: all, refused: func() { refused++ }}
	other := one
	other.sandbox = make(chan struct{}, 2)
	dial := func() (net.Conn, error) { c, _ := net.Pipe(); return c, nil }
	var open []net.Conn
	for _, p := range []places{one, one, other} {
		c, err := p.dial(dial)
		if err != nil {
			t.Fatal(err)
		}
		open = append(open, c)
	}
	for name, p := range map[string]places{"of the sandbox": one, "of the runner": other} {
		if _, err := p.dial(dial); core.CodeOf(err) != core.CodeCapacity {
			t.Errorf("one too many %s: %v", name, err)
		}
	}
	for range 2 { // the second time frees nothing
		_ = open[0].Close()
	}
	failed := errors.New("nobody listens")
	if _, err := one.dial(func() (net.Conn, error) { return nil, failed }); !errors.Is(err, failed) {
		t.Error(err)
	}
	if _, err := one.dial(dial); err != nil {
		t.Error(err)
	}
	if len(one.sandbox) != 2 || len(other.sandbox) != 1 || len(all) != 3 || refused != 2 {
		t.Errorf("%d, %d and %d places, %d refused", len(one.sandbox), len(other.sandbox), len(all), refused)
	}
}
