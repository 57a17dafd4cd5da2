//go:build linux

package guestagent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/mdlayher/vsock"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// virtioPorts is the directory in which the kernel lists virtio-serial ports.
const virtioPorts = "/sys/class/virtio-ports"

// maxHosts bounds how many hosts are served at once over vsock.
const maxHosts = 8

// findPort returns the device of our virtio-serial port, or "" when there is none.
func findPort(class string) string {
	names, err := filepath.Glob(filepath.Join(class, "*", "name"))
	if err != nil {
		return ""
	}
	for _, p := range names {
		if b, err := os.ReadFile(p); err == nil && strings.TrimSpace(string(b)) == guestapi.PortName {
			return filepath.Join("/dev", filepath.Base(filepath.Dir(p)))
		}
	}
	return ""
}

// serve serves hosts on the channel that the VMM provides, until ctx ends or the channel fails.
func (a *Agent) serve(ctx context.Context) error {
	if dev := findPort(virtioPorts); dev != "" {
		port, err := openPort(dev)
		if err != nil {
			return fmt.Errorf("open %s: %w", dev, err)
		}
		c := guestapi.NewChannel(port)
		defer func() { _ = c.Close() }()
		c.Announce(time.Second)
		return a.hosts.Serve(ctx, c)
	}
	l, err := vsock.Listen(guestapi.VsockPort, nil)
	if err != nil {
		return fmt.Errorf("the guest has neither a virtio-serial port named %s nor vsock: %w", guestapi.PortName, err)
	}
	return a.serveHosts(ctx, l, func(from net.Addr) bool {
		v, ok := from.(*vsock.Addr)
		return ok && v.ContextID == vsock.Host // otherwise a process of this very guest, through its loopback
	})
}

// serveHosts answers hosts, maxHosts of them at once, until ctx ends or the listener fails. Further ones wait in the kernel.
func (a *Agent) serveHosts(ctx context.Context, l net.Listener, isHost func(from net.Addr) bool) error {
	stop := context.AfterFunc(ctx, func() { _ = l.Close() })
	defer stop()
	var wg sync.WaitGroup
	defer wg.Wait()
	room := make(chan struct{}, maxHosts)
	for {
		room <- struct{}{}
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() != nil {
				return nil // closed because the agent stops
			}
			return fmt.Errorf("accept on vsock: %w", err)
		}
		if !isHost(conn.RemoteAddr()) {
			_ = conn.Close() // a process of this guest itself, through vsock's loopback
			<-room
			continue
		}
		wg.Go(func() {
			defer func() { <-room }()
			c := guestapi.NewChannel(conn)
			defer func() { _ = c.Close() }()
			if err := a.hosts.Serve(ctx, c); err != nil {
				a.log.DebugContext(ctx, "host's connection ended", "err", err)
			}
		})
	}
}

// port is a virtio-serial port. It is never closed: closing it would discard what the next host has already sent.
type port struct {
	*os.File
	hungUp bool // the last read found no host
}

func openPort(dev string) (*port, error) {
	f, err := os.OpenFile(dev, os.O_RDWR|unix.O_NONBLOCK|unix.O_NOCTTY, 0)
	if err != nil {
		return nil, err
	}
	return &port{File: f}, nil
}

// Read reads what a host has sent. While no host is connected, the device reports its end. Read reports that once, and
// then waits for the next host.
func (p *port) Read(b []byte) (int, error) {
	rc, err := p.SyscallConn()
	if err != nil {
		return 0, err
	}
	var n int
	var rerr error
	err = rc.Read(func(fd uintptr) bool {
		for {
			n, rerr = unix.Read(int(fd), b)
			if !errors.Is(rerr, unix.EINTR) {
				break
			}
		}
		if n == 0 && rerr == nil && p.hungUp {
			return false // the device becomes readable again when a host comes and sends
		}
		return !errors.Is(rerr, unix.EAGAIN)
	})
	switch {
	case err != nil:
		return 0, err
	case rerr != nil:
		return 0, &os.PathError{Op: "read", Path: p.Name(), Err: rerr}
	case n == 0 && len(b) > 0:
		p.hungUp = true
		return 0, guestapi.ErrHangUp
	}
	p.hungUp = false
	return n, nil
}

var _ guestapi.Stream = (*port)(nil)
