package testpool

import (
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
)

// Link is a network namespace, joined to this one by a pair of links. Nothing else leads out of it.
type Link struct {
	Path      string // of the namespace
	Near, Far string // addresses, IPv4: this machine's and the namespace's
	name      string // of this end
}

// linkDir has the namespaces' names. It is not /run/netns: the first runner of a host mounts that over itself, with what is in it, and then a
// namespace that was there before is mounted twice, once out of reach.
const linkDir = "/run/coppice-testpool"

// NewLink makes a namespace. Close removes it.
func NewLink() (_ *Link, err error) {
	n := rand.IntN(1 << 14) //nolint:gosec // G404: a name that is likely to be free
	name := fmt.Sprintf("cpf-e2e-%04x", n)
	l := &Link{
		Path: filepath.Join(linkDir, name), name: fmt.Sprintf("cpf%04xh", n),
		Near: fmt.Sprintf("198.19.%d.%d", n>>6, n&63<<2+1), Far: fmt.Sprintf("198.19.%d.%d", n>>6, n&63<<2+2),
	}
	if err := os.MkdirAll(linkDir, 0o755); err != nil { //nolint:gosec // G301: names that are no secret
		return nil, err
	}
	file, err := os.OpenFile(l.Path, os.O_CREATE|os.O_EXCL, 0o600) // the name is this one's from here on
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, l.Close())
		}
	}()
	err = errors.Join(file.Close(), osthread.Do(func() error { // the thread ends with it
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return err
		}
		return unix.Mount("/proc/thread-self/ns/net", l.Path, "", unix.MS_BIND, "")
	}))
	if err != nil {
		return nil, fmt.Errorf("make network namespace %s: %w", name, err)
	}
	ns, err := netns.GetFromPath(l.Path)
	if err != nil {
		return nil, err
	}
	defer ns.Close()
	inner, err := netlink.NewHandleAt(ns)
	if err != nil {
		return nil, err
	}
	defer inner.Close()
	outer, err := netlink.NewHandle()
	if err != nil {
		return nil, err
	}
	defer outer.Close()
	peer := fmt.Sprintf("cpf%04xr", n)
	err = outer.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: l.name}, PeerName: peer, PeerNamespace: netlink.NsFd(int(ns))})
	return l, errors.Join(err, up(outer, l.name, l.Near+"/30"), up(inner, peer, l.Far+"/30"), up(inner, "lo", ""))
}

// Close removes the namespace and the links. Whoever is still in it is cut off.
func (l *Link) Close() error {
	var errs []error
	if link, err := netlink.LinkByName(l.name); err == nil {
		errs = append(errs, netlink.LinkDel(link))
	}
	_ = unix.Unmount(l.Path, unix.MNT_DETACH) // it may not have come so far
	if err := os.Remove(l.Path); !errors.Is(err, os.ErrNotExist) {
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

func up(h *netlink.Handle, name, address string) error {
	l, err := h.LinkByName(name)
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if address != "" {
		a, err := netlink.ParseAddr(address)
		if err != nil {
			return err
		}
		if err := h.AddrAdd(l, a); err != nil {
			return err
		}
	}
	return h.LinkSetUp(l)
}
