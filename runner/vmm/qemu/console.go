package qemu

import (
	"context"
	"net"
	"time"

	"github.com/coppice-dev/coppice/runner/vmm"
)

// console keeps the tail of what a guest prints. A guest may print without end: the memory is bounded, and reading is paced so
// that a flood costs little of the host; QEMU then makes the guest wait.
type console struct {
	*vmm.Tail
	conn  net.Conn
	hurry chan struct{} // closed when the VMM has ended: what it left is read at once
	done  chan struct{} // closed when nothing more will come
}

const (
	consolePace  = time.Second / 256 // one read of at most 4 KiB: 1 MiB a second
	consoleDrain = time.Second       // for what an ended VMM left in the socket: at most a few 100 KiB
)

func dialConsole(ctx context.Context, path string) (*console, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", path)
	if err != nil {
		return nil, err
	}
	k := &console{Tail: vmm.NewTail(vmm.ConsoleBytes), conn: c, hurry: make(chan struct{}), done: make(chan struct{})}
	go k.follow()
	return k, nil
}

// follow ends when the connection does: by close or with the VMM.
func (k *console) follow() {
	defer close(k.done)
	buf := make([]byte, 4096)
	pace := time.NewTicker(consolePace)
	defer pace.Stop()
	for {
		n, err := k.conn.Read(buf)
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

// drain reads what an ended VMM has left.
func (k *console) drain() {
	close(k.hurry)
	_ = k.conn.SetReadDeadline(time.Now().Add(consoleDrain)) // fails only if it was closed, and then nothing is left
	<-k.done
}

func (k *console) close() { _ = k.conn.Close() }
