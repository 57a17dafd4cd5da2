// Package cpu is the processor of machines that execute no instructions: it calls the functions of a guest program, one at a
// time, with the machine's RAM, and only while the machine runs.
package cpu

import (
	"errors"
	"net"
	"sync"
	"time"
)

// ErrEnded is returned once the machine has ended.
var ErrEnded = errors.New("the machine has ended")

// CPU is one processor. Its methods are safe for concurrent use.
type CPU struct {
	mu    sync.Mutex // held while the guest does something; guards the fields below
	turn  *sync.Cond // condition of mu: runs or ended has changed
	ram   []byte
	runs  bool
	ended bool

	// For the guest's clock, which stands still with the machine.
	uptime time.Duration // up to the time since; the total while the machine stands still
	since  time.Time
}

// New returns a CPU that does not run.
func New(ram []byte) *CPU {
	c := &CPU{ram: ram}
	c.turn = sync.NewCond(&c.mu)
	return c
}

// Run lets the guest run, or stops it. When it has stopped the guest, the guest does nothing more.
func (c *CPU) Run(on bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.ended || c.runs == on {
		return
	}
	c.runs = on
	now := time.Now()
	if !on {
		c.uptime += now.Sub(c.since)
		return
	}
	c.since = now
	c.turn.Broadcast()
}

// Do calls fn with the RAM, as the guest: only while the machine runs, and while nothing else of the guest runs. fn
// must be short and must not wait, because a stop waits for it.
func (c *CPU) Do(fn func(ram []byte)) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.runs && !c.ended {
		c.turn.Wait()
	}
	if c.ended {
		return ErrEnded
	}
	fn(c.ram)
	return nil
}

// Uptime returns how long the guest has run. It must be called within Do.
func (c *CPU) Uptime() time.Duration {
	if !c.runs {
		return c.uptime
	}
	return c.uptime + time.Since(c.since)
}

// Clock is Uptime for a stopped machine, called from outside.
func (c *CPU) Clock() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.Uptime()
}

// SetClock sets the clock of a stopped machine.
func (c *CPU) SetClock(uptime time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.uptime = uptime
}

// End makes every call of Do fail, including waiting ones. When it returns, no function of the guest runs any more.
func (c *CPU) End() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.ended = true
	c.turn.Broadcast()
}

// RAM returns the memory that the CPU was made with, until it is dropped.
func (c *CPU) RAM() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.ram
}

// Drop returns the memory of an ended machine, so that the caller can unmap it, and forgets it.
func (c *CPU) Drop() []byte {
	c.mu.Lock()
	defer c.mu.Unlock()
	ram := c.ram
	c.ram = nil
	return ram
}

// Gate returns the guest's end of a connection: while the machine is stopped, nothing gets into the guest or out of it.
func (c *CPU) Gate(conn net.Conn) net.Conn { return &gate{conn, c} }

type gate struct {
	net.Conn
	c *CPU
}

func (g *gate) Read(b []byte) (int, error) {
	n, err := g.Conn.Read(b)
	if ended := g.c.Do(func([]byte) {}); ended != nil {
		return 0, ended
	}
	return n, err
}

func (g *gate) Write(b []byte) (int, error) {
	if ended := g.c.Do(func([]byte) {}); ended != nil {
		return 0, ended
	}
	return g.Conn.Write(b)
}
