// Package identity makes the identities of new sandboxes: the ids of a machine, its hardware address,
// its hostname, and an address that no other sandbox of its runner or tree has.
package identity

import (
	"context"
	"crypto/rand"
	"encoding/hex"
	"fmt"
	"net"
	"net/netip"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// New makes the identity of a sandbox, with values that no other sandbox has. Only the address comes from a pool. Unique
// indexes of the database reject what is taken.
func New(hostname, address string) (core.Identity, error) {
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

// AddressesWanted describes new sandboxes of one tree that need addresses.
type AddressesWanted struct {
	Tree    string
	Runners []core.RunnerID // the runner of each sandbox
	Except  []string        // addresses that none of them may have
}

// Tx draws addresses.
type Tx interface {
	// FreeAddresses returns a random address for each named runner, all different. It fails with CAPACITY if hardly any is free.
	FreeAddresses(ctx context.Context, w AddressesWanted) ([]string, error)
}

// Addresses draws an address for each runner, for sandboxes of a tree. It never draws the addresses in except: they may be free, but a
// guest would confuse them with its own old address.
func Addresses(ctx context.Context, tx Tx, tree string, runners []model.Runner, except ...string) ([]string, error) {
	ids := make([]core.RunnerID, len(runners))
	for i, r := range runners {
		ids[i] = r.Info.RunnerID
	}
	return tx.FreeAddresses(ctx, AddressesWanted{Tree: tree, Runners: ids, Except: except})
}

const maxLabel = 63

// Hostname is the workspace's name or, if another sandbox has this hostname, the name with a random suffix. The other sandbox is one that
// a restore is about to replace, or one that got this hostname earlier as a name with a suffix.
func Hostname(name string, plain bool) string {
	if plain {
		return name
	}
	const suffix = 6
	var b [suffix / 2]byte
	_, _ = rand.Read(b[:])
	return name[:min(len(name), maxLabel-suffix-1)] + "-" + hex.EncodeToString(b[:])
}
