package diskdiff

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/runner/ext4"
	"github.com/coppice-dev/coppice/runner/rootimage"
)

// The errors of a path that a guest's file system does not have.
var (
	ErrNoFile   = errors.New("there is no such file or directory")
	ErrNotDir   = errors.New("it is not a directory")
	ErrNotFile  = errors.New("it is not a regular file")
	ErrLinks    = errors.New("there are too many symbolic links on the way")
	ErrDamaged  = errors.New("the disk of the checkpoint is damaged there")
	errBadQuery = errors.New("the path or the bounds of a request are wrong")
)

// maxLinks is the kernel's bound of symbolic links on the way to a file.
const maxLinks = 40

// Query asks for one file of a guest's file system.
type Query struct {
	Overlay *os.File // the overlay disk, which nobody writes
	Lower   Lower    // the image that it lies on
	Path    []byte   // absolute; symbolic links on the way are followed within the guest's file system
	Follow  bool     // also a symbolic link at the end

	List   int   // list the directory, at most so many entries; 0: do not
	Offset int64 // read from this byte on
	Length int   // read so many bytes at most; 0: do not
}

// File is one file, as the guest sees it.
type File struct {
	Name    []byte // any bytes but NUL and "/"
	Type    string // file, dir, symlink or other
	Mode    uint16 // permission bits
	UID     uint32
	GID     uint32
	Size    int64 // in bytes, of a regular file or symlink
	ModTime time.Time
	Target  []byte // of a symlink
}

// Found is the answer to a Query.
type Found struct {
	File      File
	Entries   []File // by name
	Truncated bool   // there are more entries
	// Unreadable counts the entries that the guest's disk has damaged; they are left out.
	Unreadable int
	Data       []byte
}

// Look answers a query. An UnsupportedError or DamagedError of package ext4 says that the disk cannot be read at all.
func Look(ctx context.Context, q Query) (Found, error) {
	if len(q.Path) == 0 || len(q.Path) > maxPath || q.Path[0] != '/' || strings.ContainsRune(string(q.Path), 0) || q.Offset < 0 || q.Length < 0 || q.List < 0 {
		return Found{}, errBadQuery
	}
	info, err := q.Overlay.Stat()
	if err != nil {
		return Found{}, err
	}
	disk, err := ext4.Open(q.Overlay, info.Size())
	if err != nil {
		return Found{}, err
	}
	b := &browser{ctx: ctx, view: view{disk: disk, lower: q.Lower}}
	n, name, err := b.resolve(string(q.Path), q.Follow || q.List > 0 || q.Length > 0)
	if err != nil {
		return Found{}, err
	}
	var out Found
	if out.File, err = b.describe(name, n); err != nil {
		return Found{}, err
	}
	switch {
	case q.List > 0:
		err = b.entries(n, q.List, &out)
	case q.Length > 0:
		out.Data, err = b.data(n, q.Offset, q.Length)
	}
	return out, err
}

// browser looks at one view.
type browser struct {
	view
	ctx context.Context //nolint:containedctx // of the one query that it is made for
}

// open lists a directory. A path may lead through one directory several times, so that it was listed before says nothing here.
func (b *browser) open(n *node, all bool) (*listing, error) {
	if err := b.ctx.Err(); err != nil {
		return nil, context.Cause(b.ctx)
	}
	if !n.dir() {
		return nil, ErrNotDir
	}
	b.seen, b.seenLower = map[uint32]bool{}, map[uint64]bool{}
	return b.list(n, all)
}

// place is a file on the way to another one.
type place struct {
	node *node
	name string
}

// resolve finds what a path leads to.
func (b *browser) resolve(path string, follow bool) (*node, string, error) {
	root, err := b.root()
	if err != nil {
		return nil, "", err
	}
	way := []place{{root, "/"}}
	rest := strings.Split(path, "/")
	for links := 0; len(rest) > 0; {
		name := rest[0]
		rest = rest[1:]
		switch name {
		case "", ".":
			if name == "." && !way[len(way)-1].node.dir() {
				return nil, "", ErrNotDir
			}
			continue
		case "..":
			way = way[:max(1, len(way)-1)]
			continue
		}
		n, err := b.step(way[len(way)-1].node, name)
		if err != nil {
			return nil, "", err
		}
		if n.attributes().kind != ext4.TypeSymlink || len(rest) == 0 && !follow {
			way = append(way, place{n, name})
			continue
		}
		if links++; links > maxLinks {
			return nil, "", ErrLinks
		}
		target, err := b.link(n)
		if err != nil {
			return nil, "", err
		}
		if strings.HasPrefix(target, "/") {
			way = way[:1]
		}
		rest = append(strings.Split(target, "/"), rest...)
	}
	last := way[len(way)-1]
	return last.node, last.name, nil
}

// step finds a name in a directory.
func (b *browser) step(dir *node, name string) (*node, error) {
	damaged := b.unreadable
	l, err := b.open(dir, false)
	if err != nil {
		return nil, err
	}
	defer l.close()
	if b.unreadable > damaged {
		return nil, ErrDamaged
	}
	n, err := l.child(name)
	switch {
	case err != nil:
		return nil, err
	case n == nil && b.unreadable > damaged:
		return nil, ErrDamaged
	case n == nil:
		return nil, ErrNoFile
	}
	return n, nil
}

func (b *browser) link(n *node) (string, error) {
	target, err := b.target(n)
	if err == nil {
		return target, nil
	}
	if err := b.tolerate(err); err != nil {
		return "", err
	}
	return "", ErrDamaged
}

func (b *browser) describe(name string, n *node) (File, error) {
	x := n.attributes()
	f := File{Name: []byte(name), Type: typeName(x.kind), Mode: x.mode, UID: x.uid, GID: x.gid, Size: x.size, ModTime: x.modTime}
	switch x.kind {
	case ext4.TypeDir:
		f.ModTime = n.modTime()
	case ext4.TypeSymlink:
		target, err := b.link(n)
		if err != nil {
			return f, err
		}
		f.Target = []byte(target)
	}
	return f, nil
}

// modTime is the time of a directory, which comparisons leave out.
func (n *node) modTime() time.Time {
	if n.upper != nil {
		return n.upper.ModTime
	}
	return n.info.ModTime()
}

func (b *browser) entries(dir *node, most int, out *Found) error {
	damaged := b.unreadable
	l, err := b.open(dir, true)
	if err != nil {
		return err
	}
	defer l.close()
	if b.unreadable > damaged {
		return ErrDamaged
	}
	for _, name := range names(l, &listing{v: &b.view}) {
		if len(out.Entries) == most {
			out.Truncated = true
			break
		}
		if err := b.ctx.Err(); err != nil {
			return context.Cause(b.ctx)
		}
		n, err := l.child(name)
		if err != nil {
			return err
		}
		if n == nil {
			continue
		}
		f, err := b.describe(name, n)
		switch {
		case errors.Is(err, ErrDamaged): // counted already
		case err != nil:
			return err
		default:
			out.Entries = append(out.Entries, f)
		}
	}
	out.Unreadable = b.unreadable - damaged
	return nil
}

// data reads a part of a regular file.
func (b *browser) data(n *node, offset int64, length int) ([]byte, error) {
	x := n.attributes()
	if x.kind != ext4.TypeRegular {
		return nil, ErrNotFile
	}
	length = int(min(int64(length), max(0, x.size-offset)))
	if length == 0 {
		return nil, nil
	}
	l, err := b.layout(n)
	if err != nil {
		return nil, b.orDamaged(err)
	}
	r, err := l.reader()
	if err != nil {
		return nil, b.orDamaged(err)
	}
	defer r.close()
	if r.file != nil { // it is read from its beginning
		if err := b.skip(r.file, offset); err != nil {
			return nil, b.orDamaged(err)
		}
	}
	data := make([]byte, length)
	if err := r.read(data, offset); err != nil {
		return nil, b.orDamaged(err)
	}
	return data, nil
}

func (b *browser) skip(r io.Reader, n int64) error {
	buf := make([]byte, chunk)
	for n > 0 {
		if err := b.ctx.Err(); err != nil {
			return context.Cause(b.ctx)
		}
		k, err := io.ReadFull(r, buf[:min(n, chunk)])
		n -= int64(k)
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return rootimage.Short()
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// orDamaged says that the guest's disk is damaged, unless an error is the host's.
func (b *browser) orDamaged(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return ErrDamaged
	}
	if err := b.tolerate(err); err != nil {
		return err
	}
	return ErrDamaged
}
