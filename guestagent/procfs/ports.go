//go:build linux

package procfs

import (
	"encoding/hex"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/account"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Ports lists the listening TCP sockets and, if it can be found, the process of each. The processes are those in the given /proc.
func Ports(proc string) (guestapi.Ports, error) {
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
		nameOwners(proc, inodes, out.Ports)
	}
	slices.SortFunc(out.Ports, func(a, b guestapi.Port) int { return a.Port - b.Port })
	return out, nil
}

// nameOwners finds the processes that have the sockets.
func nameOwners(proc string, inodes map[string]int, ports []guestapi.Port) {
	list, err := pids(proc)
	if err != nil {
		return
	}
	for _, pid := range list[:min(len(list), maxProcesses)] {
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
				st, err := ReadStat(proc, pid)
				if err == nil {
					ports[i].PID, ports[i].Process = pid, st.Comm
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
