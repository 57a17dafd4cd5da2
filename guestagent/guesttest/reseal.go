//go:build linux

package guesttest

import (
	"bytes"
	"net/netip"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// Entropy is entropy for a reseal or a reseed.
func Entropy() []byte { return bytes.Repeat([]byte("entropy!"), guestapi.EntropySize/8) }

// ResealRequest is a request that gives a guest a new identity.
func ResealRequest(generation string) guestapi.ResealRequest {
	return guestapi.ResealRequest{
		Identity: core.Identity{
			Generation: generation, Hostname: "fork", MachineID: strings.Repeat("a", 32), MAC: "02:00:00:00:00:01", IP: netip.MustParseAddr("10.0.0.1"),
		},
		HostTimeNS: 1, Entropy: Entropy(), Network: guestapi.Network{Prefix: 32}, Env: map[string]string{"FORK": "1"},
	}
}
