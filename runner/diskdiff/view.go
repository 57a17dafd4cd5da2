package diskdiff

import (
	"errors"
	"io/fs"
	"path"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/runner/ext4"
	"github.com/coppice-dev/coppice/runner/rootimage"
)

// upperDir is where an overlay disk has what lies over the image.
const upperDir = "upper"

// The marks of overlayfs.
const (
	xattrOpaque   = "trusted.overlay.opaque"
	xattrWhiteout = "trusted.overlay.whiteout"
	xattrRedirect = "trusted.overlay.redirect"
	xattrMetacopy = "trusted.overlay.metacopy"
)

// Lower is the image's root file system. Names are as io/fs has them. Of files it tells the owner by UID() and GID() uint32, of
// devices the number by Rdev() uint64, and which file it is by Ino() uint64. A rootimage.DamagedError says that a file of it
// cannot be read.
type Lower interface {
	fs.ReadDirFS
	fs.ReadLinkFS
}

// view is the file system of one side.
type view struct {
	disk       *ext4.FS
	lower      Lower
	seen       map[uint32]bool // directories of the overlay that were listed: each has one name
	seenLower  map[uint64]bool // and of the image
	held       int             // entries of the directories that are open
	heldBytes  int             // and the bytes of their names
	unreadable int
}

// The bounds of what one path's directories hold in memory, on each side.
const (
	maxHeld      = 1 << 18
	maxHeldBytes = 32 << 20
)

// full reports whether no more directories may be opened. What is below them is unreadable then.
func (v *view) full() bool { return v.held > maxHeld || v.heldBytes > maxHeldBytes }

// node is a file of a view. What the overlay has of it hides what the image has; a directory may be both.
type node struct {
	upper *ext4.Inode // nil: the image's alone
	lower string      // in the image, "" for none
	info  fs.FileInfo // of lower
	data  bool        // upper has the attributes and lower the content (metacopy)
}

func (n *node) dir() bool { return n != nil && n.attributes().kind == ext4.TypeDir }

// attributes are what is compared, besides content.
type attributes struct {
	kind, mode uint16
	uid, gid   uint32
	size       int64
	modTime    time.Time
	rdev       uint64
}

func (n *node) attributes() attributes {
	if in := n.upper; in != nil {
		a := attributes{kind: in.Type(), mode: in.Mode &^ ext4.TypeMask, uid: in.UID, gid: in.GID, size: in.Size, modTime: in.ModTime, rdev: uint64(in.Rdev)}
		return a.normal()
	}
	a := attributes{kind: kindOf(n.info.Mode()), mode: modeOf(n.info.Mode()), size: n.info.Size(), modTime: n.info.ModTime()}
	if o, ok := n.info.(interface {
		UID() uint32
		GID() uint32
	}); ok {
		a.uid, a.gid = o.UID(), o.GID()
	}
	if d, ok := n.info.(interface{ Rdev() uint64 }); ok {
		a.rdev = d.Rdev()
	}
	return a.normal()
}

// normal drops what says nothing for the kind.
func (a attributes) normal() attributes {
	switch a.kind {
	case ext4.TypeDir: // its times and size follow from what is in it
		a.size, a.rdev, a.modTime = 0, 0, time.Time{}
	case ext4.TypeSymlink:
		a.mode, a.rdev = 0o777, 0
	case ext4.TypeChar, ext4.TypeBlock:
		a.size = 0
	case ext4.TypeRegular:
		a.rdev = 0
	default:
		a.size, a.rdev = 0, 0
	}
	return a
}

func kindOf(m fs.FileMode) uint16 {
	switch {
	case m.IsDir():
		return ext4.TypeDir
	case m&fs.ModeSymlink != 0:
		return ext4.TypeSymlink
	case m&fs.ModeCharDevice != 0:
		return ext4.TypeChar
	case m&fs.ModeDevice != 0:
		return ext4.TypeBlock
	case m&fs.ModeNamedPipe != 0:
		return ext4.TypeFIFO
	case m&fs.ModeSocket != 0:
		return ext4.TypeSocket
	}
	return ext4.TypeRegular
}

func modeOf(m fs.FileMode) uint16 {
	mode := uint16(m.Perm())
	for _, b := range []struct {
		of fs.FileMode
		is uint16
	}{{fs.ModeSetuid, 0o4000}, {fs.ModeSetgid, 0o2000}, {fs.ModeSticky, 0o1000}} {
		if m&b.of != 0 {
			mode |= b.is
		}
	}
	return mode
}

// root is the root directory of a view.
func (v *view) root() (*node, error) {
	info, err := v.lower.Lstat(".")
	if err != nil {
		return nil, err
	}
	top, err := v.disk.Inode(ext4.Root)
	if err != nil {
		return nil, err
	}
	list, err := v.disk.ReadDir(top)
	if err != nil {
		return nil, err
	}
	n := &node{lower: ".", info: info}
	if i, ok := find(list, upperDir); ok { // a guest that never ran has none
		if n.upper, err = v.disk.Inode(list[i].Inode); err == nil && n.upper.Type() != ext4.TypeDir {
			return &node{lower: ".", info: info}, nil
		}
	}
	return n, err
}

func find(list []ext4.Entry, name string) (int, bool) {
	return slices.BinarySearchFunc(list, name, func(e ext4.Entry, name string) int { return strings.Compare(e.Name, name) })
}

// listing is a directory that is being compared.
type listing struct {
	v      *view
	dir    *node
	upper  []ext4.Entry
	lower  []string // sorted
	bytes  int      // of the names in lower
	opaque bool
}

// list reads what the overlay has of a directory, and with all also what the image has. A nil node is an empty one.
func (v *view) list(dir *node, all bool) (*listing, error) {
	l := &listing{v: v}
	if !dir.dir() {
		return l, nil
	}
	l.dir = dir
	if in := dir.upper; in != nil {
		entries, xattrs, err := v.upperList(in)
		if err = v.tolerate(err); err != nil {
			return nil, err
		}
		l.upper, l.opaque = entries, xattrs[xattrOpaque] == "y"
	}
	if all {
		return l, l.readLower()
	}
	return l, nil
}

// readLower adds the names that the image has.
func (l *listing) readLower() error {
	if l.dir == nil || l.dir.lower == "" || l.opaque {
		return nil
	}
	// A directory that is its own parent, or has two, would be listed without end.
	if of, ok := l.dir.info.(interface{ Ino() uint64 }); ok {
		if l.v.seenLower[of.Ino()] {
			l.v.unreadable++
			return nil
		}
		l.v.seenLower[of.Ino()] = true
	}
	if l.v.full() {
		l.v.unreadable++
		return nil
	}
	entries, err := l.v.lower.ReadDir(l.dir.lower)
	if err != nil {
		return l.v.tolerate(err)
	}
	for _, e := range entries {
		l.lower = append(l.lower, e.Name())
		l.bytes += len(e.Name())
	}
	l.v.held, l.v.heldBytes = l.v.held+len(entries), l.v.heldBytes+l.bytes
	slices.Sort(l.lower)
	return nil
}

func (v *view) upperList(in *ext4.Inode) ([]ext4.Entry, map[string]string, error) {
	if v.seen[in.Number] {
		v.unreadable++
		return nil, nil, nil
	}
	if v.full() {
		v.unreadable++
		return nil, nil, nil
	}
	v.seen[in.Number] = true
	xattrs, err := v.disk.Xattrs(in)
	if err != nil {
		return nil, nil, err
	}
	entries, err := v.disk.ReadDir(in)
	v.held, v.heldBytes = v.held+len(entries), v.heldBytes+nameBytes(entries)
	return entries, xattrs, err
}

func nameBytes(list []ext4.Entry) (n int) {
	for _, e := range list {
		n += len(e.Name)
	}
	return n
}

// close gives back what the listing held.
func (l *listing) close() {
	l.v.held -= len(l.upper) + len(l.lower)
	l.v.heldBytes -= nameBytes(l.upper) + l.bytes
}

// tolerate counts damage by a guest or by the maker of the image. It returns any other error, which is the host's.
func (v *view) tolerate(err error) error {
	_, upper := errors.AsType[*ext4.DamagedError](err)
	_, lower := errors.AsType[*rootimage.DamagedError](err)
	if upper || lower {
		v.unreadable++
		return nil
	}
	return err
}

// child finds a file of the directory; nil when there is none.
func (l *listing) child(name string) (*node, error) {
	if l.dir == nil {
		return nil, nil
	}
	i, there := find(l.upper, name)
	if !there {
		return l.lowerChild(name)
	}
	n, err := l.upperChild(l.upper[i])
	return n, l.v.tolerate(err)
}

// within is where the image has a file of the directory, "" if it cannot have it. A name that is not UTF-8 cannot be asked for.
func (l *listing) within(name string) string {
	if p := path.Join(l.dir.lower, name); l.dir.lower != "" && !l.opaque && fs.ValidPath(p) {
		return p
	}
	return ""
}

func (l *listing) lowerChild(name string) (*node, error) {
	p := l.within(name)
	info, err := l.v.lstat(p)
	if info == nil || err != nil {
		return nil, l.v.tolerate(err)
	}
	return &node{lower: p, info: info}, nil
}

// lstat returns nil for what is not there.
func (v *view) lstat(p string) (fs.FileInfo, error) {
	if p == "" {
		return nil, nil
	}
	info, err := v.lower.Lstat(p)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	return info, err
}

func (l *listing) upperChild(e ext4.Entry) (*node, error) {
	in, err := l.v.disk.Inode(e.Inode)
	if err != nil {
		return nil, err
	}
	if in.Type() == ext4.TypeChar && in.Rdev == 0 {
		return nil, nil // a whiteout
	}
	xattrs, err := l.v.disk.Xattrs(in)
	if err != nil {
		return nil, err
	}
	if _, gone := xattrs[xattrWhiteout]; gone && in.Type() == ext4.TypeRegular && in.Size == 0 {
		return nil, nil
	}
	n := &node{upper: in}
	_, n.data = xattrs[xattrMetacopy]
	n.data = n.data && in.Type() == ext4.TypeRegular
	if in.Type() != ext4.TypeDir && !n.data {
		return n, nil
	}
	from := l.within(e.Name)
	if to, moved := xattrs[xattrRedirect]; moved {
		if from = l.within(to); strings.HasPrefix(to, "/") {
			from = strings.TrimPrefix(to, "/")
		}
		if !fs.ValidPath(from) {
			from = ""
		}
	}
	info, err := l.v.lstat(from)
	if err != nil {
		return nil, err
	}
	if info != nil && (info.IsDir() && !n.data || info.Mode().IsRegular() && n.data) {
		n.lower, n.info = from, info
	}
	return n, nil
}

// names are all names that either listing has, sorted.
func names(a, b *listing) []string {
	out := make([]string, 0, max(len(a.upper)+len(a.lower), len(b.upper)+len(b.lower)))
	for _, l := range []*listing{a, b} {
		out = append(out, l.lower...)
		for _, e := range l.upper {
			out = append(out, e.Name)
		}
	}
	slices.Sort(out)
	return slices.Compact(out)
}
