package portforward

import (
	"net"
	"sync"

	"github.com/coppice-dev/coppice/core"
)

// The bounds of connections to the loopback of guests. Each holds up to 256 KiB of the runner's memory.
const (
	maxSandboxLoopback = 128
	maxRunnerLoopback  = 1024
)

// RunnerPlaces are the places for connections to the loopback of all guests of a runner.
type RunnerPlaces chan struct{}

// NewRunnerPlaces returns the places of a runner.
func NewRunnerPlaces() RunnerPlaces { return make(RunnerPlaces, maxRunnerLoopback) }

// places are the places for connections to the loopback of a sandbox. Its agent makes these connections.
type places struct {
	sandbox chan struct{}
	runner  RunnerPlaces
	refused func() // hears of every connection that has no place
}

// dial takes a place of the sandbox and one of the runner. Both are free again when the connection is closed.
func (p places) dial(dial func() (net.Conn, error)) (net.Conn, error) {
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
	return &placed{Conn: conn, free: sync.OnceFunc(free)}, nil
}

// placed is a connection that has its places.
type placed struct {
	net.Conn
	free func()
}

func (c *placed) Close() error {
	defer c.free()
	return c.Conn.Close()
}

// CloseWrite ends the direction to the guest. The connection keeps its places.
func (c *placed) CloseWrite() error {
	if half, ok := c.Conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return nil
}
