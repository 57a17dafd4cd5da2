package netns

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// addUplink gives a space the way out that allow-all asks for: a veth pair, addresses of a /30 of its own, and a
// table on the host. It undoes nothing on failure: removeUplink removes whatever there is.
func (p *Pool) addUplink(ctx context.Context, s *space) error {
	p.uplinks.Lock()
	defer p.uplinks.Unlock()
	link := p.names.link(s.id)
	p.cfg.Log.WarnContext(ctx, "sandbox gets unfiltered internet access: allow-all is for development only", "namespace", s.name, "link", link)
	var hostEnd, guestEnd netip.Addr
	err := p.onHost(func() (err error) {
		if hostEnd, guestEnd, err = freeLink(p.cfg.LinkSubnet, s.id); err != nil {
			return err
		}
		if err := p.forwardOnHost(ctx); err != nil {
			return err
		}
		if err := withTables(func(c *nftables.Conn) error {
			rules := hostRules(p.names.table(s.id), link, guestEnd, p.cfg.own())
			if err := replaceRules(c, nil, rules); err != nil {
				return err
			}
			return compareTables(c, rules)
		}); err != nil {
			return err
		}
		if err := netlink.LinkAdd(&netlink.Veth{
			LinkAttrs: netlink.LinkAttrs{Name: link}, PeerName: uplinkName, PeerNamespace: netlink.NsFd(s.fd),
		}); err != nil {
			return fmt.Errorf("add veth %s: %w", link, err)
		}
		if err := (sysctl{"ipv6/conf/" + link + "/disable_ipv6", "1"}).set(); err != nil {
			return err
		}
		_, err = setUp(link, hostEnd)
		return err
	})
	if err != nil {
		return fmt.Errorf("host side: %w", err)
	}
	err = s.inside(func() error {
		up, err := setUp(uplinkName, guestEnd)
		if err != nil {
			return err
		}
		route := &netlink.Route{LinkIndex: up.Attrs().Index, Gw: hostEnd.AsSlice()}
		if err := netlink.RouteAdd(route); err != nil {
			return fmt.Errorf("add default route: %w", err)
		}
		return sysctl{forwardingKey, "1"}.set()
	})
	return wrapIf(err, "namespace side")
}

func setUp(name string, ip netip.Addr) (netlink.Link, error) {
	l, err := netlink.LinkByName(name)
	if err != nil {
		return nil, fmt.Errorf("find %s: %w", name, err)
	}
	if err := netlink.AddrAdd(l, &netlink.Addr{IPNet: ipNet(netip.PrefixFrom(ip, 30))}); err != nil {
		return nil, fmt.Errorf("add %s to %s: %w", ip, name, err)
	}
	return l, wrapIf(netlink.LinkSetUp(l), "set "+name+" up")
}

// forwardOnHost lets the host forward, and says what it changed and what may still be in the way.
func (p *Pool) forwardOnHost(ctx context.Context) error {
	on := sysctl{forwardingKey, "1"}
	if on.check() != nil {
		if err := on.set(); err != nil {
			return err
		}
		p.cfg.Log.WarnContext(ctx, "net.ipv4.ip_forward of the host was switched on for allow-all and stays on")
	}
	return withTables(func(c *nftables.Conn) error {
		chains, err := c.ListChains()
		if err != nil {
			return fmt.Errorf("list chains: %w", err)
		}
		for _, ch := range chains {
			if ch.Hooknum != nil && *ch.Hooknum == *nftables.ChainHookForward && ch.Policy != nil && *ch.Policy == nftables.ChainPolicyDrop &&
				(ch.Table.Family == nftables.TableFamilyIPv4 || ch.Table.Family == nftables.TableFamilyINet) {
				p.cfg.Log.WarnContext(ctx, "a table of somebody else's drops forwarded packets by default; allow-all may not get out",
					"table", ch.Table.Name, "chain", ch.Name)
			}
		}
		return nil
	})
}

// freeLink picks a /30 of subnet that no address or route of the calling thread's namespace touches, beginning the
// search at a place that depends on id so that two clusters seldom look at the same ones.
func freeLink(subnet netip.Prefix, id string) (host, guest netip.Addr, err error) {
	taken, err := networksInUse()
	if err != nil {
		return host, guest, err
	}
	count := uint32(1) << (30 - subnet.Bits())
	start := uint32(0)
	for _, c := range []byte(id) {
		start = start*31 + uint32(c)
	}
	base := binary.BigEndian.Uint32(subnet.Masked().Addr().AsSlice())
	for i := range count {
		var b [4]byte
		binary.BigEndian.PutUint32(b[:], base+(start+i)%count*4)
		link := netip.PrefixFrom(netip.AddrFrom4(b), 30)
		if slices.ContainsFunc(taken, link.Overlaps) {
			continue
		}
		host = link.Addr().Next()
		return host, host.Next(), nil
	}
	return host, guest, core.Errorf(core.Exhausted, core.CodeCapacity, "every /30 of %s is in use", subnet)
}

// networksInUse lists the networks of the addresses and routes of the calling thread's namespace, but the default.
func networksInUse() ([]netip.Prefix, error) {
	var out []netip.Prefix
	add := func(n *net.IPNet) {
		if n == nil {
			return
		}
		ip, ok := netip.AddrFromSlice(n.IP)
		if ones, _ := n.Mask.Size(); ok && ones > 0 {
			out = append(out, netip.PrefixFrom(ip.Unmap(), ones).Masked())
		}
	}
	addrs, err := netlink.AddrList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("list addresses: %w", err)
	}
	for _, a := range addrs {
		add(a.IPNet)
	}
	routes, err := netlink.RouteList(nil, netlink.FAMILY_V4)
	if err != nil {
		return nil, fmt.Errorf("list routes: %w", err)
	}
	for _, r := range routes {
		add(r.Dst)
	}
	return out, nil
}

// checkUplink checks that what addUplink made for a space is there.
func (p *Pool) checkUplink(s *space) error {
	var guestEnd netip.Addr
	if err := s.inside(func() error {
		up, err := netlink.LinkByName(uplinkName)
		if err != nil {
			return fmt.Errorf("find %s: %w", uplinkName, err)
		}
		addrs, err := netlink.AddrList(up, netlink.FAMILY_V4)
		if err != nil || len(addrs) != 1 {
			return errors.Join(fmt.Errorf("%s has %d addresses", uplinkName, len(addrs)), err)
		}
		guestEnd, _ = netip.AddrFromSlice(addrs[0].IP)
		guestEnd = guestEnd.Unmap()
		return nil
	}); err != nil {
		return err
	}
	link := p.names.link(s.id)
	return p.onHost(func() error {
		if _, err := netlink.LinkByName(link); err != nil {
			return fmt.Errorf("find %s: %w", link, err)
		}
		return withTables(func(c *nftables.Conn) error {
			return compareTables(c, hostRules(p.names.table(s.id), link, guestEnd, p.cfg.own()))
		})
	})
}

// removeUplink removes what addUplink made, if anything: first the device, so that nothing passes while the rules go.
func (p *Pool) removeUplink(s *space) error {
	return errors.Join(
		p.onHost(func() error { return p.removeHostTraces(func(id string) bool { return id == s.id }) }),
		s.inside(sysctl{forwardingKey, "0"}.set))
}

// removeHostTraces removes the links and tables of this cluster whose id is doomed from the calling thread's
// namespace, which is the host's.
func (p *Pool) removeHostTraces(doomed func(id string) bool) error {
	var errs []error
	links, err := netlink.LinkList()
	errs = append(errs, wrapIf(err, "list links"))
	for _, l := range links {
		if id, ok := p.names.linkID(l.Attrs().Name); ok && doomed(id) {
			if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) { // ENODEV: it went with its namespace
				errs = append(errs, fmt.Errorf("delete %s: %w", l.Attrs().Name, err))
			}
		}
	}
	errs = append(errs, withTables(func(c *nftables.Conn) error {
		tables, err := c.ListTables()
		if err != nil {
			return fmt.Errorf("list tables: %w", err)
		}
		for _, t := range tables {
			if id, ok := p.names.tableID(t.Name); ok && doomed(id) {
				c.DelTable(t)
			}
		}
		return wrapIf(c.Flush(), "delete tables")
	}))
	return errors.Join(errs...)
}
