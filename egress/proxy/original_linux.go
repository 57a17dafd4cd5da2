package proxy

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"

	"golang.org/x/sys/unix"
)

// OriginalDestination returns the destination that a connection had before the kernel redirected it.
func OriginalDestination(c net.Conn) (netip.AddrPort, error) {
	sc, ok := c.(syscall.Conn)
	if !ok {
		return netip.AddrPort{}, fmt.Errorf("a %T has no socket", c)
	}
	raw, err := sc.SyscallConn()
	if err != nil {
		return netip.AddrPort{}, err
	}
	var to netip.AddrPort
	var failed error
	err = raw.Control(func(fd uintptr) {
		// The option's value is a sockaddr_in: family, then port and address in network order. Of the calls in x/sys,
		// only this one has room for it.
		v, err := unix.GetsockoptIPv6Mreq(int(fd), unix.IPPROTO_IP, unix.SO_ORIGINAL_DST)
		if err != nil {
			failed = err
			return
		}
		b := v.Multiaddr
		to = netip.AddrPortFrom(netip.AddrFrom4([4]byte(b[4:8])), binary.BigEndian.Uint16(b[2:4]))
	})
	return to, errors.Join(err, failed)
}
