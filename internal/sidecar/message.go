package sidecar

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// MaxMessage bounds a message, in bytes. It is less than the default limit of a socket.
const MaxMessage = 160 << 10

// Faults of one message. The connection and the other process still work: other requests are possible.
var (
	// ErrTooLong is returned, wrapped, by Send when it refuses to send a message, and by Receive when a message was cut off.
	ErrTooLong = errors.New("the message is too long for the socket")
	// ErrMalformed is returned, wrapped, by Receive when a message cannot be decoded.
	ErrMalformed = errors.New("the message cannot be read")
)

// IsFault reports whether an error is about one message, and not about the connection or the process at its other end.
func IsFault(err error) bool { return errors.Is(err, ErrTooLong) || errors.Is(err, ErrMalformed) }

// Fault returns the error with which to answer when a message could not be sent or read.
func Fault(err error) error {
	if errors.Is(err, ErrTooLong) {
		return core.Wrapf(err, core.Internal, core.CodeInternal, "%v; the maximum is %d bytes", err, MaxMessage)
	}
	return core.Wrapf(err, core.Invalid, core.CodeInvalidField, "%v", err)
}

// maxFiles bounds the descriptors of a message.
const maxFiles = 4

// Send writes one message with some descriptors, which still belong to the caller. If the error is ErrTooLong, nothing
// was sent.
func Send(c *net.UnixConn, m any, files ...*os.File) error {
	b, err := json.Marshal(m)
	if err != nil {
		return err
	}
	if len(b) > MaxMessage || len(files) > maxFiles {
		return fmt.Errorf("%w: it has %d bytes and %d descriptors", ErrTooLong, len(b), len(files))
	}
	var rights []byte
	if len(files) > 0 {
		fds := make([]int, len(files))
		for i, f := range files {
			fds[i] = int(f.Fd())
		}
		rights = unix.UnixRights(fds...)
	}
	_, _, err = c.WriteMsgUnix(b, rights, nil)
	if errors.Is(err, unix.EMSGSIZE) { // the host's limit for sockets is lower than usual
		return fmt.Errorf("%w: it has %d bytes: %w", ErrTooLong, len(b), err)
	}
	return err
}

// buffers are for messages that are being read. A buffer is given back after its content was copied.
var buffers = sync.Pool{New: func() any { return new([MaxMessage]byte) }}

// Receive reads one message. The files belong to the caller. If the error is a fault (IsFault), the message was removed
// from the connection, and the next one can be read.
func Receive(c *net.UnixConn, m any) (_ []*os.File, err error) {
	buffer, _ := buffers.Get().(*[MaxMessage]byte)
	defer buffers.Put(buffer)
	b := buffer[:]
	rights := make([]byte, unix.CmsgSpace(4*maxFiles))
	n, rn, flags, _, err := c.ReadMsgUnix(b, rights)
	if err != nil {
		return nil, err
	}
	files, err := filesOf(rights[:rn])
	switch {
	case err != nil:
	case n == 0 && rn == 0:
		err = io.EOF
	case flags&(unix.MSG_TRUNC|unix.MSG_CTRUNC) != 0:
		err = fmt.Errorf("%w: it was cut off after %d bytes", ErrTooLong, n)
	default:
		if failed := json.Unmarshal(b[:n], m); failed != nil {
			err = fmt.Errorf("%w: %w", ErrMalformed, failed)
		}
	}
	if err != nil {
		CloseAll(files)
		return nil, err
	}
	return files, nil
}

// CloseAll closes descriptors that are not needed.
func CloseAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close() // nothing was written to it
	}
}

func filesOf(rights []byte) ([]*os.File, error) {
	if len(rights) == 0 {
		return nil, nil
	}
	messages, err := unix.ParseSocketControlMessage(rights)
	if err != nil {
		return nil, fmt.Errorf("read descriptors: %w", err)
	}
	var out []*os.File
	for _, m := range messages {
		fds, err := unix.ParseUnixRights(&m)
		if err != nil {
			CloseAll(out)
			return nil, fmt.Errorf("read descriptors: %w", err)
		}
		for _, fd := range fds {
			unix.CloseOnExec(fd)
			out = append(out, os.NewFile(uintptr(fd), "passed"))
		}
	}
	return out, nil
}

// Listen makes a socket to which only its owner and root may connect. It replaces a socket that an earlier process left
// behind.
func Listen(path string) (*net.UnixListener, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	l, err := net.ListenUnix("unixpacket", &net.UnixAddr{Name: path, Net: "unixpacket"})
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, 0o600); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}

// Peer returns the process at the other end of a connection. For a connection that this process dialled, it is the
// listening process, as the kernel knows it.
func Peer(c *net.UnixConn) (*unix.Ucred, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peer *unix.Ucred
	var failed error
	err = raw.Control(func(fd uintptr) { peer, failed = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	return peer, errors.Join(err, failed)
}
