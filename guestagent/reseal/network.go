//go:build linux

package reseal

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/guestagent/smallfile"
)

// findNIC returns the guest's network device: the first one that is not virtual. found is false when there is none.
func findNIC(c *nl) (nic link, found bool, err error) {
	links, err := c.links()
	if err != nil {
		return link{}, false, wrap(err, "list the network devices")
	}
	for _, l := range links {
		if l.arp == unix.ARPHRD_ETHER && l.kind == "" && l.flags&unix.IFF_LOOPBACK == 0 && (!found || l.index < nic.index) {
			nic, found = l, true
		}
	}
	return nic, found, nil
}

// nicState is the network device's state when the workload was quiesced.
type nicState struct {
	link
	addresses []address
	tunnels   []link // WireGuard devices
}

func inspectNIC() (nicState, error) {
	c, err := dialNetlink(unix.NETLINK_ROUTE)
	if err != nil {
		return nicState{}, err
	}
	defer c.close()
	links, err := c.links()
	if err != nil {
		return nicState{}, err
	}
	var out nicState
	for _, l := range links {
		switch {
		case l.kind == "wireguard":
			out.tunnels = append(out.tunnels, l)
		case l.arp == unix.ARPHRD_ETHER && l.kind == "" && l.flags&unix.IFF_LOOPBACK == 0 && (out.index == 0 || l.index < out.index):
			out.link = l
		}
	}
	if out.index == 0 {
		return out, nil
	}
	out.addresses, err = c.addresses(out.index)
	return out, err
}

// RaiseNIC brings the network device up, without an address, so that a reseal need not do it. The host's end is down.
func RaiseNIC() error {
	c, err := dialNetlink(unix.NETLINK_ROUTE)
	if err != nil {
		return err
	}
	defer c.close()
	nic, found, err := findNIC(c)
	if err != nil || !found {
		return err
	}
	return wrap(c.do(setLink(nic.index, unix.IFF_UP, unix.IFF_UP)), "bring the link up")
}

// nic returns the state from the quiesce, or reads it now if this agent started later.
func (r *Run) nic() (nicState, error) {
	if r.found != nil {
		return r.found.nic, nil
	}
	return inspectNIC()
}

// stepNetwork gives the device its new addresses. The short way changes the known state, in one message to the kernel.
// The result is read back. If it is not what was requested, the device is taken down and set up from nothing.
func stepNetwork(_ context.Context, r *Run) (Evidence, error) {
	id, want := r.req.Identity, r.req.Network
	if id.MAC == "" && !id.IP.IsValid() {
		return nil, skipError("no network was requested")
	}
	nic, err := r.nic()
	if err != nil {
		return nil, err
	}
	if nic.index == 0 {
		return nil, errors.New("the guest has no network device")
	}
	mac, err := net.ParseMAC(id.MAC)
	if err != nil {
		return nil, err
	}
	c, err := dialNetlink(unix.NETLINK_ROUTE)
	if err != nil {
		return nil, err
	}
	defer c.close()
	addr := netip.PrefixFrom(id.IP, want.Prefix)
	if len(want.DNS) > 0 {
		var b strings.Builder
		for _, a := range want.DNS {
			b.WriteString("nameserver " + a.String() + "\n")
		}
		if err := r.writeIdentity("/etc/resolv.conf", b.String(), 0o644); err != nil {
			return nil, err
		}
	}
	if err := change(c, nic, mac, addr, want); err == nil {
		if ev, err := networkEvidence(c, nic.name); err == nil && shows(ev, mac, addr, want) {
			return ev, nil
		}
	}
	if err := configure(c, nic.index, mac, addr, want); err != nil {
		return nil, err
	}
	ev, err := networkEvidence(c, nic.name)
	if err == nil {
		ev["way"] = "set up anew"
	}
	return ev, err
}

// shows reports whether the evidence is what the host will check for.
func shows(ev Evidence, mac net.HardwareAddr, addr netip.Prefix, want guestapi.Network) bool {
	gateway := ""
	if want.Gateway.IsValid() {
		gateway = want.Gateway.String()
	}
	return ev[guestapi.EvidenceMAC] == mac.String() && ev[guestapi.EvidenceAddresses] == addr.String() && ev[guestapi.EvidenceGateway] == gateway
}

// change is the short way. Removing the last address also removes the routes over the device, and changing the MAC also
// removes its neighbours.
func change(c *nl, nic nicState, mac net.HardwareAddr, addr netip.Prefix, want guestapi.Network) error {
	if want.MTU > 0 || nic.flags&unix.IFF_UP == 0 {
		return errors.New("the device must be set up")
	}
	var batch []message
	for _, a := range nic.addresses {
		batch = append(batch, message{kind: unix.RTM_DELADDR, data: a.msg})
	}
	newMAC := setLink(nic.index, 0, 0)
	newMAC.attr(unix.IFLA_ADDRESS, mac)
	batch = append(batch, newMAC, addAddress(nic.index, addr))
	if want.Gateway.IsValid() {
		batch = append(batch, addDefaultRoute(nic.index, want.Gateway))
		if want.GatewayMAC != "" {
			gw, err := net.ParseMAC(want.GatewayMAC)
			if err != nil {
				return err
			}
			batch = append(batch, addNeighbour(nic.index, want.Gateway, gw))
		}
	}
	return c.do(batch...)
}

// configure sets the device up from nothing.
func configure(c *nl, index int32, mac net.HardwareAddr, addr netip.Prefix, want guestapi.Network) error {
	if err := c.do(setLink(index, 0, unix.IFF_UP)); err != nil {
		return wrap(err, "take the link down")
	}
	if err := c.flushAddresses(index); err != nil {
		return err
	}
	newMAC := setLink(index, 0, 0)
	newMAC.attr(unix.IFLA_ADDRESS, mac)
	if want.MTU > 0 {
		newMAC.attr32(unix.IFLA_MTU, uint32(want.MTU))
	}
	if err := c.do(newMAC); err != nil {
		return wrap(err, "set the MAC")
	}
	// Default routes over other devices would bypass the requested one.
	old, err := c.defaultRoutes()
	if err != nil {
		return wrap(err, "list the routes")
	}
	for _, o := range old {
		if err := c.do(message{kind: unix.RTM_DELROUTE, data: o.msg}); err != nil {
			return wrap(err, "remove a default route")
		}
	}
	if err := c.do(setLink(index, unix.IFF_UP, unix.IFF_UP)); err != nil {
		return wrap(err, "bring the link up")
	}
	// The kernel may have added addresses of its own when the link came up.
	if err := c.flushAddresses(index); err != nil {
		return err
	}
	if err := c.do(addAddress(index, addr)); err != nil {
		return wrap(err, "add the address")
	}
	if !want.Gateway.IsValid() {
		return nil
	}
	if err := c.do(addDefaultRoute(index, want.Gateway)); err != nil {
		return wrap(err, "add the default route")
	}
	if want.GatewayMAC == "" {
		return nil
	}
	gw, err := net.ParseMAC(want.GatewayMAC)
	if err != nil {
		return err
	}
	return wrap(c.do(addNeighbour(index, want.Gateway, gw)), "add the gateway's neighbour entry")
}

// The kernel's socket diagnosis (linux/inet_diag.h).
const (
	sockDestroy    = 21 // SOCK_DESTROY
	diagRequestLen = 56 // struct inet_diag_req_v2
	diagIDAt       = 8  // offset of the socket's id in a request
	diagMsgIDAt    = 4  // the same in an answer
	diagIDLen      = 48
	diagMsgLen     = 72
)

// The states in which a socket has a peer. TIME_WAIT is not included: it has no owner, no data and no keys, and older
// kernels cannot destroy it. LISTEN and CLOSE have no peer.
const (
	tcpConnected = 1<<1 | 1<<2 | 1<<3 | 1<<4 | 1<<5 | 1<<8 | 1<<9 | 1<<11 | 1<<12
	udpConnected = 1 << 1
)

// diagSocket is one connection.
type diagSocket struct {
	family, protocol byte
	id               []byte
	local, remote    netip.AddrPort
}

// inside reports whether both ends are in this guest. Such a connection was cloned completely: it goes on, and nothing
// of it is ever seen outside.
func (s diagSocket) inside() bool {
	return s.local.Addr().IsLoopback() && s.remote.Addr().IsLoopback()
}

// stepSockets ends every connection to the outside. Two clones have the same keys and sequence numbers, and two
// different records with one nonce reveal the keys. The connections' addresses were removed before. So the kernel finds
// no route for anything that it would still send for them, including resets.
func stepSockets(context.Context, *Run) (Evidence, error) {
	c, err := dialNetlink(unix.NETLINK_SOCK_DIAG)
	if err != nil {
		return nil, err
	}
	defer c.close()
	list, err := connections(c)
	if err != nil {
		return nil, err
	}
	destroyed, kept := 0, 0
	for _, s := range list {
		if s.inside() {
			kept++
			continue
		}
		req := make([]byte, diagRequestLen)
		req[0], req[1] = s.family, s.protocol
		native.PutUint32(req[4:], 0xffffffff)
		copy(req[diagIDAt:], s.id)
		if err := c.do(message{kind: sockDestroy, data: req}); err != nil && !errors.Is(err, unix.ENOENT) {
			return nil, fmt.Errorf("destroy %s-%s: %w", s.local, s.remote, err)
		}
		destroyed++
	}
	remaining := 0
	if destroyed > 0 {
		if list, err = connections(c); err != nil {
			return nil, err
		}
		for _, s := range list {
			if !s.inside() {
				remaining++
			}
		}
	}
	return Evidence{
		guestapi.EvidenceDestroyed: strconv.Itoa(destroyed), guestapi.EvidenceRemaining: strconv.Itoa(remaining),
		"kept_loopback": strconv.Itoa(kept),
	}, nil
}

// connections lists the sockets with a peer.
func connections(c *nl) ([]diagSocket, error) {
	var out []diagSocket
	for _, want := range []struct {
		protocol byte
		states   uint32
	}{{unix.IPPROTO_TCP, tcpConnected}, {unix.IPPROTO_UDP, udpConnected}} {
		for _, family := range []byte{unix.AF_INET, unix.AF_INET6} {
			req := make([]byte, diagRequestLen)
			req[0], req[1] = family, want.protocol
			native.PutUint32(req[4:], want.states)
			err := c.dump(message{kind: unix.SOCK_DIAG_BY_FAMILY, data: req}, func(b []byte) {
				if s, ok := parseDiag(b, want.protocol); ok {
					out = append(out, s)
				}
			})
			if err != nil {
				return nil, fmt.Errorf("list the sockets of family %d, protocol %d: %w", family, want.protocol, err)
			}
		}
	}
	return out, nil
}

func parseDiag(b []byte, protocol byte) (diagSocket, bool) {
	if len(b) < diagMsgLen {
		return diagSocket{}, false
	}
	id := b[diagMsgIDAt : diagMsgIDAt+diagIDLen]
	s := diagSocket{family: b[0], protocol: protocol, id: slices.Clone(id)}
	size := 4
	if s.family == unix.AF_INET6 {
		size = 16
	}
	local, ok1 := netip.AddrFromSlice(id[4 : 4+size])
	remote, ok2 := netip.AddrFromSlice(id[20 : 20+size])
	s.local = netip.AddrPortFrom(local.Unmap(), binary.BigEndian.Uint16(id))
	s.remote = netip.AddrPortFrom(remote.Unmap(), binary.BigEndian.Uint16(id[2:]))
	return s, ok1 && ok2
}

// stepTCPMetrics deletes what the parent had learnt about its peers.
func stepTCPMetrics(context.Context, *Run) (Evidence, error) {
	const deleteAll = 2 // TCP_METRICS_CMD_DEL without an address
	err := generic("tcp_metrics", 1, deleteAll, nil)
	if errors.Is(err, unix.ENOENT) {
		return nil, skipError("the kernel keeps no metrics")
	}
	return Evidence{"flushed": "all"}, err
}

const conntrackCount = "/proc/sys/net/netfilter/nf_conntrack_count"

func noConntrack() string {
	if smallfile.Exists(conntrackCount) {
		return ""
	}
	return "no connection tracking"
}

// stepConntrack deletes the connections that the guest's own firewall tracked.
func stepConntrack(context.Context, *Run) (Evidence, error) {
	c, err := dialNetlink(unix.NETLINK_NETFILTER)
	if err != nil {
		return nil, err
	}
	defer c.close()
	const deleteEntries = unix.NFNL_SUBSYS_CTNETLINK<<8 | 2 // IPCTNL_MSG_CT_DELETE without a tuple: all
	if err := c.do(message{kind: deleteEntries, data: []byte{unix.AF_UNSPEC, 0, 0, 0}}); err != nil {
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.EOPNOTSUPP) {
			return nil, skipError("connection tracking cannot be flushed")
		}
		return nil, err
	}
	left, err := readBack(conntrackCount)
	return Evidence{"left": left}, err
}

// stepWireGuard gives each tunnel a new key. Its peers do not know this key, so the clone's tunnel is dead, and is not
// a second user of the parent's keys and counters.
func stepWireGuard(_ context.Context, r *Run) (Evidence, error) {
	nic, err := r.nic()
	if err != nil {
		return nil, err
	}
	ev := Evidence{}
	for _, l := range nic.tunnels {
		var key [32]byte
		_, _ = rand.Read(key[:])
		key[0], key[31] = key[0]&248, key[31]&127|64
		err := generic("wireguard", 1, unix.WG_CMD_SET_DEVICE, func(m *message) {
			m.attr32(unix.WGDEVICE_A_IFINDEX, uint32(l.index))
			m.attr(unix.WGDEVICE_A_PRIVATE_KEY, key[:])
		})
		if err != nil {
			return ev, fmt.Errorf("%s: %w", l.name, err)
		}
		sum := sha256.Sum256(key[:])
		ev[l.name] = short(sum[:])
	}
	if len(ev) == 0 {
		return nil, skipError("no tunnels")
	}
	return ev, nil
}
