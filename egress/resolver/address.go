package resolver

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"

	"github.com/coppice-dev/coppice/egress/policy"
)

// Network contains the addresses of names. It is reserved for benchmarks (RFC 2544), so it contains no host of the
// Internet.
var Network = netip.MustParsePrefix("198.18.0.0/15")

// Address returns the address of a name. A name always has the same address, and two names hardly ever share one.
func Address(h policy.Host) netip.Addr {
	sum := sha256.Sum256([]byte("coppice name\x00" + h.Name()))
	const hosts = 1<<17 - 2 // all but the first and the last address
	base := Network.Addr().As4()
	n := binary.BigEndian.Uint32(base[:]) + 1 + uint32(binary.BigEndian.Uint64(sum[:])%hosts)
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
}

// Host returns the name for a connection to an address and port, among the names that a policy allows with any
// protocol. It returns none when two such names share the address.
func Host(p policy.Policy, to netip.AddrPort) (found policy.Host, ok bool) {
	for _, h := range p.Names(to.Port()) {
		if Address(h) != to.Addr() {
			continue
		}
		if ok && h != found {
			return policy.Host{}, false
		}
		found, ok = h, true
	}
	return found, ok
}
