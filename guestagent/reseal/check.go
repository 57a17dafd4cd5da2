//go:build linux

package reseal

import (
	"net"
	"strings"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// only reports whether every byte of s passes.
func only(s string, pass func(c byte) bool) bool {
	for i := range len(s) {
		if !pass(s[i]) {
			return false
		}
	}
	return true
}

func isHex(c byte) bool   { return c >= '0' && c <= '9' || c >= 'a' && c <= 'f' }
func isGraph(c byte) bool { return c > ' ' && c <= '~' }
func isLabel(c byte) bool { return c >= '0' && c <= '9' || c >= 'a' && c <= 'z' || c == '-' }

// isHostname reports whether s is one label of a host name.
func isHostname(s string) bool {
	return s != "" && len(s) <= 63 && only(s, isLabel) && s[0] != '-' && s[len(s)-1] != '-'
}

// CheckRequest refuses an invalid request before anything is changed.
func CheckRequest(req guestapi.ResealRequest) error {
	if err := CheckEntropy(req.Entropy); err != nil {
		return err
	}
	bad := func(format string, a ...any) error {
		return core.Errorf(core.Invalid, core.CodeInvalidField, format, a...)
	}
	id := req.Identity
	switch {
	case id.Generation == "" || id.Generation != core.Clip(id.Generation):
		return bad("identity.generation is missing, too long or not printable")
	case len(id.MachineID) != 32 || !only(id.MachineID, isHex):
		return bad("identity.machine_id must be 32 hex digits")
	case !isHostname(id.Hostname):
		return bad("identity.hostname is not a host name")
	case req.HostTimeNS <= 0:
		return bad("host_time_ns is missing")
	case len(req.Token) > 4096 || !only(req.Token, isGraph):
		return bad("token is not printable or too long")
	case req.Provisional && (req.Env != nil || len(req.Network.DNS) > 0 || req.GrowDisk):
		return bad("a provisional reseal takes no env, no resolvers and no growth of the disk: the next reseal might leave them")
	}
	for k, v := range req.Env {
		if k == "" || strings.ContainsAny(k, "=\x00") || strings.ContainsRune(v, 0) {
			return bad("env has the invalid name or value %q", core.Clip(k))
		}
	}
	if id.MAC == "" && !id.IP.IsValid() {
		return nil
	}
	n := req.Network
	mac, err := net.ParseMAC(id.MAC)
	switch {
	case err != nil || len(mac) != 6 || mac[0]&1 != 0:
		return bad("identity.mac is not a unicast Ethernet address")
	case !id.IP.Is4():
		return bad("identity.ip must be an IPv4 address")
	case n.Prefix < 1 || n.Prefix > 32:
		return bad("network.prefix must be between 1 and 32")
	case n.Gateway.IsValid() && !n.Gateway.Is4():
		return bad("network.gateway must be an IPv4 address")
	case n.MTU != 0 && (n.MTU < 576 || n.MTU > 65535):
		return bad("network.mtu must be between 576 and 65535")
	}
	if n.GatewayMAC != "" {
		if mac, err := net.ParseMAC(n.GatewayMAC); err != nil || len(mac) != 6 {
			return bad("network.gateway_mac is not an Ethernet address")
		}
	}
	return nil
}

// CheckEntropy refuses entropy that would make two clones equal.
func CheckEntropy(b []byte) error {
	if len(b) != guestapi.EntropySize {
		return core.Errorf(core.Invalid, core.CodeInvalidField, "entropy has %d bytes; it must have %d", len(b), guestapi.EntropySize)
	}
	for _, c := range b {
		if c != b[0] {
			return nil
		}
	}
	return core.Errorf(core.Invalid, core.CodeInvalidField, "entropy is one repeated byte")
}
