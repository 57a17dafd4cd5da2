package netns

import (
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"
)

// sysctl is a setting under /proc/sys/net, which shows the namespace of the thread that opens it.
type sysctl struct{ key, value string }

const forwardingKey = "ipv4/ip_forward"

// spaceSysctls make a namespace deaf to everything but what the rules let in. They are set before the tap exists, so
// that it inherits them from "default".
var spaceSysctls = func() []sysctl {
	list := []sysctl{{forwardingKey, "0"}}
	for _, conf := range []string{"all", "default"} {
		list = append(list, sysctl{"ipv6/conf/" + conf + "/disable_ipv6", "1"})
		for _, s := range []sysctl{
			{"accept_redirects", "0"},
			{"send_redirects", "0"},
			{"accept_source_route", "0"},
			{"accept_local", "0"},
			{"arp_accept", "0"},
			{"arp_ignore", "1"}, // answer only for the gateway's address
			{"proxy_arp", "0"},
			{"route_localnet", "0"},
			{"rp_filter", "1"},
		} {
			list = append(list, sysctl{"ipv4/conf/" + conf + "/" + s.key, s.value})
		}
	}
	return list
}()

func setSysctls() error {
	for _, s := range spaceSysctls {
		if err := s.set(); err != nil {
			return err
		}
	}
	return nil
}

func (s sysctl) path() string { return filepath.Join("/proc/sys/net", s.key) }

// absent reports whether the setting does not exist because this kernel has no IPv6, or has not loaded connection
// tracking, which is as good as disabled.
func (s sysctl) absent(err error) bool {
	return errors.Is(err, fs.ErrNotExist) && (strings.HasPrefix(s.key, "ipv6/") || strings.HasPrefix(s.key, "netfilter/"))
}

func (s sysctl) set() error {
	err := os.WriteFile(s.path(), []byte(s.value), 0)
	if err != nil && !s.absent(err) {
		return fmt.Errorf("set %s: %w", s.key, err)
	}
	return nil
}

func (s sysctl) check() error {
	got, err := os.ReadFile(s.path())
	switch {
	case s.absent(err):
		return nil
	case err != nil:
		return fmt.Errorf("read %s: %w", s.key, err)
	case strings.TrimSpace(string(got)) != s.value:
		return fmt.Errorf("%s is %s, not %s", s.key, strings.TrimSpace(string(got)), s.value)
	}
	return nil
}

// openTap attaches to the tap of the calling thread's namespace, making it if it does not exist. IFF_VNET_HDR is
// part of the tap's identity, the same at capture and restore: the VMM sets the header's size itself
// (TUNSETVNETHDRSZ), and the guest's driver relies on what was offered when it started.
func openTap() (int, error) {
	fd, err := unix.Open("/dev/net/tun", unix.O_RDWR|unix.O_CLOEXEC|unix.O_NONBLOCK, 0)
	if err != nil {
		return -1, fmt.Errorf("open /dev/net/tun: %w", err)
	}
	ifr, err := unix.NewIfreq(TapName)
	if err != nil {
		return -1, errors.Join(err, unix.Close(fd))
	}
	ifr.SetUint16(unix.IFF_TAP | unix.IFF_NO_PI | unix.IFF_VNET_HDR)
	if err := unix.IoctlIfreq(fd, unix.TUNSETIFF, ifr); err != nil {
		return -1, errors.Join(fmt.Errorf("attach to %s: %w", TapName, err), unix.Close(fd))
	}
	return fd, nil
}

// createTap makes the tap of the calling thread's namespace; it stays when the descriptor is closed.
func createTap() error {
	fd, err := openTap()
	if err != nil {
		return err
	}
	err = unix.IoctlSetInt(fd, unix.TUNSETPERSIST, 1)
	return errors.Join(wrapIf(err, "keep "+TapName), unix.Close(fd))
}

func gatewayMAC() (net.HardwareAddr, error) { return net.ParseMAC(GatewayMAC) }

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
