package netns

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// runDir is where ip-netns(8) looks for named namespaces.
const runDir = "/run/netns"

// space is one namespace in the kernel: what a pool recycles. A Namespace is the use of a space by one sandbox.
type space struct {
	id   string
	name string
	fd   netns.NsHandle
	cfg  *Config

	nftMu sync.Mutex // one exchange over nft at a time
	nft   *tablesConn
}

func pathOf(name string) string { return filepath.Join(runDir, name) }

func (s *space) inside(fn func() error) error { return inside(s.fd, fn) }

// bare is the plan of a space that belongs to nobody.
func (s *space) bare() plan {
	return plan{state: quarantined, gateway: s.cfg.Gateway, own: s.cfg.own(), rate: s.cfg.Rate}
}

// createSpace makes a namespace, verified and quarantined. On failure nothing is left of it.
func createSpace(ctx context.Context, n names, cfg *Config) (_ *space, err error) {
	id, err := reserve(n)
	if err != nil {
		return nil, err
	}
	s := &space{id: id, name: n.namespace(id), fd: -1, cfg: cfg}
	defer func() {
		if err != nil {
			err = errors.Join(fmt.Errorf("create namespace %s: %w", s.name, err), s.remove())
		}
	}()
	return s, osthread.Do(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("unshare: %w", err)
		}
		if err := unix.Mount("/proc/thread-self/ns/net", pathOf(s.name), "", unix.MS_BIND, ""); err != nil {
			return fmt.Errorf("mount on %s: %w", pathOf(s.name), err)
		}
		fd, err := netns.Get()
		if err != nil {
			return fmt.Errorf("open namespace: %w", err)
		}
		s.fd = fd
		if err := s.furnish(); err != nil {
			return err
		}
		return s.verify(ctx)
	})
}

// reserve creates the file that a new namespace is mounted on. Its name is the namespace's id, so no two agree.
func reserve(n names) (string, error) {
	if err := prepareRunDir(); err != nil {
		return "", err
	}
	for {
		id := newID()
		f, err := os.OpenFile(pathOf(n.namespace(id)), os.O_CREATE|os.O_EXCL|os.O_RDONLY, 0o400)
		if errors.Is(err, fs.ErrExist) {
			continue
		}
		if err != nil {
			return "", fmt.Errorf("reserve a namespace's name: %w", err)
		}
		return id, f.Close()
	}
}

// prepareRunDir makes runDir a shared mount, as `ip netns add` does and under the same lock: in a private one, a
// service with a mount namespace of its own keeps a copy of every mount and with it the removed namespaces.
func prepareRunDir() error {
	if err := os.MkdirAll(runDir, 0o755); err != nil { //nolint:gosec // G301: as ip-netns(8) makes it, for everyone to list
		return fmt.Errorf("make %s: %w", runDir, err)
	}
	dir, err := os.Open(runDir)
	if err != nil {
		return fmt.Errorf("open %s: %w", runDir, err)
	}
	defer func() { _ = dir.Close() }() // read-only; ends the lock
	if err := unix.Flock(int(dir.Fd()), unix.LOCK_EX); err != nil {
		return fmt.Errorf("lock %s: %w", runDir, err)
	}
	err = unix.Mount("", runDir, "", unix.MS_SHARED|unix.MS_REC, "")
	if !errors.Is(err, unix.EINVAL) { // EINVAL: not a mount point yet
		return wrapIf(err, "share "+runDir)
	}
	if err := unix.Mount(runDir, runDir, "", unix.MS_BIND|unix.MS_REC, ""); err != nil {
		return fmt.Errorf("mount %s on itself: %w", runDir, err)
	}
	return wrapIf(unix.Mount("", runDir, "", unix.MS_SHARED|unix.MS_REC, ""), "share "+runDir)
}

func wrapIf(err error, doing string) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", doing, err)
}

// openSpace opens an existing namespace by name.
func openSpace(n names, name string, cfg *Config) (*space, error) {
	id, ok := n.namespaceID(name)
	if !ok {
		return nil, fmt.Errorf("%s is not a namespace of this cluster", name)
	}
	fd, err := netns.GetFromPath(pathOf(name))
	if err != nil {
		return nil, fmt.Errorf("open namespace %s: %w", name, err)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(int(fd), &st); err != nil || st.Type != unix.NSFS_MAGIC {
		return nil, errors.Join(fmt.Errorf("%s is a file, not a mounted namespace", pathOf(name)), err, unix.Close(int(fd)))
	}
	return &space{id: id, name: name, fd: fd, cfg: cfg}, nil
}

// furnish gives the calling thread's empty namespace what a quarantined one holds.
func (s *space) furnish() error {
	if err := setSysctls(); err != nil {
		return err
	}
	if err := createTap(); err != nil {
		return err
	}
	tap, err := netlink.LinkByName(TapName)
	if err != nil {
		return fmt.Errorf("find %s: %w", TapName, err)
	}
	mac, err := gatewayMAC()
	if err != nil {
		return err
	}
	if err := netlink.LinkSetHardwareAddr(tap, mac); err != nil {
		return fmt.Errorf("set address of %s: %w", TapName, err)
	}
	if err := netlink.AddrAdd(tap, &netlink.Addr{IPNet: ipNet(single(s.cfg.Gateway))}); err != nil {
		return fmt.Errorf("add %s to %s: %w", s.cfg.Gateway, TapName, err)
	}
	return s.tables(func(c *nftables.Conn) error { return replaceRules(c, nil, rulesFor(s.bare())) })
}

// strip removes from the calling thread's namespace everything that furnish adds and a sandbox may have changed.
func (s *space) strip() error {
	err := s.tables(func(c *nftables.Conn) error {
		c.FlushRuleset()
		return c.Flush()
	})
	return errors.Join(wrapIf(err, "flush rules"), removeLinks())
}

// removeLinks deletes the interfaces of the calling thread's namespace, tap first so that the guest is cut off first.
func removeLinks() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("list links: %w", err)
	}
	slices.SortStableFunc(links, func(a, b netlink.Link) int {
		return boolToInt(b.Attrs().Name == TapName) - boolToInt(a.Attrs().Name == TapName)
	})
	var errs []error
	for _, l := range links {
		if isInborn(l) {
			continue
		}
		if err := netlink.LinkDel(l); err != nil && !errors.Is(err, unix.ENODEV) { // ENODEV: it went with its peer
			errs = append(errs, fmt.Errorf("delete %s: %w", l.Attrs().Name, err))
		}
	}
	return errors.Join(errs...)
}

func boolToInt(b bool) int {
	if b {
		return 1
	}
	return 0
}

// inborn are the interfaces that the kernel itself puts into every new namespace, some only when a tunnel module is
// loaded (net.core.fb_tunnels_only_for_init_net). They are down and cannot be deleted.
var inborn = []string{
	"lo", "tunl0", "gre0", "gretap0", "erspan0", "ip_vti0", "ip6_vti0", "sit0", "ip6tnl0", "ip6gre0", "teql0",
}

func isInborn(l netlink.Link) bool { return slices.Contains(inborn, l.Attrs().Name) }

// sever cuts everything in the namespace off from the network. Errors are returned after trying all of it.
func (s *space) sever() error {
	if s.fd < 0 {
		return nil
	}
	return s.inside(removeLinks)
}

// remove forgets the namespace. The kernel takes it down once nothing is in it any more.
func (s *space) remove() error { return errors.Join(removeName(s.name), s.close()) }

// close gives up the descriptors; the namespace stays.
func (s *space) close() error {
	if s.fd < 0 {
		return nil
	}
	fd := int(s.fd)
	s.fd = -1
	s.nftMu.Lock()
	defer s.nftMu.Unlock()
	return errors.Join(s.hangUpLocked(), wrapIf(unix.Close(fd), "close namespace"))
}

func removeName(name string) error {
	path := pathOf(name)
	for {
		err := unix.Unmount(path, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if errors.Is(err, unix.EINVAL) || errors.Is(err, unix.ENOENT) { // not mounted
			break
		}
		if err != nil {
			return fmt.Errorf("unmount %s: %w", path, err)
		}
	}
	if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("remove %s: %w", path, err)
	}
	return nil
}
