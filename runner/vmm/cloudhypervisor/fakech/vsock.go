package main

import (
	"context"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm/cpu"
)

const (
	maxCommand    = 32 // of a CONNECT with its line feed
	firstHostPort = 1 << 30
)

// vsock is the host's side of the device, and has the queue of connections to the agent's port, which in a real guest is
// the kernel's.
type vsock struct {
	path     string
	listener *net.UnixListener
	cpu      *cpu.CPU
	faults   faults
	incoming chan net.Conn

	mu     sync.Mutex // guards the fields below
	closed chan struct{}
	ended  bool
	next   uint32 // port of the host
	began  int    // CONNECTs that were read
	conns  map[*net.UnixConn]bool
}

func newVsock(path string, f faults) (*vsock, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, wrap("Cannot create virtio-vsock backend", wrap("Error binding to the host-side Unix socket", err))
	}
	l.SetUnlinkOnClose(false)
	return &vsock{
		path: path, listener: l, faults: f, incoming: make(chan net.Conn, 128), closed: make(chan struct{}),
		next: firstHostPort, conns: map[*net.UnixConn]bool{},
	}, nil
}

// run serves the host. Nothing is read from it while the VM is paused.
func (v *vsock) run(c *cpu.CPU) {
	v.cpu = c
	go func() {
		for {
			conn, err := v.listener.AcceptUnix()
			if err != nil {
				return
			}
			v.mu.Lock()
			if v.ended {
				v.mu.Unlock()
				_ = conn.Close()
				return
			}
			v.conns[conn] = true
			v.mu.Unlock()
			go v.connect(conn)
		}
	}()
}

func (v *vsock) drop(conn *net.UnixConn) {
	v.mu.Lock()
	delete(v.conns, conn)
	v.mu.Unlock()
	_ = conn.Close()
}

// connect answers a CONNECT. A bad one ends the connection without an answer.
func (v *vsock) connect(conn *net.UnixConn) {
	gated := v.cpu.Gate(conn)
	port, ok := readCommand(gated)
	v.mu.Lock()
	v.began++
	first := v.began == 1
	v.mu.Unlock()
	switch {
	case !ok, port != guestapi.VsockPort, v.faults.is("vsock-refuses"), first && v.faults.is("vsock-refuses-once"):
		v.drop(conn)
		return
	case v.faults.is("vsock-silent"):
		<-v.closed
		return
	}
	v.mu.Lock()
	host := v.next
	v.next++
	v.mu.Unlock()
	if _, err := io.WriteString(gated, "OK "+strconv.Itoa(int(host))+"\n"); err != nil {
		v.drop(conn)
		return
	}
	select {
	case v.incoming <- &stream{Conn: gated, v: v, own: conn}:
	case <-v.closed:
	}
}

// readCommand reads byte by byte: the bytes after the line feed are for the guest.
func readCommand(r io.Reader) (port uint64, ok bool) {
	var line []byte
	for b := make([]byte, 1); len(line) < maxCommand; {
		if _, err := io.ReadFull(r, b); err != nil {
			return 0, false
		}
		if b[0] == '\n' {
			break
		}
		line = append(line, b[0])
	}
	word, number, _ := strings.Cut(string(line), " ")
	port, err := strconv.ParseUint(strings.TrimSpace(number), 10, 32)
	return port, strings.EqualFold(word, "connect") && err == nil && len(line) < maxCommand
}

// stream is the guest's end of a connection.
type stream struct {
	net.Conn
	v   *vsock
	own *net.UnixConn
}

func (s *stream) Close() error {
	s.v.drop(s.own)
	return nil
}

// accept is called by the guest's program.
func (v *vsock) accept(ctx context.Context) (io.ReadWriteCloser, error) {
	select {
	case conn := <-v.incoming:
		return conn, nil
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	case <-v.closed:
		return nil, net.ErrClosed
	}
}

func (v *vsock) close() {
	v.mu.Lock()
	defer v.mu.Unlock()
	if v.ended {
		return
	}
	v.ended = true
	close(v.closed)
	for conn := range v.conns {
		_ = conn.Close()
	}
	_ = v.listener.Close()
	_ = os.Remove(v.path)
}
