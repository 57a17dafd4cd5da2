package controller

import (
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"

	"github.com/coppice-dev/coppice/core"
)

// newIdentity draws what a sandbox shares with no other. Only the address comes from a pool; the database's unique indexes
// have the last word about all of it.
func newIdentity(hostname, address string) (core.Identity, error) {
	ip, err := netip.ParseAddr(address)
	if err != nil {
		return core.Identity{}, fmt.Errorf("address of a sandbox: %w", err)
	}
	var b [16 + 16 + 6]byte
	_, _ = rand.Read(b[:]) // never fails: crypto/rand ends the program instead
	uuid, machine, mac := b[:16], b[16:32], b[32:]
	uuid[6], uuid[8] = uuid[6]&0x0f|0x40, uuid[8]&0x3f|0x80 // version 4, variant 1
	mac[0] = mac[0]&^0x01 | 0x02                            // unicast, locally administered
	return core.Identity{
		Generation: fmt.Sprintf("%x-%x-%x-%x-%x", uuid[:4], uuid[4:6], uuid[6:8], uuid[8:10], uuid[10:]),
		Hostname:   hostname,
		MachineID:  hex.EncodeToString(machine),
		MAC:        net.HardwareAddr(mac).String(),
		IP:         ip,
	}, nil
}

const maxLabel = 63

// hostnameOf is the workspace's name, or the name with a random end when the plain one is taken: by a sandbox that a
// restore is about to replace, or by a workspace that is called like an earlier such host.
func hostnameOf(name string, plain bool) string {
	if plain {
		return name
	}
	const suffix = 6
	var b [suffix / 2]byte
	_, _ = rand.Read(b[:])
	return name[:min(len(name), maxLabel-suffix-1)] + "-" + hex.EncodeToString(b[:])
}
