package cloudhypervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"path/filepath"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// dialOwn connects to a socket that the VMM has made in its own directory, and makes sure that the VMM itself listens
// there: a VMM that its guest has taken over could have put a link to another machine's socket in its place.
func (m *machine) dialOwn(ctx context.Context, name string) (net.Conn, error) {
	var d net.Dialer
	c, err := d.DialContext(ctx, "unix", filepath.Join(m.Handle().Dir, ownDir, name))
	if err != nil {
		return nil, err
	}
	peer, err := peerOf(c.(*net.UnixConn)) //nolint:forcetypeassert // dialled as such
	if err == nil && peer != m.Handle().PID {
		err = core.Errorf(core.Internal, core.CodeVMMFailed, "the listener of the socket %s is not process %d but process %d", name, m.Handle().PID, peer)
	}
	if err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return c, nil
}

// peerOf returns the process that listens at the other end.
func peerOf(c *net.UnixConn) (pid int, err error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	var cred *unix.Ucred
	var credErr error
	if err := raw.Control(func(fd uintptr) { cred, credErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) }); err != nil {
		return 0, err
	}
	if credErr != nil {
		return 0, credErr
	}
	return int(cred.Pid), nil
}

// channel is a connection to the agent. cloud-hypervisor answers the request for a port with a line once the guest has
// accepted. A paused guest cannot accept, so the line is left for the first Read.
type channel struct {
	net.Conn

	mu      sync.Mutex // guards the fields below
	greeted bool
	line    []byte // so far
}

// maxLine bounds "OK <port>\n".
const maxLine = 32

// connectVsock requests the agent's port.
func connectVsock(c net.Conn) (net.Conn, error) {
	if _, err := fmt.Fprintf(c, "CONNECT %d\n", guestapi.VsockPort); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	return &channel{Conn: c}, nil
}

// Read implements net.Conn. A refusal is a connection that ends without the line, and gives io.EOF.
func (c *channel) Read(b []byte) (int, error) {
	if err := c.greet(); err != nil {
		return 0, err
	}
	return c.Conn.Read(b)
}

func (c *channel) greet() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	for !c.greeted {
		var b [1]byte // the bytes after the line come from the guest
		if n, err := c.Conn.Read(b[:]); n == 0 {
			if err == nil {
				err = io.ErrNoProgress
			}
			return err
		}
		if b[0] != '\n' {
			if c.line = append(c.line, b[0]); len(c.line) > maxLine {
				return notAccepted(c.line)
			}
			continue
		}
		if !strings.HasPrefix(string(c.line), "OK ") {
			return notAccepted(c.line)
		}
		c.greeted = true
	}
	return nil
}

func notAccepted(line []byte) error {
	return core.Errorf(core.Unavailable, core.CodeGuestUnreachable, "cloud-hypervisor answers a connection to the guest with %q", core.Clip(string(line)))
}
