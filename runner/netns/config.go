package netns

import (
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"regexp"
	"strings"
)

// The network that guests see unless Config says otherwise. It is the same in every namespace.
const (
	DefaultSubnet  = "10.83.0.0/16"
	DefaultGateway = "10.83.0.1"
	// GatewayMAC is the tap's own address in every namespace, so that a guest's neighbour entry for its gateway
	// stays right across forks.
	GatewayMAC = "02:c0:99:1c:e0:01"
	// TapName is the tap's name in every namespace.
	TapName = "tap0"
)

// DefaultMax bounds the namespaces of a pool whose Config does not.
const DefaultMax = 256

// Rate is how much a guest may send. What comes beyond it is dropped and counted. A frame of the guest's device is a packet, also one
// of 64 KiB that a real network would see as many.
type Rate struct {
	Bytes   int64 // a second
	Packets int   // a second
}

// DefaultRate is the rate of a pool whose Config has none: a gigabit, and more packets than a useful guest sends.
var DefaultRate = Rate{Bytes: 128 << 20, Packets: 100_000}

// Config describes a pool. The zero value of every field but ClusterID and Log has a default.
type Config struct {
	ClusterID string       // whatever is named on the host carries a hash of it; required
	Warm      int          // namespaces that Run keeps ready; 0 makes each on demand
	Max       int          // namespaces alive at once, idle ones included (200 KB of kernel memory each); default DefaultMax
	Log       *slog.Logger // required

	Rate Rate // of what each guest sends; default DefaultRate

	Subnet  netip.Prefix // guests' addresses, IPv4; default DefaultSubnet
	Gateway netip.Addr   // the tap's address, inside Subnet; default DefaultGateway
	// LinkSubnet is where the veth pairs of allow-all take their /30 from: addresses that mean nothing outside this
	// host and that its networks do not use. Default 198.18.0.0/15, reserved for benchmarks (RFC 2544).
	LinkSubnet netip.Prefix
}

func (c Config) withDefaults() Config {
	if c.Max == 0 {
		c.Max = DefaultMax
	}
	if c.Rate.Bytes == 0 {
		c.Rate.Bytes = DefaultRate.Bytes
	}
	if c.Rate.Packets == 0 {
		c.Rate.Packets = DefaultRate.Packets
	}
	if !c.Subnet.IsValid() {
		c.Subnet = netip.MustParsePrefix(DefaultSubnet)
	}
	if !c.Gateway.IsValid() {
		c.Gateway = netip.MustParseAddr(DefaultGateway)
	}
	if !c.LinkSubnet.IsValid() {
		c.LinkSubnet = netip.MustParsePrefix("198.18.0.0/15")
	}
	return c
}

func (c Config) validate() error {
	var errs []error
	check := func(ok bool, format string, a ...any) {
		if !ok {
			errs = append(errs, fmt.Errorf(format, a...))
		}
	}
	check(c.ClusterID != "", "cluster id is empty")
	check(c.Log != nil, "log is nil")
	check(c.Warm >= 0 && c.Max > 0 && c.Warm <= c.Max, "warm %d and max %d must satisfy 0 <= warm <= max", c.Warm, c.Max)
	check(c.Subnet.Addr().Is4() && c.Subnet == c.Subnet.Masked(), "subnet %s is not an IPv4 network", c.Subnet)
	check(c.Rate.Bytes > 0 && c.Rate.Packets > 0, "the rate of %d bytes and %d packets a second must be positive", c.Rate.Bytes, c.Rate.Packets)
	check(usable(c.Subnet, c.Gateway), "gateway %s is not a host address of %s", c.Gateway, c.Subnet)
	check(c.LinkSubnet.Addr().Is4() && c.LinkSubnet.Bits() <= 30 && !c.LinkSubnet.Overlaps(c.Subnet),
		"link subnet %s must be IPv4, hold a /30 and lie outside %s", c.LinkSubnet, c.Subnet)
	if err := errors.Join(errs...); err != nil {
		return fmt.Errorf("netns config: %w", err)
	}
	return nil
}

// own are the networks of the cluster itself, which no guest may reach but through its gateway.
func (c Config) own() []netip.Prefix { return []netip.Prefix{c.Subnet, c.LinkSubnet} }

// usable reports whether ip is a host address of subnet, neither its network nor its broadcast address.
func usable(subnet netip.Prefix, ip netip.Addr) bool {
	if !ip.Is4() || !subnet.Contains(ip) || ip == subnet.Masked().Addr() {
		return false
	}
	next := ip.Next()
	return next.IsValid() && subnet.Contains(next)
}

// ErrRulesDiffer is returned, wrapped, when the rules of a namespace were not those that were applied. Its guest has been cut off.
var ErrRulesDiffer = errors.New("the rules in the kernel are not those that were applied")

// The forms of names. An interface name holds at most 15 characters: 2 + hashLen + idLen.
const (
	hashLen = 8
	idLen   = 5
)

// names makes and recognises what carries one cluster's hash.
type names struct{ hash string }

func namesOf(clusterID string) names {
	sum := sha256.Sum256([]byte("coppice network namespaces of cluster " + clusterID))
	return names{hash: hex.EncodeToString(sum[:])[:hashLen]}
}

func (n names) namespace(id string) string { return "coppice-" + n.hash + "-" + id }
func (n names) link(id string) string      { return "cp" + n.hash + id }
func (n names) table(id string) string     { return "coppice_" + n.hash + "_" + id }

var idForm = regexp.MustCompile(`^[a-z2-7]{5}$`)

// id returns what follows prefix in name if it has the form of an id.
func idAfter(prefix, name string) (string, bool) {
	id, ok := strings.CutPrefix(name, prefix)
	return id, ok && idForm.MatchString(id)
}

func (n names) namespaceID(name string) (string, bool) { return idAfter(n.namespace(""), name) }
func (n names) linkID(name string) (string, bool)      { return idAfter(n.link(""), name) }
func (n names) tableID(name string) (string, bool)     { return idAfter(n.table(""), name) }

// newID returns five random letters or digits. Creating the namespace's file finds a clash.
func newID() string { return strings.ToLower(rand.Text()[:idLen]) }

// parseMAC accepts a unicast, non-zero MAC that is not the gateway's.
func parseMAC(s string) (net.HardwareAddr, error) {
	mac, err := net.ParseMAC(s)
	switch {
	case err != nil || len(mac) != 6:
		return nil, fmt.Errorf("%q is not a 48-bit MAC", s)
	case mac[0]&1 != 0 || mac.String() == "00:00:00:00:00:00" || mac.String() == GatewayMAC:
		return nil, fmt.Errorf("%s is a group, zero or gateway address and cannot be a guest's", mac)
	}
	return mac, nil
}
