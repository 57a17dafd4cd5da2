//go:build !linux

package proxy

import (
	"errors"
	"net"
	"net/netip"
)

// OriginalDestination works on Linux only.
func OriginalDestination(net.Conn) (netip.AddrPort, error) {
	return netip.AddrPort{}, errors.ErrUnsupported
}
