//go:build linux

package reseal

import (
	"errors"
	"net"
	"net/netip"
	"os"
	"strconv"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/guestagent/guestapi"
)

// networkEvidence reads the kernel's present state: the device's MAC, all its IPv4 addresses, and the default routes.
// For MAC and addresses it uses the oldest interfaces, which execute the least code in the kernel.
func networkEvidence(c *nl, device string) (Evidence, error) {
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("socket", err)
	}
	defer func() { _ = unix.Close(fd) }()
	mac, err := hardwareAddress(fd, device)
	if err != nil {
		return nil, err
	}
	addresses, err := deviceAddresses(fd, device)
	if err != nil {
		return nil, err
	}
	routes, err := c.defaultRoutes()
	if err != nil {
		return nil, wrap(err, "list the default routes")
	}
	gateway := ""
	if len(routes) == 1 && routes[0].gateway.IsValid() {
		gateway = routes[0].gateway.String()
	}
	return Evidence{
		"link": device, guestapi.EvidenceMAC: mac.String(), guestapi.EvidenceAddresses: strings.Join(addresses, ","),
		guestapi.EvidenceRoutes: strconv.Itoa(len(routes)), guestapi.EvidenceGateway: gateway,
	}, nil
}

// ifreq is struct ifreq: a name and a union of 24 bytes. Here the union is the socket address, which most requests use.
type ifreq struct {
	name   [unix.IFNAMSIZ]byte
	family uint16
	data   [22]byte
}

func deviceRequest(fd int, request uintptr, device string) (ifreq, error) {
	var r ifreq
	if len(device) >= len(r.name) {
		return r, errors.New("the device's name is too long")
	}
	copy(r.name[:], device)
	return r, ioctl(uintptr(fd), request, unsafe.Pointer(&r))
}

func hardwareAddress(fd int, device string) (net.HardwareAddr, error) {
	r, err := deviceRequest(fd, unix.SIOCGIFHWADDR, device)
	return net.HardwareAddr(r.data[:6]), wrap(err, "SIOCGIFHWADDR")
}

// deviceAddresses lists a device's IPv4 addresses with their prefixes, in the kernel's order, including those with a
// label ("eth0:1"). The prefix is right for a single address, which is the expected case; with several addresses, all
// get the prefix of the first.
func deviceAddresses(fd int, device string) ([]string, error) {
	const room = 64
	var list [room]ifreq
	conf := struct {
		length int32
		_      int32
		list   unsafe.Pointer
	}{length: int32(unsafe.Sizeof(list)), list: unsafe.Pointer(&list[0])}
	if err := ioctl(uintptr(fd), unix.SIOCGIFCONF, unsafe.Pointer(&conf)); err != nil {
		return nil, wrap(err, "SIOCGIFCONF")
	}
	n := int(conf.length) / int(unsafe.Sizeof(list[0]))
	if n >= room {
		return nil, errors.New("the guest has more addresses than can be checked")
	}
	var out []string
	for _, l := range list[:n] {
		name := unix.ByteSliceToString(l.name[:])
		if name != device && !strings.HasPrefix(name, device+":") {
			continue
		}
		mask, err := deviceRequest(fd, unix.SIOCGIFNETMASK, name)
		if err != nil {
			return nil, wrap(err, "SIOCGIFNETMASK")
		}
		bits, _ := net.IPMask(mask.data[2:6]).Size()
		out = append(out, netip.PrefixFrom(netip.AddrFrom4([4]byte(l.data[2:6])), bits).String())
	}
	return out, nil
}
