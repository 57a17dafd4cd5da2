package netns

import (
	"fmt"
	"net"
	"net/netip"
	"strconv"
	"strings"
)

// ruleset is a description of nftables tables as data. String prints it as `nft -s list ruleset` would, and
// compile.go turns it into what the kernel takes; nothing else interprets it.
type ruleset []table

type table struct {
	family   family
	name     string
	counters []string // named counters, in the kernel's order of listing: that of creation
	chains   []chain
}

type family string

const (
	familyNetdev family = "netdev"
	familyInet   family = "inet"
)

// chain is a base chain if hook is set, else one that others jump to. A base chain's policy is drop or accept.
type chain struct {
	name     string
	kind     string // filter or nat
	hook     string
	device   string // of a netdev hook
	priority int
	policy   verdict
	rules    []rule
}

// rule holds if all of match do. counter, if set, names a counter of the table that counts it.
type rule struct {
	match   []match
	counter string
	verdict verdict
	comment string
}

type verdict string

const (
	accept     verdict = "accept"
	drop       verdict = "drop"
	masquerade verdict = "masquerade"
)

func jump(to string) verdict { return verdict("jump " + to) }

// redirect sends a connection to a port of this namespace instead.
func redirect(port uint16) verdict { return verdict(redirectTo + strconv.Itoa(int(port))) }

const redirectTo = "redirect to :"

// match is one condition of a rule; its String is nft's syntax.
type match interface{ fmt.Stringer }

type (
	// etherSource is the sender of the frame.
	etherSource struct {
		not bool
		mac net.HardwareAddr
	}
	// etherType is the type in the frame itself, so a VLAN tag shows as 0x8100 and not as what it encloses.
	etherType uint16
	// ipSource and ipDest are IPv4 addresses of the packet.
	ipSource struct {
		not bool
		ip  netip.Addr
	}
	ipDest struct {
		not bool
		net netip.Prefix
	}
	// arpSourceMAC and arpSourceIP are the sender fields inside an ARP packet, arpDestIP the target.
	arpSourceMAC struct {
		not bool
		mac net.HardwareAddr
	}
	arpSourceIP struct {
		not bool
		ip  netip.Addr
	}
	arpDestIP  struct{ ip netip.Addr }
	arpRequest struct{}
	// inDevice and outDevice are matched by name, so a rule may precede its device.
	inDevice  string
	outDevice struct {
		not  bool
		name string
	}
	// ctState is any of the bits of connection tracking's state.
	ctState uint32
	tcpDest uint16
	udpDest uint16
	// overTCP is any TCP segment.
	overTCP struct{}
	// rateOver matches packets beyond a rate, in packets or bytes.
	rateOver struct {
		bytes     bool
		perSecond uint64
		burst     uint32
	}
	// destLocal is any address of this namespace itself.
	destLocal struct{}
)

const (
	ctEstablished ctState = 2 // the kernel's bits, NF_CT_STATE_BIT
	ctRelated     ctState = 4
	ctNew         ctState = 8
)

const (
	typeIPv4 etherType = 0x0800
	typeARP  etherType = 0x0806
	typeIPv6 etherType = 0x86dd
)

func op(not bool) string {
	if not {
		return "!= "
	}
	return ""
}

func (m etherSource) String() string  { return "ether saddr " + op(m.not) + m.mac.String() }
func (m ipSource) String() string     { return "ip saddr " + op(m.not) + m.ip.String() }
func (m arpSourceMAC) String() string { return "arp saddr ether " + op(m.not) + m.mac.String() }
func (m arpSourceIP) String() string  { return "arp saddr ip " + op(m.not) + m.ip.String() }
func (m arpDestIP) String() string    { return "arp daddr ip " + m.ip.String() }
func (arpRequest) String() string     { return "arp operation request" }
func (m inDevice) String() string     { return "iifname " + strconv.Quote(string(m)) }
func (m outDevice) String() string    { return "oifname " + op(m.not) + strconv.Quote(m.name) }
func (m tcpDest) String() string      { return "tcp dport " + strconv.Itoa(int(m)) }
func (m udpDest) String() string      { return "udp dport " + strconv.Itoa(int(m)) }
func (overTCP) String() string        { return "meta l4proto tcp" }
func (m rateOver) String() string {
	if m.bytes {
		return fmt.Sprintf("limit rate over %d bytes/second burst %d bytes", m.perSecond, m.burst)
	}
	return fmt.Sprintf("limit rate over %d/second burst %d packets", m.perSecond, m.burst)
}

func (destLocal) String() string { return "fib daddr type local" }

func (m ipDest) String() string {
	if m.net.IsSingleIP() {
		return "ip daddr " + op(m.not) + m.net.Addr().String()
	}
	return "ip daddr " + op(m.not) + m.net.String()
}

func (m etherType) String() string {
	switch m {
	case typeIPv4:
		return "ether type ip"
	case typeARP:
		return "ether type arp"
	case typeIPv6:
		return "ether type ip6"
	}
	return fmt.Sprintf("ether type %#04x", uint16(m))
}

func (m ctState) String() string {
	var names []string
	for _, s := range []struct {
		bit  ctState
		name string
	}{{ctEstablished, "established"}, {ctRelated, "related"}, {ctNew, "new"}} {
		if m&s.bit != 0 {
			names = append(names, s.name)
		}
	}
	return "ct state " + strings.Join(names, ",")
}

// String prints the ruleset in nft's syntax and layout.
func (rs ruleset) String() string {
	var b strings.Builder
	for _, t := range rs {
		fmt.Fprintf(&b, "table %s %s {\n", t.family, t.name)
		for _, c := range t.counters {
			fmt.Fprintf(&b, "\tcounter %s {\n\t}\n\n", c)
		}
		for i, c := range t.chains {
			if i > 0 {
				b.WriteByte('\n')
			}
			c.print(&b)
		}
		b.WriteString("}\n")
	}
	return b.String()
}

func (c chain) print(b *strings.Builder) {
	fmt.Fprintf(b, "\tchain %s {\n", c.name)
	if c.hook != "" {
		device := ""
		if c.device != "" {
			device = " device " + strconv.Quote(c.device)
		}
		fmt.Fprintf(b, "\t\ttype %s hook %s%s priority %s; policy %s;\n", c.kind, c.hook, device, c.priorityName(), c.policy)
	}
	for _, r := range c.rules {
		fmt.Fprintf(b, "\t\t%s\n", r)
	}
	b.WriteString("\t}\n")
}

// priorityName is how nft shows a priority: by name where the hook has one for it.
func (c chain) priorityName() string {
	switch {
	case c.priority == priorityFilter:
		return "filter"
	case c.priority == prioritySourceNAT && c.hook == "postrouting":
		return "srcnat"
	case c.priority == priorityDestNAT && c.hook == "prerouting":
		return "dstnat"
	case c.priority == priorityRaw && c.device == "":
		return "raw"
	}
	return strconv.Itoa(c.priority)
}

// The priorities in use, as linux/netfilter_ipv4.h and nft name them.
const (
	priorityRate      = -501 // before the rules themselves
	priorityIngress   = -500 // before anything else that may hook the tap
	priorityRaw       = -300
	priorityDestNAT   = -100
	priorityFilter    = 0
	prioritySourceNAT = 100
)

// String prints the rule in nft's syntax.
func (r rule) String() string {
	var parts []string
	for _, m := range r.match {
		parts = append(parts, m.String())
	}
	if r.counter != "" {
		parts = append(parts, "counter name "+strconv.Quote(r.counter))
	}
	if r.verdict != "" {
		parts = append(parts, string(r.verdict))
	}
	if r.comment != "" {
		parts = append(parts, "comment "+strconv.Quote(r.comment))
	}
	return strings.Join(parts, " ")
}
