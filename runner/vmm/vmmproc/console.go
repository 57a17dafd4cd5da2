package vmmproc

import (
	"net"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/runner/vmm"
)

// Console keeps the end of what a guest prints. A guest may print without end. So the memory is bounded, and reading is
// slowed down so that a flood costs the host little; the VMM then makes the guest wait, or keeps only the end of the
// output.
type Console struct {
	*vmm.Tail
	hurry chan struct{} // closed when the VMM has ended: the rest is read at once

	mu     sync.Mutex // guards the fields below
	conn   net.Conn   // nil until Follow, and after Close
	closed bool
	done   chan struct{} // closed when nothing more will come; nil until Follow
}

const (
	consolePace  = time.Second / 256 // one read of at most 4 KiB: 1 MiB a second
	consoleDrain = time.Second       // for the rest in the socket of an ended VMM: at most a few 100 KiB
)

// NewConsole returns a console that does not read yet.
func NewConsole() *Console {
	return &Console{Tail: vmm.NewTail(vmm.ConsoleBytes), hurry: make(chan struct{})}
}

// Follow reads from the VMM's end of the console, until that ends or Close. It must be called only once.
func (k *Console) Follow(conn net.Conn) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.closed {
		_ = conn.Close() // only read
		return
	}
	k.conn, k.done = conn, make(chan struct{})
	go k.follow(conn, k.done)
}

func (k *Console) follow(conn net.Conn, done chan struct{}) {
	defer close(done)
	buf := make([]byte, 4096)
	pace := time.NewTicker(consolePace)
	defer pace.Stop()
	for {
		n, err := conn.Read(buf)
		_, _ = k.Write(buf[:n]) // never fails
		if err != nil {
			return
		}
		select {
		case <-pace.C:
		case <-k.hurry:
		}
	}
}

// Drain reads the rest of an ended VMM's output. It must be called only once.
func (k *Console) Drain() {
	close(k.hurry)
	k.mu.Lock()
	conn, done := k.conn, k.done
	k.mu.Unlock()
	if conn != nil {
		_ = conn.SetReadDeadline(time.Now().Add(consoleDrain)) // fails only if it was closed, and then nothing is left
		<-done
	}
}

// Close ends the reading. Idempotent.
func (k *Console) Close() {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.closed = true
	if k.conn != nil {
		_ = k.conn.Close() // only read
	}
}
