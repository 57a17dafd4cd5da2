package resolver

import (
	"crypto/sha256"
	"encoding/binary"
	"net/netip"

	"github.com/coppice-dev/coppice/egress/policy"
)

// Network is where the addresses of names are: it is reserved for benchmarks (RFC 2544), so no host of the Internet is in it.
var Network = netip.MustParsePrefix("198.18.0.0/15")

// Address is the address of a name: always the same for one name, and hardly ever the same for two.
func Address(h policy.Host) netip.Addr {
	sum := sha256.Sum256([]byte("coppice name\x00" + h.Name()))
	const hosts = 1<<17 - 2 // without the first and the last
	base := Network.Addr().As4()
	n := binary.BigEndian.Uint32(base[:]) + 1 + uint32(binary.BigEndian.Uint64(sum[:])%hosts)
	return netip.AddrFrom4([4]byte(binary.BigEndian.AppendUint32(nil, n)))
}

// Host is the name that a connection to an address and port is for, of those that a policy lets be spoken to with any protocol. There is none
// when two such names have the address.
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
