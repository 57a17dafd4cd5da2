package main

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// serialBuffer is how much is kept for a client that is not there, or does not read.
const serialBuffer = 1 << 20

// console is the socket of the serial port. It exists with the configuration, before there is a VM.
type console struct {
	listener *net.UnixListener
	path     string
}

func newConsole(c *vmConfig) (*console, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: c.Serial.Socket, Net: "unix"})
	if err != nil {
		return nil, wrap("Error creating console devices", wrap("Error creating console device", err))
	}
	l.SetUnlinkOnClose(false)
	return &console{l, c.Serial.Socket}, nil
}

// serial is the serial port of a VM.
type serial struct {
	*console

	mu     sync.Mutex // guards the fields below
	client *net.UnixConn
	buffer []byte // not yet sent to the client
	closed bool
}

// newSerial begins to accept clients.
func newSerial(c *console) *serial {
	s := &serial{console: c}
	go s.accept()
	return s
}

// accept has one client: the next one replaces it.
func (s *serial) accept() {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.closed {
			s.mu.Unlock()
			_ = conn.Close()
			return
		}
		if s.client != nil {
			_ = s.client.Close()
		}
		s.client = conn
		s.flush()
		s.mu.Unlock()
		go s.watch(conn)
	}
}

// watch reads what a client types, which no guest reads, until the client hangs up.
func (s *serial) watch(conn *net.UnixConn) {
	b := make([]byte, 64)
	for {
		if _, err := conn.Read(b); err != nil {
			break
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	_ = conn.Close()
	if s.client == conn {
		s.client = nil
	}
}

// output is called by the guest, and does not wait. What the client does not take at once, it gets with the next output.
func (s *serial) output(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buffer = append(s.buffer, b...)
	if over := len(s.buffer) - serialBuffer; over > 0 {
		s.buffer = append([]byte(nil), s.buffer[over:]...)
	}
	s.flush()
}

// flush writes what the client takes. It is called with mu held.
func (s *serial) flush() {
	if s.client == nil {
		return
	}
	raw, err := s.client.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Write(func(fd uintptr) bool { // the next output tries again
		for len(s.buffer) > 0 {
			n, err := unix.Write(int(fd), s.buffer)
			if err != nil || n <= 0 {
				break
			}
			s.buffer = s.buffer[n:]
		}
		return true
	})
}

// close ends the port with the VM.
func (s *serial) close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	if s.client != nil {
		_ = s.client.Close()
	}
	_ = s.listener.Close()
	_ = os.Remove(s.path)
}
