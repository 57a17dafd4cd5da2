//go:build linux

package guestagent

import (
	"context"
	"encoding/hex"
	"errors"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/account"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// listPorts lists the listening TCP sockets and, if it can be found, the process of each.
func listPorts(w workload) (guestapi.Ports, error) {
	out := guestapi.Ports{Ports: []guestapi.Port{}}
	inodes := map[string]int{} // index in out.Ports
	for _, name := range []string{"tcp", "tcp6"} {
		f, err := os.Open("/proc/self/net/" + name)
		if os.IsNotExist(err) {
			continue // no such protocol in this kernel
		}
		if err != nil {
			return out, core.Wrapf(err, core.Internal, core.CodeInternal, "the guest's sockets cannot be listed")
		}
		for line := range account.Lines(f) {
			field := strings.Fields(line)
			if len(field) < 10 || field[3] != "0A" {
				continue
			}
			if ap, ok := parseSocketAddr(field[1]); ok {
				inodes["socket:["+field[9]+"]"] = len(out.Ports)
				out.Ports = append(out.Ports, guestapi.Port{Address: ap.Addr(), Port: int(ap.Port())})
			}
		}
		_ = f.Close()
	}
	if len(inodes) > 0 {
		nameOwners(w, inodes, out.Ports)
	}
	slices.SortFunc(out.Ports, func(a, b guestapi.Port) int { return a.Port - b.Port })
	return out, nil
}

// nameOwners finds the processes of the workload that hold the sockets.
func nameOwners(w workload, inodes map[string]int, ports []guestapi.Port) {
	proc := w.proc()
	pids, err := numbers(proc)
	if err != nil {
		return
	}
	for _, pid := range pids[:min(len(pids), maxProcesses)] {
		dir := filepath.Join(proc, strconv.Itoa(pid), "fd")
		d, err := os.Open(dir)
		if err != nil {
			continue
		}
		fds, _ := d.Readdirnames(-1)
		_ = d.Close()
		for _, fd := range fds {
			target, err := os.Readlink(filepath.Join(dir, fd))
			if i, ok := inodes[target]; err == nil && ok && ports[i].PID == 0 {
				st, err := readStat(proc, pid)
				if err == nil {
					ports[i].PID, ports[i].Process = pid, st.comm
				}
			}
		}
	}
}

// parseSocketAddr reads an address as /proc/net/tcp has it: 32-bit words in the machine's byte order, in hex.
func parseSocketAddr(s string) (netip.AddrPort, bool) {
	host, port, ok := strings.Cut(s, ":")
	raw, err := hex.DecodeString(host)
	p, err2 := strconv.ParseUint(port, 16, 16)
	if !ok || err != nil || err2 != nil || len(raw)%4 != 0 {
		return netip.AddrPort{}, false
	}
	for i := 0; i < len(raw); i += 4 {
		slices.Reverse(raw[i : i+4]) // all supported machines are little-endian
	}
	addr, ok := netip.AddrFromSlice(raw)
	return netip.AddrPortFrom(addr.Unmap(), uint16(p)), ok
}

// connectPort joins the request's stream to a listener on the loopback of the guest, which no connection from outside reaches. Like a TCP
// connection, the stream may end in one direction first.
func (a *Agent) connectPort(w http.ResponseWriter, r *http.Request) error {
	port, err := strconv.ParseUint(r.PathValue("port"), 10, 16)
	if err != nil || port == 0 || r.Header.Get("Upgrade") != guestapi.UpgradeTCP {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "a connection to a port needs its number and Upgrade: %s", guestapi.UpgradeTCP)
	}
	inside, err := dialLoopback(r.Context(), strconv.Itoa(int(port)))
	if err != nil {
		return err
	}
	defer func() { _ = inside.Close() }()
	outside, buffered, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return core.Wrapf(err, core.Internal, core.CodeInternal, "the connection cannot be taken over")
	}
	defer func() { _ = outside.Close() }()
	cut := context.AfterFunc(r.Context(), func() { _ = errors.Join(inside.Close(), outside.Close()) }) // the link has ended, and with it this stream
	defer cut()
	if _, err := io.WriteString(outside, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: "+guestapi.UpgradeTCP+"\r\n\r\n"); err != nil {
		return nil // the host is gone
	}
	// The server's reader ends the request's context at the end of what it reads, so only what it has read ahead comes from it.
	from := io.MultiReader(io.LimitReader(buffered, int64(buffered.Reader.Buffered())), outside)
	var wg sync.WaitGroup
	wg.Go(func() {
		if _, err := io.Copy(inside, from); err != nil {
			_ = inside.Close() // the link has ended: so does the connection
			return
		}
		_ = inside.CloseWrite()
	})
	wg.Go(func() {
		_, _ = io.Copy(outside, inside)
		if half, ok := outside.(interface{ CloseWrite() error }); ok {
			_ = half.CloseWrite()
			return
		}
		_ = outside.Close() // of a stream of the link: ends this direction only
	})
	wg.Wait()
	return nil
}

// dialLoopback connects to a port of either loopback address.
func dialLoopback(ctx context.Context, port string) (*net.TCPConn, error) {
	var d net.Dialer
	for _, host := range []string{"127.0.0.1", "::1"} {
		conn, err := d.DialContext(ctx, "tcp", net.JoinHostPort(host, port))
		if tcp, ok := conn.(*net.TCPConn); err == nil && ok {
			return tcp, nil
		}
		if !errors.Is(err, unix.ECONNREFUSED) && host == "127.0.0.1" {
			return nil, core.Wrapf(err, core.Unavailable, core.CodePortClosed, "port %s of the sandbox cannot be reached", port)
		}
	}
	return nil, core.Errorf(core.Unavailable, core.CodePortClosed, "no program in the sandbox listens on port %s", port)
}
