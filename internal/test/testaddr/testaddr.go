// Package testaddr gives tests addresses to listen on to which they can come back.
//
// A server that is to be killed and started again at its address must find the port free. On 127.0.0.1 any process of the host may
// have got it meanwhile, as the near end of a connection or by asking for a free one, and a client that dials the port while nobody
// listens may even be given that very port. Addresses elsewhere in 127.0.0.0/8 are nobody's unless they are asked for by name.
package testaddr

import (
	"crypto/rand"
	"net/netip"
	"runtime"
)

// New returns a loopback address, with port 0, of which no other test knows.
func New() string {
	ip := netip.AddrFrom4([4]byte{127, 0, 0, 1})
	if runtime.GOOS == "linux" { // elsewhere the host has only that one
		var b [3]byte
		_, _ = rand.Read(b[:]) // never fails
		ip = netip.AddrFrom4([4]byte{127, 1 + b[0]%253, b[1], b[2]})
	}
	return netip.AddrPortFrom(ip, 0).String()
}
