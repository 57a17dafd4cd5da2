package main

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// serialBuffer is how much is kept for a client that is not there, or does not read.
const serialBuffer = 1 << 20

// serial is the serial port of a VM, on a socket.
type serial struct {
	listener *net.UnixListener
	path     string

	mu     sync.Mutex // guards what follows
	client *net.UnixConn
	buffer []byte // what the client has not got yet
	closed bool
}

// newSerial begins to accept clients.
func newSerial(path string) (*serial, error) {
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, wrap("Error creating console devices", wrap("Error creating console device", err))
	}
	l.SetUnlinkOnClose(false)
	s := &serial{listener: l, path: path}
	go s.accept()
	return s, nil
}

// accept takes one client: the next one puts an end to the one before. Nothing reads what a client types.
func (s *serial) accept() {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			return
		}
		s.mu.Lock()
		if s.client != nil {
			_ = s.client.Close()
		}
		s.client = conn
		if s.closed {
			_ = conn.Close()
		}
		s.flush()
		s.mu.Unlock()
	}
}

// output is called by the guest, and does not wait. What a client does not take at once it gets with the next output.
func (s *serial) output(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.buffer = append(s.buffer, b...)
	s.buffer = s.buffer[max(0, len(s.buffer)-serialBuffer):]
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
			if err != nil {
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
