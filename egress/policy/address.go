package policy

import (
	"net/netip"
	"slices"

	"github.com/coppice-dev/coppice/core"
)

// Reach says which addresses may be dialled for a sandbox. The zero Reach allows all public addresses.
type Reach struct {
	Private []netip.Prefix // networks of the operator that are not public and may be reached all the same
	Own     []netip.Prefix // addresses of this installation; never reachable, whatever Private says
}

// denial is a denied network and the reason.
type denial struct {
	net  netip.Prefix
	why  string
	hard bool // Reach.Private does not open it
}

// denied are the networks that are not part of the public Internet, from the registries of special-purpose addresses of
// IANA. They include the metadata services of clouds.
var denied = []denial{
	deny("0.0.0.0/8", "this network", true),
	deny("10.0.0.0/8", "private", false),
	deny("100.64.0.0/10", "shared address space", false),
	deny("127.0.0.0/8", "loopback", true),
	deny("168.63.129.16/32", "metadata service", true),
	deny("100.100.100.200/32", "metadata service", true),
	deny("169.254.0.0/16", "link-local, metadata services", true),
	deny("172.16.0.0/12", "private", false),
	deny("192.0.0.0/24", "protocol assignments", true),
	deny("192.0.2.0/24", "documentation", false),
	deny("192.31.196.0/24", "AS112", true),
	deny("192.52.193.0/24", "AMT", true),
	deny("192.88.99.0/24", "6to4 relays", true),
	deny("192.168.0.0/16", "private", false),
	deny("192.175.48.0/24", "AS112", true),
	deny("198.18.0.0/15", "benchmarks", false),
	deny("198.51.100.0/24", "documentation", false),
	deny("203.0.113.0/24", "documentation", false),
	deny("224.0.0.0/4", "multicast", true),
	deny("240.0.0.0/4", "reserved, broadcast", true),

	deny("fc00::/7", "private", false),
	deny("fd00:ec2::/32", "metadata service", true),
	deny("2001::/23", "protocol assignments, Teredo", true),
	deny("2001:db8::/32", "documentation", false),
	deny("2002::/16", "6to4", true),
	deny("2620:4f:8000::/48", "AS112", true),
	deny("3fff::/20", "documentation", false),
}

func deny(net, why string, hard bool) denial { return denial{netip.MustParsePrefix(net), why, hard} }

// public6 is the part of IPv6 that has been assigned. Any other address that is not private belongs to no host, or
// stands for an IPv4 address (::/96, ::ffff:0:0/96, 64:ff9b::/96, 64:ff9b:1::/48).
var (
	public6  = netip.MustParsePrefix("2000::/3")
	private6 = netip.MustParsePrefix("fc00::/7")
)

// Check returns nil if an address may be dialled, and otherwise an error that gives the reason.
func (r Reach) Check(a netip.Addr) error {
	if why := r.Refusal(a); why != "" {
		return refuse(a, why)
	}
	return nil
}

// Refusal says why an address may not be dialled. It is empty if it may.
func (r Reach) Refusal(a netip.Addr) string {
	if !a.IsValid() || a.Zone() != "" {
		return "not the address of a host"
	}
	if a.Is4In6() { // a socket would dial the IPv4 address
		return "IPv4 written as IPv6"
	}
	for _, own := range r.Own {
		if own.Contains(a) {
			return "an address of this installation"
		}
	}
	if a.Is6() && !public6.Contains(a) && !private6.Contains(a) {
		return "not a public IPv6 address"
	}
	private := slices.ContainsFunc(r.Private, func(p netip.Prefix) bool { return p.Contains(a) })
	for _, d := range denied {
		if d.net.Contains(a) && (d.hard || !private) {
			return d.why
		}
	}
	return ""
}

func refuse(a netip.Addr, why string) error {
	return core.Errorf(core.PermissionDenied, core.CodePermissionDenied, "a sandbox may never reach %s (%s)", a, why)
}
