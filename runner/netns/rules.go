package netns

import (
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"github.com/coppice-dev/coppice/core"
)

// state is how far a namespace has come; see the package's documentation.
type state string

const (
	quarantined state = "quarantined"
	assigned    state = "assigned"
	opened      state = "open"
)

// plan is everything that the rules of a namespace depend on.
type plan struct {
	state    state
	mac      net.HardwareAddr  // of the guest, from assigned on
	ip       netip.Addr        // of the guest, from assigned on
	policy   core.EgressPolicy // from opened on
	services []uint16          // ascending TCP ports of the gateway that the guest may connect to
	names    bool              // under allow-all: the guest may ask the gateway for names; not in a namespace that an older runner opened
	gateway  netip.Addr
	own      []netip.Prefix // the cluster's guest and link networks
	rate     Rate           // of what the guest sends; the comment does not carry it, see rateIn
}

// maxServices bounds plan.services so that a plan fits the comment it is stored in.
const maxServices = 8

// planVersion begins the comment. A runner that finds another version does not adopt the namespace.
const planVersion = "coppice-1"

// String is the comment that carries the plan in the kernel; parsePlan reads it back.
func (p plan) String() string {
	if p.state == quarantined {
		return planVersion + " " + string(quarantined)
	}
	policy := string(p.policy)
	if policy == "" {
		policy = "-"
	}
	fields := []string{planVersion, string(p.state), p.mac.String(), p.ip.String(), policy}
	for _, s := range p.services {
		fields = append(fields, strconv.Itoa(int(s)))
	}
	if p.names {
		fields = append(fields, namesField)
	}
	return strings.Join(fields, " ")
}

// namesField ends the comment of a plan with names.
const namesField = "names"

// parsePlan takes what the comment does not carry from like.
func parsePlan(comment string, like plan) (plan, error) {
	fields := strings.Fields(comment)
	bad := func() (plan, error) {
		return plan{}, fmt.Errorf("%q is not a plan of version %s", core.Clip(comment), planVersion)
	}
	if len(fields) < 2 || fields[0] != planVersion {
		return bad()
	}
	p := like
	p.state = state(fields[1])
	if p.state == quarantined && p.String() == comment {
		return p, nil
	}
	if p.state != assigned && p.state != opened || len(fields) < 5 {
		return bad()
	}
	var err error
	if p.mac, err = parseMAC(fields[2]); err != nil {
		return bad()
	}
	if p.ip, err = netip.ParseAddr(fields[3]); err != nil {
		return bad()
	}
	if fields[4] != "-" {
		p.policy = core.EgressPolicy(fields[4])
	}
	rest := fields[5:]
	if n := len(rest); n > 0 && rest[n-1] == namesField {
		p.names, rest = true, rest[:n-1]
	}
	for _, f := range rest {
		port, err := strconv.ParseUint(f, 10, 16)
		if err != nil {
			return bad()
		}
		p.services = append(p.services, uint16(port))
	}
	if p.String() != comment {
		return bad()
	}
	return p, nil
}

// withService returns the plan with port added or removed.
func (p plan) withService(port uint16, wanted bool) plan {
	at, found := slices.BinarySearch(p.services, port)
	services := slices.Clone(p.services)
	switch {
	case wanted && !found:
		services = slices.Insert(services, at, port)
	case !wanted && found:
		services = slices.Delete(services, at, at+1)
	}
	p.services = services
	return p
}

// The ports at the gateway of a proxied sandbox, behind which are the sockets of [Namespace.EgressSockets]. Under allow-all the guest
// reaches only that of the resolver.
const (
	PortProxy       = 3128 // for programs that know of the proxy
	PortIntercepted = 3129 // where everything else that goes out over TCP ends up
	PortResolver    = 53   // over UDP and TCP
)

// The tables inside a namespace. tableUplink exists only under allow-all, tableProxy only when proxied.
const (
	tableMain   = "coppice"
	tableUplink = "coppice_uplink"
	tableProxy  = "coppice_proxy"
	tableRate   = "coppice_rate" // not in a namespace that an older runner made
	uplinkName  = "up0"          // the veth inside the namespace
)

// The counters that Namespace.Counters returns, in packets.
const (
	counterAccepted      = "accepted"        // ARP for the gateway and IPv4 that passed the tap's own checks
	counterDropSpoof     = "drop_spoof"      // a sender, in the frame, packet or ARP body, that is not the guest's
	counterDropARP       = "drop_arp"        // ARP that is not a request for the gateway
	counterDropV6        = "drop_v6"         // IPv6
	counterDropType      = "drop_type"       // anything else that is not IPv4 or ARP: VLAN tags, RARP, LLDP
	counterDropSpecial   = "drop_special"    // metadata, loopback, multicast and reserved destinations
	counterDropPrivate   = "drop_private"    // private destinations under allow-all
	counterDropForward   = "drop_forward"    // any other destination that is not the gateway
	counterDropInput     = "drop_input"      // to the gateway, but no reply and no service
	counterDropOutput    = "drop_output"     // from the namespace, but not to the guest
	counterDropRate      = "drop_rate"       // beyond the rate that a guest may send at
	counterDropQuarant   = "drop_quarantine" // anything at all while quarantined or assigned
	counterEstablished   = "established"     // replies of the guest to sockets opened by the host
	counterService       = "service"         // new connections of the guest to services at the gateway
	counterForwarded     = "forwarded"       // to the outside under allow-all
	counterForwardReturn = "forward_return"  // replies to those
	counterIntercepted   = "intercepted"     // new connections to somewhere else that were redirected to the proxy
)

// Destinations that no policy reaches. A rule for each stands before anything that accepts.
var specialNets = prefixes(
	"0.0.0.0/8",        // this network
	"127.0.0.0/8",      // loopback
	"169.254.0.0/16",   // link-local: metadata services of most clouds
	"168.63.129.16/32", // metadata service of Azure
	"224.0.0.0/4",      // multicast
	"240.0.0.0/4",      // reserved, and broadcast
)

// Destinations that even allow-all does not reach: the host's surroundings and other sandboxes.
var privateNets = prefixes(
	"10.0.0.0/8",
	"100.64.0.0/10", // shared address space; holds Alibaba's metadata service
	"172.16.0.0/12",
	"192.0.0.0/24",
	"192.168.0.0/16",
	"198.18.0.0/15", // benchmarks: our own links
)

func prefixes(list ...string) []netip.Prefix {
	out := make([]netip.Prefix, len(list))
	for i, s := range list {
		out[i] = netip.MustParsePrefix(s)
	}
	return out
}

// privateAnd are privateNets and those of own that these do not hold.
func privateAnd(own []netip.Prefix) []netip.Prefix {
	out := slices.Clone(privateNets)
	for _, o := range own {
		if !slices.ContainsFunc(out, func(n netip.Prefix) bool { return n.Bits() <= o.Bits() && n.Contains(o.Addr()) }) {
			out = append(out, o)
		}
	}
	return out
}

func single(ip netip.Addr) netip.Prefix { return netip.PrefixFrom(ip, ip.BitLen()) }

// rulesFor renders the rules of a namespace. It is pure: the same plan gives the same rules. Tables, counters and
// chains of tableMain are the same for every plan; only rules differ, so that they can be replaced in one batch.
func rulesFor(p plan) ruleset {
	rs := ruleset{
		{family: familyNetdev, name: tableMain, counters: []string{
			counterAccepted, counterDropSpoof, counterDropARP, counterDropV6, counterDropType,
			counterDropSpecial, counterDropPrivate, counterDropForward, counterDropQuarant,
		}, chains: []chain{
			{
				name: "ingress", kind: "filter", hook: "ingress", device: TapName,
				priority: priorityIngress, policy: drop, rules: ingressRules(p),
			},
			{name: "arp_in", rules: arpRules(p)},
			{name: "ip_in", rules: ipRules(p)},
		}},
		{family: familyInet, name: tableMain, counters: []string{
			counterEstablished, counterService, counterForwarded, counterForwardReturn,
			counterDropInput, counterDropForward, counterDropOutput,
		}, chains: []chain{
			{name: "input", kind: "filter", hook: "input", priority: priorityFilter, policy: drop, rules: inputRules(p)},
			{name: "forward", kind: "filter", hook: "forward", priority: priorityFilter, policy: drop, rules: forwardRules(p)},
			{name: "output", kind: "filter", hook: "output", priority: priorityFilter, policy: drop, rules: outputRules(p)},
		}},
	}
	if p.rate != (Rate{}) {
		rs = append(rs, table{family: familyNetdev, name: tableRate, counters: []string{counterDropRate}, chains: []chain{{
			name: "ingress", kind: "filter", hook: "ingress", device: TapName, priority: priorityRate, policy: accept, rules: rateRules(p.rate),
		}}})
	}
	if p.forwards() {
		rs = append(rs, table{family: familyInet, name: tableUplink, chains: []chain{{
			name: "postrouting", kind: "nat", hook: "postrouting", priority: prioritySourceNAT, policy: accept,
			rules: []rule{{match: []match{outDevice{name: uplinkName}, ipSource{ip: p.ip}}, verdict: masquerade}},
		}}})
	}
	if p.proxied() {
		rs = append(rs, table{family: familyInet, name: tableProxy, counters: []string{counterIntercepted}, chains: []chain{{
			name: "prerouting", kind: "nat", hook: "prerouting", priority: priorityDestNAT, policy: accept,
			rules: []rule{{
				match:   []match{inDevice(TapName), ipSource{ip: p.ip}, ipDest{not: true, net: single(p.gateway)}, overTCP{}},
				counter: counterIntercepted, verdict: redirect(PortIntercepted),
			}},
		}}})
	}
	return rs
}

// rateRules drop what a guest sends beyond its rate, before any other rule looks at it.
func rateRules(r Rate) []rule {
	return []rule{
		{match: []match{rateOver{perSecond: uint64(r.Packets), burst: uint32(max(1, r.Packets/burstPart))}}, counter: counterDropRate, verdict: drop},
		{
			match:   []match{rateOver{bytes: true, perSecond: uint64(r.Bytes), burst: uint32(min(max(leastBurst, r.Bytes/burstPart), mostBurst))}},
			counter: counterDropRate, verdict: drop,
		},
	}
}

// A guest may send an eighth of a second's worth at once, but always a few of the largest frames that its device makes. Of bytes the
// kernel allows a second's worth more.
const (
	burstPart  = 8
	leastBurst = 256 << 10
	mostBurst  = 1 << 30
)

// proxied reports whether what the guest sends over TCP goes to the egress proxy, wherever it was going.
func (p plan) proxied() bool { return p.state == opened && p.policy == core.EgressProxied }

// forwards reports whether the guest's packets may leave the namespace.
func (p plan) forwards() bool { return p.state == opened && p.policy == core.EgressAllowAll }

// ingressRules are the first thing that a frame of the guest meets, before routing and connection tracking.
func ingressRules(p plan) []rule {
	if p.state == quarantined {
		return []rule{{counter: counterDropQuarant, verdict: drop}}
	}
	rules := []rule{{match: []match{etherSource{not: true, mac: p.mac}}, counter: counterDropSpoof, verdict: drop}}
	if p.state == assigned {
		return append(rules, rule{counter: counterDropQuarant, verdict: drop})
	}
	return append(rules,
		rule{match: []match{typeARP}, verdict: jump("arp_in")},
		rule{match: []match{typeIPv4}, verdict: jump("ip_in")},
		rule{match: []match{typeIPv6}, counter: counterDropV6, verdict: drop},
		rule{counter: counterDropType, verdict: drop},
	)
}

// arpRules let the guest ask for the gateway. Its own entry in the namespace is permanent, so nothing it says is
// needed, or believed.
func arpRules(p plan) []rule {
	if p.state != opened {
		return nil
	}
	return []rule{
		{match: []match{arpSourceMAC{not: true, mac: p.mac}}, counter: counterDropSpoof, verdict: drop},
		{match: []match{arpSourceIP{not: true, ip: p.ip}}, counter: counterDropSpoof, verdict: drop},
		{match: []match{arpRequest{}, arpDestIP{p.gateway}}, counter: counterAccepted, verdict: accept},
		{counter: counterDropARP, verdict: drop},
	}
}

func ipRules(p plan) []rule {
	if p.state != opened {
		return nil
	}
	from := ipSource{ip: p.ip}
	rules := []rule{{match: []match{ipSource{not: true, ip: p.ip}}, counter: counterDropSpoof, verdict: drop}}
	rules = append(rules, dropTo(specialNets, counterDropSpecial)...)
	rules = append(rules, rule{match: []match{from, ipDest{net: single(p.gateway)}}, counter: counterAccepted, verdict: accept})
	if p.forwards() {
		rules = append(rules, dropTo(privateAnd(p.own), counterDropPrivate)...)
		rules = append(rules, rule{match: []match{from}, counter: counterAccepted, verdict: accept})
	}
	if p.proxied() { // it does not leave: see tableProxy, and there is no route
		rules = append(rules, rule{match: []match{from, overTCP{}}, counter: counterAccepted, verdict: accept})
	}
	return append(rules, rule{counter: counterDropForward, verdict: drop})
}

func dropTo(nets []netip.Prefix, counter string, first ...match) []rule {
	rules := make([]rule, 0, len(nets))
	for _, n := range nets {
		rules = append(rules, rule{match: append(slices.Clone(first), ipDest{net: n}), counter: counter, verdict: drop})
	}
	return rules
}

func inputRules(p plan) []rule {
	var rules []rule
	if p.state == opened {
		from := []match{inDevice(TapName), ipSource{ip: p.ip}}
		rules = append(rules, rule{
			match:   append(slices.Clone(from), ctEstablished),
			counter: counterEstablished, verdict: accept,
		})
		to := func(m match) {
			rules = append(rules, rule{
				match:   append(slices.Clone(from), ipDest{net: single(p.gateway)}, ctNew, m),
				counter: counterService, verdict: accept,
			})
		}
		for _, port := range p.services {
			to(tcpDest(port))
		}
		if p.names && p.forwards() {
			to(tcpDest(PortResolver))
			to(udpDest(PortResolver))
		}
		if p.proxied() {
			for _, m := range []match{tcpDest(PortProxy), tcpDest(PortIntercepted), tcpDest(PortResolver), udpDest(PortResolver)} {
				to(m)
			}
		}
	}
	return append(rules, rule{counter: counterDropInput, verdict: drop})
}

// forwardRules end with the rule whose comment is the plan.
func forwardRules(p plan) []rule {
	var rules []rule
	if p.forwards() {
		rules = append(rules,
			rule{
				match:   []match{inDevice(TapName), outDevice{name: uplinkName}, ipSource{ip: p.ip}},
				counter: counterForwarded, verdict: accept,
			},
			rule{
				match:   []match{inDevice(uplinkName), outDevice{name: TapName}, ipDest{net: single(p.ip)}, ctEstablished | ctRelated},
				counter: counterForwardReturn, verdict: accept,
			},
		)
	}
	return append(rules, rule{counter: counterDropForward, verdict: drop, comment: p.String()})
}

func outputRules(p plan) []rule {
	var rules []rule
	if p.state == opened {
		rules = append(rules, rule{match: []match{outDevice{name: TapName}, ipDest{net: single(p.ip)}}, verdict: accept})
	}
	return append(rules, rule{counter: counterDropOutput, verdict: drop})
}

// hostRules renders the table on the host that an allow-all namespace needs: link is the host's end of the veth,
// guestEnd the address at the other end, own the cluster's networks. Its chains accept by default because they see
// the whole host's traffic.
func hostRules(tableName, link string, guestEnd netip.Addr, own []netip.Prefix) ruleset {
	in := inDevice(link)
	denied := slices.Concat(specialNets, privateAnd(own))
	prerouting := []rule{
		{match: []match{in, ipSource{not: true, ip: guestEnd}}, verdict: drop},
		{match: []match{in, destLocal{}}, verdict: drop}, // before other tables may redirect it
	}
	return ruleset{{family: familyInet, name: tableName, chains: []chain{
		{
			name: "prerouting", kind: "filter", hook: "prerouting", priority: priorityRaw, policy: accept,
			rules: append(prerouting, dropTo(denied, "", in)...),
		},
		{
			name: "input", kind: "filter", hook: "input", priority: priorityFilter, policy: accept,
			rules: []rule{{match: []match{in}, verdict: drop}},
		},
		{
			name: "forward", kind: "filter", hook: "forward", priority: priorityFilter, policy: accept,
			rules: append(dropTo(denied, "", in),
				rule{match: []match{in}, verdict: accept},
				rule{match: []match{outDevice{name: link}, ctEstablished | ctRelated}, verdict: accept},
				rule{match: []match{outDevice{name: link}}, verdict: drop}),
		},
		{
			name: "postrouting", kind: "nat", hook: "postrouting", priority: prioritySourceNAT, policy: accept,
			rules: []rule{{match: []match{ipSource{ip: guestEnd}, outDevice{not: true, name: link}}, verdict: masquerade}},
		},
	}}}
}
