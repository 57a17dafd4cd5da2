package main

import (
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"
)

// serialBuffer is how much is kept for a client that is not there, or does not read.
const serialBuffer = 1 << 20

// console is what is opened for the serial port with the configuration: before there is a VM, and kept when it is deleted then.
type console struct {
	file     *os.File
	listener *net.UnixListener
	path     string // of the listener's socket
}

func newConsole(c *vmConfig) (*console, error) {
	const words = "Error creating console devices"
	if c.Console.Mode == "Socket" {
		return nil, chain{words, "No socket option support for console device"}
	}
	out := &console{}
	var err error
	switch c.Serial.Mode {
	case "File":
		if c.Serial.File == nil {
			return nil, chain{words, "fakech: cloud-hypervisor panics without a path"}
		}
		out.file, err = os.OpenFile(*c.Serial.File, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o666) //nolint:gosec // G302: the umask is 077, as cloud-hypervisor sets it
	case "Socket":
		if c.Serial.Socket == nil {
			return nil, chain{words, "fakech: cloud-hypervisor panics without a path"}
		}
		out.path = *c.Serial.Socket
		out.listener, err = net.ListenUnix("unix", &net.UnixAddr{Name: out.path, Net: "unix"})
		if err == nil {
			out.listener.SetUnlinkOnClose(false)
		}
	case "Tty":
		out.file = os.Stdout
	case "Pty":
		return nil, chain{words, "fakech: it has no terminals"}
	default:
	}
	if err != nil {
		return nil, wrap(words, wrap("Error creating console device", err))
	}
	return out, nil
}

// serial is the serial port of a VM.
type serial struct {
	*console

	mu     sync.Mutex // guards what follows
	client *net.UnixConn
	buffer []byte // what the client has not got yet
	closed bool
}

// newSerial begins to accept clients.
func newSerial(c *console) *serial {
	s := &serial{console: c}
	if c.listener != nil {
		go s.accept()
	}
	return s
}

// accept takes one client: the next one puts an end to the one before.
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

// watch reads what a client types, which no guest of ours reads, until it hangs up.
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

// output is called by the guest, and does not wait. What a client does not take at once it gets with the next output.
func (s *serial) output(b []byte) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.file != nil {
		_, _ = s.file.Write(b) // nobody is told
	}
	if s.listener == nil {
		return
	}
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
	if s.file != nil && s.file != os.Stdout {
		_ = s.file.Close()
	}
	if s.listener != nil {
		_ = s.listener.Close()
		_ = os.Remove(s.path)
	}
}
