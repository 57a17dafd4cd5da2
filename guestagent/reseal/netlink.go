//go:build linux

package reseal

import (
	"encoding/binary"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"sync"

	"golang.org/x/sys/unix"
)

// nl is one netlink socket. It is deliberately small: without hardware virtualization, each piece of code that runs for
// the first time in a clone must be translated first, and this code runs in the middle of every reseal. The kernel
// answers a request before the send returns, so nothing here waits.
type nl struct {
	fd  int
	seq uint32
	buf []byte
}

var native = binary.NativeEndian

// nlBuffer exceeds what the kernel puts into one answer for a reader with a buffer of this size, and is still a small
// object for Go.
const nlBuffer = 16 << 10

func dialNetlink(family int) (*nl, error) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, family)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	// If an answer is missing all the same, this gives an error and not a hang.
	_ = unix.SetsockoptTimeval(fd, unix.SOL_SOCKET, unix.SO_RCVTIMEO, &unix.Timeval{Sec: 5})
	return &nl{fd: fd, buf: make([]byte, nlBuffer)}, nil
}

func (c *nl) close() { _ = unix.Close(c.fd) }

// message is a request: a fixed head, then attributes.
type message struct {
	kind  uint16
	flags uint16
	data  []byte
}

// attr appends an attribute.
func (m *message) attr(kind uint16, value []byte) {
	n := unix.SizeofRtAttr + len(value)
	m.data = native.AppendUint16(m.data, uint16(n))
	m.data = native.AppendUint16(m.data, kind)
	m.data = append(m.data, value...)
	for len(m.data)%4 != 0 {
		m.data = append(m.data, 0)
	}
}

func (m *message) attr32(kind uint16, value uint32) { m.attr(kind, native.AppendUint32(nil, value)) }

// do sends requests together, and returns the first that the kernel refuses.
func (c *nl) do(list ...message) error {
	for i := range list {
		list[i].flags |= unix.NLM_F_ACK
	}
	return c.exchange(list, nil)
}

// dump calls use with the data of each object that the kernel lists.
func (c *nl) dump(m message, use func(data []byte)) error {
	m.flags |= unix.NLM_F_DUMP
	return c.exchange([]message{m}, use)
}

// get calls use with the requested object.
func (c *nl) get(m message, use func(data []byte)) error {
	m.flags |= unix.NLM_F_ACK
	return c.exchange([]message{m}, use)
}

// exchange sends requests and reads until each is acknowledged, or its list is complete.
func (c *nl) exchange(list []message, use func(data []byte)) error {
	var b []byte
	first := c.seq + 1
	for _, m := range list {
		c.seq++
		b = native.AppendUint32(b, uint32(unix.SizeofNlMsghdr+len(m.data)))
		b = native.AppendUint16(b, m.kind)
		b = native.AppendUint16(b, m.flags|unix.NLM_F_REQUEST)
		b = native.AppendUint32(b, c.seq)
		b = native.AppendUint32(b, 0)
		b = append(b, m.data...)
		for len(b)%4 != 0 {
			b = append(b, 0)
		}
	}
	if err := unix.Sendto(c.fd, b, 0, &unix.SockaddrNetlink{Family: unix.AF_NETLINK}); err != nil {
		return os.NewSyscallError("sendto", err)
	}
	var failed error
	for open := len(list); open > 0; {
		n, err := unix.Read(c.fd, c.buf)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		if err != nil {
			return os.NewSyscallError("recv", err)
		}
		for rest := c.buf[:n]; len(rest) >= unix.SizeofNlMsghdr; {
			size := int(native.Uint32(rest))
			if size < unix.SizeofNlMsghdr || size > len(rest) {
				return errors.New("netlink: an answer was cut off")
			}
			kind, seq, data := native.Uint16(rest[4:]), native.Uint32(rest[8:]), rest[unix.SizeofNlMsghdr:size]
			rest = rest[min((size+3)&^3, len(rest)):]
			if seq < first || seq > c.seq {
				continue // from an earlier exchange that failed midway
			}
			switch kind {
			case unix.NLMSG_DONE, unix.NLMSG_ERROR:
				open--
				if len(data) >= 4 && int32(native.Uint32(data)) != 0 && failed == nil {
					failed = refused{int(seq - first), unix.Errno(-int32(native.Uint32(data)))}
				}
			default:
				if use != nil {
					use(data)
				}
			}
		}
	}
	return failed
}

// refused is the kernel's answer to one of several requests.
type refused struct {
	index int
	errno unix.Errno
}

func (r refused) Error() string { return fmt.Sprintf("request %d: %s", r.index, r.errno.Error()) }
func (r refused) Unwrap() error { return r.errno }

// eachAttribute calls use with each attribute.
func eachAttribute(b []byte, use func(kind uint16, value []byte)) {
	for len(b) >= unix.SizeofRtAttr {
		n := int(native.Uint16(b))
		if n < unix.SizeofRtAttr || n > len(b) {
			return
		}
		use(native.Uint16(b[2:])&^0xc000, b[unix.SizeofRtAttr:n])
		b = b[min((n+3)&^3, len(b)):]
	}
}

func cString(b []byte) string { return unix.ByteSliceToString(b) }

// link is a network device.
type link struct {
	index int32
	name  string
	kind  string // kind of a virtual device: "wireguard"
	mac   net.HardwareAddr
	flags uint32
	arp   uint16 // hardware type
}

func parseLink(b []byte) (link, bool) {
	if len(b) < unix.SizeofIfInfomsg {
		return link{}, false
	}
	l := link{arp: native.Uint16(b[2:]), index: int32(native.Uint32(b[4:])), flags: native.Uint32(b[8:])}
	eachAttribute(b[unix.SizeofIfInfomsg:], func(kind uint16, v []byte) {
		switch kind {
		case unix.IFLA_IFNAME:
			l.name = cString(v)
		case unix.IFLA_ADDRESS:
			l.mac = slices.Clone(v)
		case unix.IFLA_LINKINFO:
			eachAttribute(v, func(kind uint16, v []byte) {
				if kind == unix.IFLA_INFO_KIND {
					l.kind = cString(v)
				}
			})
		}
	})
	return l, true
}

func (c *nl) links() ([]link, error) {
	var out []link
	err := c.dump(message{kind: unix.RTM_GETLINK, data: make([]byte, unix.SizeofIfInfomsg)}, func(b []byte) {
		if l, ok := parseLink(b); ok {
			out = append(out, l)
		}
	})
	return out, err
}

// setLink makes the request that changes the masked flags of a device. The caller may append attributes.
func setLink(index int32, flags, mask uint32) message {
	head := make([]byte, unix.SizeofIfInfomsg)
	native.PutUint32(head[4:], uint32(index))
	native.PutUint32(head[8:], flags)
	native.PutUint32(head[12:], mask)
	return message{kind: unix.RTM_NEWLINK, data: head}
}

// address is an address of a device, with the message that identifies it.
type address struct {
	netip.Prefix
	msg []byte
}

func (c *nl) addresses(index int32) ([]address, error) {
	var out []address
	err := c.dump(message{kind: unix.RTM_GETADDR, data: make([]byte, unix.SizeofIfAddrmsg)}, func(b []byte) {
		if len(b) < unix.SizeofIfAddrmsg || int32(native.Uint32(b[4:])) != index {
			return
		}
		var local, peer netip.Addr
		eachAttribute(b[unix.SizeofIfAddrmsg:], func(kind uint16, v []byte) {
			switch kind {
			case unix.IFA_LOCAL:
				local, _ = netip.AddrFromSlice(v)
			case unix.IFA_ADDRESS:
				peer, _ = netip.AddrFromSlice(v)
			}
		})
		if !local.IsValid() {
			local = peer
		}
		out = append(out, address{netip.PrefixFrom(local, int(b[1])), slices.Clone(b)})
	})
	return out, err
}

// flushAddresses removes every address of a device. With the last one, the kernel removes the device's routes and
// neighbours.
func (c *nl) flushAddresses(index int32) error {
	list, err := c.addresses(index)
	if err != nil {
		return err
	}
	for _, a := range list {
		// Removing an address may also remove its secondary addresses.
		err := c.do(message{kind: unix.RTM_DELADDR, data: a.msg})
		if err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("remove %s: %w", a.Prefix, err)
		}
	}
	return nil
}

func addAddress(index int32, p netip.Prefix) message {
	head := make([]byte, unix.SizeofIfAddrmsg)
	head[0], head[1] = unix.AF_INET, byte(p.Bits())
	native.PutUint32(head[4:], uint32(index))
	m := message{kind: unix.RTM_NEWADDR, flags: unix.NLM_F_CREATE | unix.NLM_F_EXCL, data: head}
	m.attr(unix.IFA_LOCAL, p.Addr().AsSlice())
	m.attr(unix.IFA_ADDRESS, p.Addr().AsSlice())
	return m
}

// route is a default route of the main table, with the message that identifies it.
type route struct {
	gateway netip.Addr
	oif     int32
	msg     []byte
}

func (c *nl) defaultRoutes() ([]route, error) {
	head := make([]byte, unix.SizeofRtMsg)
	head[0] = unix.AF_INET
	var out []route
	err := c.dump(message{kind: unix.RTM_GETROUTE, data: head}, func(b []byte) {
		if len(b) < unix.SizeofRtMsg || b[0] != unix.AF_INET || b[1] != 0 || b[4] != unix.RT_TABLE_MAIN {
			return
		}
		r := route{msg: slices.Clone(b)}
		eachAttribute(b[unix.SizeofRtMsg:], func(kind uint16, v []byte) {
			switch {
			case kind == unix.RTA_GATEWAY:
				r.gateway, _ = netip.AddrFromSlice(v)
			case kind == unix.RTA_OIF && len(v) == 4:
				r.oif = int32(native.Uint32(v))
			}
		})
		out = append(out, r)
	})
	return out, err
}

// addDefaultRoute makes a default route over a gateway that is on the link, whatever the address's prefix says.
func addDefaultRoute(index int32, gateway netip.Addr) message {
	head := make([]byte, unix.SizeofRtMsg)
	head[0], head[4], head[5], head[7] = unix.AF_INET, unix.RT_TABLE_MAIN, unix.RTPROT_STATIC, unix.RTN_UNICAST
	native.PutUint32(head[8:], unix.RTNH_F_ONLINK)
	m := message{kind: unix.RTM_NEWROUTE, flags: unix.NLM_F_CREATE | unix.NLM_F_EXCL, data: head}
	m.attr(unix.RTA_GATEWAY, gateway.AsSlice())
	m.attr32(unix.RTA_OIF, uint32(index))
	return m
}

// addNeighbour makes a permanent entry, so that the guest never has to ask for the neighbour.
func addNeighbour(index int32, ip netip.Addr, mac net.HardwareAddr) message {
	head := make([]byte, unix.SizeofNdMsg)
	head[0] = unix.AF_INET
	native.PutUint32(head[4:], uint32(index))
	native.PutUint16(head[8:], unix.NUD_PERMANENT)
	m := message{kind: unix.RTM_NEWNEIGH, flags: unix.NLM_F_CREATE | unix.NLM_F_REPLACE, data: head}
	m.attr(unix.NDA_DST, ip.AsSlice())
	m.attr(unix.NDA_LLADDR, mac)
	return m
}

// families remembers the numbers of generic netlink families, which the kernel never changes.
var families sync.Map // name to uint16

// genericFamily returns the number of a generic netlink family; it fails with ENOENT when the kernel has no such
// family.
func genericFamily(c *nl, name string) (uint16, error) {
	if id, ok := families.Load(name); ok {
		return id.(uint16), nil // only numbers are stored
	}
	m := message{kind: unix.GENL_ID_CTRL, data: []byte{unix.CTRL_CMD_GETFAMILY, 1, 0, 0}}
	m.attr(unix.CTRL_ATTR_FAMILY_NAME, append([]byte(name), 0))
	var id uint16
	err := c.get(m, func(b []byte) {
		if len(b) < unix.GENL_HDRLEN {
			return
		}
		eachAttribute(b[unix.GENL_HDRLEN:], func(kind uint16, v []byte) {
			if kind == unix.CTRL_ATTR_FAMILY_ID && len(v) == 2 {
				id = native.Uint16(v)
			}
		})
	})
	if err == nil && id == 0 {
		err = unix.ENOENT
	}
	if err == nil {
		families.Store(name, id)
	}
	return id, err
}

// generic sends a command of a generic netlink family.
func generic(family string, version, command byte, attrs func(*message)) error {
	c, err := dialNetlink(unix.NETLINK_GENERIC)
	if err != nil {
		return err
	}
	defer c.close()
	id, err := genericFamily(c, family)
	if err != nil {
		return err
	}
	m := message{kind: id, data: []byte{command, version, 0, 0}}
	if attrs != nil {
		attrs(&m)
	}
	return c.do(m)
}
