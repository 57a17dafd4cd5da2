package diskdiff

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"slices"
	"sort"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/ext4"
	"github.com/coppice-dev/coppice/runner/rootimage"
)

// Kind says how a file differs.
type Kind string

// The kinds.
const (
	Added   Kind = "added"
	Changed Kind = "changed"
	Removed Kind = "removed"
)

// What of a changed file differs.
const (
	Content = "content"
	Type    = "type"
	Mode    = "mode"
	Owner   = "owner"
	ModTime = "mtime"
	Target  = "target" // of a symlink
	Device  = "device" // its number
)

// Change is one file that differs. A directory that came or went is one, and so is each file in it.
type Change struct {
	Path       []byte // absolute, any bytes but NUL
	Kind       Kind
	Type       string // file, dir, symlink or other; of a removed file what it was
	What       []string
	Size       int64 // in bytes, of a regular file or symlink; 0 for a removed one
	SizeBefore int64 // likewise, 0 for an added one
}

// Request asks for one page.
type Request struct {
	A, B  *os.File // the overlay disks, which nobody writes
	Lower Lower    // the image that both lie on
	After []byte   // a path: what comes after it is compared; empty for all
	Limit int      // changes; at least one
	Until time.Time
}

// Page is a part of the differences, in the order of their paths, compared name by name.
type Page struct {
	Changes []Change
	Next    []byte // ask for the rest with After; empty if there is none
	// Unreadable counts what the guests' disks have damaged within the page.
	Unreadable int
}

// Compare returns the differences from A to B. It ends with a page that is not full once Until has passed; each call gets
// further. An UnsupportedError or DamagedError of package ext4 says that a disk cannot be read at all.
func Compare(ctx context.Context, r Request) (Page, error) {
	unshared, err := sparse.Unshared(r.A, r.B)
	if err != nil {
		return Page{}, err
	}
	c := &comparison{runCtx: ctx, Request: r, unshared: unshared, after: split(r.After)}
	for _, side := range []struct {
		v    **view
		file *os.File
	}{{&c.a, r.A}, {&c.b, r.B}} {
		info, err := side.file.Stat()
		if err != nil {
			return Page{}, err
		}
		disk, err := ext4.Open(side.file, info.Size())
		if err != nil {
			return Page{}, err
		}
		*side.v = &view{disk: disk, lower: r.Lower, seen: make(map[uint32]bool), seenLower: make(map[uint64]bool)}
	}
	a, errA := c.a.root()
	b, errB := c.b.root()
	if err := errors.Join(errA, errB); err != nil {
		return Page{}, err
	}
	err = c.pair(nil, a, b)
	if errors.Is(err, errFull) {
		err = nil
	}
	c.page.Unreadable = c.a.unreadable + c.b.unreadable
	return c.page, err
}

// errFull ends the walk.
var errFull = errors.New("the page is full")

func split(path []byte) []string {
	if len(path) <= 1 {
		return nil
	}
	return strings.Split(strings.TrimPrefix(string(path), "/"), "/")
}

type comparison struct {
	Request
	runCtx   context.Context // the comparison's life
	a, b     *view
	unshared sparse.Ranges
	after    []string // where the page before ended
	page     Page
	bytes    int // of the paths of the page
	bufA     []byte
	bufB     []byte
}

// maxPageBytes bounds the paths of a page, which ends early with them.
const maxPageBytes = 4 << 20

// MaxPath is the longest path that a page has, in bytes.
const MaxPath = maxPath + 256

// maxPath bounds how deep a guest's directories are followed, in bytes, as the kernel bounds a path.
const maxPath = 4096

// pair compares what has one path on both sides; nil is nothing. Where the page before ended below the path, or with it, the rest
// of what is below it follows.
func (c *comparison) pair(path []string, a, b *node) error {
	if a == nil && b == nil || a != nil && b != nil && a.upper == nil && b.upper == nil && a.lower == b.lower {
		return nil // it is the image's own, with all that is below it
	}
	if !c.passed(path) {
		if err := c.judge(path, a, b); err != nil {
			return err
		}
		if err := c.visited(path); err != nil {
			return err
		}
	}
	if !a.dir() && !b.dir() {
		return nil
	}
	if pathLength(path) > maxPath {
		c.b.unreadable++
		return nil
	}
	return c.below(path, a, b)
}

func pathLength(path []string) (n int) {
	for _, p := range path {
		n += 1 + len(p)
	}
	return n
}

func (c *comparison) below(path []string, a, b *node) error {
	// Names that neither overlay has are equal on both sides if both have the same directory of the image below.
	same := a.dir() && b.dir() && a.lower == b.lower
	listA, errA := c.a.list(a, !same)
	listB, errB := c.b.list(b, !same)
	if err := errors.Join(errA, errB); err != nil {
		return err
	}
	defer listA.close()
	defer listB.close()
	if same && listA.opaque != listB.opaque {
		for _, l := range []*listing{listA, listB} {
			if err := l.readLower(); err != nil {
				return err
			}
		}
	}
	for _, name := range names(listA, listB) {
		here := append(slices.Clip(path), name)
		if c.skipped(here) {
			continue
		}
		childA, errA := listA.child(name)
		childB, errB := listB.child(name)
		if err := errors.Join(errA, errB); err != nil {
			return err
		}
		if err := c.pair(here, childA, childB); err != nil {
			return err
		}
	}
	return nil
}

// passed reports whether the path was judged for an earlier page: it leads to where that ended.
func (c *comparison) passed(path []string) bool {
	if len(path) > len(c.after) {
		return false
	}
	for i, p := range path {
		if p != c.after[i] {
			return false
		}
	}
	return true
}

// skipped reports whether all of a path is before where the page before ended.
func (c *comparison) skipped(path []string) bool {
	for i, p := range path {
		if i == len(c.after) || p > c.after[i] {
			return false
		}
		if p < c.after[i] {
			return true
		}
	}
	return false
}

// visited ends the walk when the page is full or the time is over. The path is the last of the page.
func (c *comparison) visited(path []string) error {
	if c.runCtx.Err() != nil {
		return context.Cause(c.runCtx)
	}
	if len(c.page.Changes) < c.Limit && c.bytes < maxPageBytes && (c.Until.IsZero() || time.Now().Before(c.Until)) {
		return nil
	}
	c.page.Next = []byte("/" + strings.Join(path, "/"))
	return errFull
}

func (c *comparison) judge(path []string, a, b *node) error {
	change := Change{Path: []byte("/" + strings.Join(path, "/"))}
	switch {
	case a == nil:
		x := b.attributes()
		change.Kind, change.Type, change.Size = Added, typeName(x.kind), x.size
	case b == nil:
		x := a.attributes()
		change.Kind, change.Type, change.SizeBefore = Removed, typeName(x.kind), x.size
	default:
		x, y := a.attributes(), b.attributes()
		what, err := c.what(a, b, x, y)
		if err != nil || len(what) == 0 {
			return err
		}
		change.Kind, change.Type, change.What, change.Size, change.SizeBefore = Changed, typeName(y.kind), what, y.size, x.size
	}
	c.page.Changes = append(c.page.Changes, change)
	c.bytes += len(change.Path)
	return nil
}

func typeName(kind uint16) string {
	switch kind {
	case ext4.TypeRegular:
		return "file"
	case ext4.TypeDir:
		return "dir"
	case ext4.TypeSymlink:
		return "symlink"
	}
	return "other"
}

// what lists the differences of two files.
func (c *comparison) what(a, b *node, x, y attributes) ([]string, error) {
	if x.kind != y.kind {
		return []string{Type}, nil
	}
	var out []string
	note := func(what string, differs bool) {
		if differs {
			out = append(out, what)
		}
	}
	content, err := c.content(a, b, x, y)
	if err != nil {
		return nil, err
	}
	if x.kind == ext4.TypeSymlink {
		note(Target, content)
	} else {
		note(Content, content)
	}
	note(Mode, x.mode != y.mode)
	note(Owner, x.uid != y.uid || x.gid != y.gid)
	note(Device, x.rdev != y.rdev)
	note(ModTime, !x.modTime.Equal(y.modTime))
	return out, nil
}

// content reports whether the bytes of two files of one kind differ. What cannot be read counts as different.
func (c *comparison) content(a, b *node, x, y attributes) (bool, error) {
	switch x.kind {
	case ext4.TypeSymlink:
		if x.size != y.size {
			return true, nil
		}
		targetA, errA := c.a.target(a)
		targetB, errB := c.b.target(b)
		damaged := c.a.unreadable + c.b.unreadable
		if err := errors.Join(c.a.tolerate(errA), c.b.tolerate(errB)); err != nil {
			return true, err
		}
		return targetA != targetB || damaged < c.a.unreadable+c.b.unreadable, nil
	case ext4.TypeRegular:
		if x.size != y.size {
			return true, nil
		}
	default:
		return false, nil
	}
	damaged := c.a.unreadable + c.b.unreadable
	layoutA, errA := c.a.layout(a)
	layoutB, errB := c.b.layout(b)
	if err := errors.Join(c.a.tolerate(errA), c.b.tolerate(errB)); err != nil || damaged < c.a.unreadable+c.b.unreadable {
		return true, err
	}
	return c.bytesDiffer(layoutA, layoutB, x.size)
}

func (v *view) target(n *node) (string, error) {
	if n.upper != nil {
		return v.disk.Readlink(n.upper)
	}
	return v.lower.ReadLink(n.lower)
}

// layout says where a file's bytes are: in the overlay, or in a file of the image, which is read from its beginning.
type layout struct {
	v       *view
	extents []ext4.Extent
	lower   string // "" for a file of the overlay
}

func (v *view) layout(n *node) (layout, error) {
	if n.upper == nil || n.data {
		if n.lower == "" { // attributes without content: the image has no such file
			return layout{v: v}, nil
		}
		return layout{v: v, lower: n.lower}, nil
	}
	extents, err := v.disk.Extents(n.upper)
	return layout{v: v, extents: extents}, err
}

const chunk = 256 << 10

// maxContent bounds the comparison of one file. After it the file counts as different and as unreadable, so that a huge file
// does not keep a page from getting further.
const maxContent = 10 * time.Second

// bytesDiffer compares two files of the same size.
func (c *comparison) bytesDiffer(a, b layout, size int64) (bool, error) {
	if a.lower != "" && a.lower == b.lower {
		return false, nil
	}
	if c.bufA == nil {
		c.bufA, c.bufB = make([]byte, chunk), make([]byte, chunk)
	}
	readA, errA := a.reader()
	readB, errB := b.reader()
	defer readA.close()
	defer readB.close()
	if err := errors.Join(c.a.tolerate(errA), c.b.tolerate(errB)); err != nil || errA != nil || errB != nil {
		return true, err
	}
	began := time.Now()
	for at := int64(0); at < size; {
		if c.runCtx.Err() != nil {
			return true, context.Cause(c.runCtx)
		}
		if time.Since(began) > maxContent {
			c.b.unreadable++
			return true, nil
		}
		n := min(chunk, size-at)
		if a.lower == "" && b.lower == "" {
			equal, end := c.sharedUntil(a, b, at, size)
			if equal {
				at = end
				continue
			}
			n = min(n, end-at)
		}
		errA, errB := readA.read(c.bufA[:n], at), readB.read(c.bufB[:n], at)
		if err := errors.Join(c.a.tolerate(errA), c.b.tolerate(errB)); err != nil || errA != nil || errB != nil {
			return true, err
		}
		if !bytes.Equal(c.bufA[:n], c.bufB[:n]) {
			return true, nil
		}
		at += n
	}
	return false, nil
}

// sharedUntil says whether two files have from a byte on the same blocks of the host's disk, or none, and how far that holds.
func (c *comparison) sharedUntil(a, b layout, at, size int64) (equal bool, end int64) {
	physicalA, endA := a.place(at, size)
	physicalB, endB := b.place(at, size)
	end = min(endA, endB)
	switch {
	case physicalA < 0 && physicalB < 0:
		return true, end
	case physicalA != physicalB:
		return false, end
	}
	return !c.unshared.Overlaps(physicalA, end-at), end
}

// place is where on the disk a byte of the file is, -1 for nowhere, and up to where that holds.
func (l layout) place(at, size int64) (physical, end int64) {
	block := l.v.disk.BlockSize()
	i := sort.Search(len(l.extents), func(i int) bool { return (l.extents[i].Logical+l.extents[i].Length)*block > at })
	if i == len(l.extents) {
		return -1, size
	}
	x := l.extents[i]
	if start := x.Logical * block; start > at {
		return -1, min(start, size)
	}
	return x.Physical*block + at - x.Logical*block, min((x.Logical+x.Length)*block, size)
}

// reader reads a layout in order.
type reader struct {
	layout
	file io.ReadCloser
}

func (l layout) reader() (*reader, error) {
	r := &reader{layout: l}
	if l.lower == "" {
		return r, nil
	}
	f, err := l.v.lower.Open(l.lower)
	if err == nil {
		r.file = f
	}
	return r, err
}

func (r *reader) read(b []byte, at int64) error {
	if r.file == nil {
		return r.v.disk.ReadExtents(r.extents, b, at)
	}
	_, err := io.ReadFull(r.file, b)
	if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
		return rootimage.Short()
	}
	return err
}

func (r *reader) close() {
	if r.file != nil {
		_ = r.file.Close() // only read
	}
}
