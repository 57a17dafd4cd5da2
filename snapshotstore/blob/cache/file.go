package cache

import (
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

const (
	// maxObject is the size of a file whose object's size is unknown. No object is that large.
	maxObject = 1 << 40
	// Names that begin with a dot do not belong to objects.
	newPrefix = ".new-"
	// touchEvery is the interval at which a file's last use is recorded.
	touchEvery = time.Minute
)

// file is the cached part of an object.
type file struct {
	*os.File
	size  int64 // size of the object, or maxObject
	fresh bool  // just created
}

func name(key string) string { return core.DigestOf([]byte(key)).Hex() }

// drop removes the cached part of an object. A reader that has it open continues with a file without a name.
func (c *Cache) drop(key string) { _ = c.root.Remove(name(key)) }

// open opens an object's file; nil if there is none, or it cannot be used.
func (c *Cache) open(key string) *file {
	f, err := c.root.OpenFile(name(key), os.O_RDWR, 0)
	if err != nil {
		if !errors.Is(err, fs.ErrNotExist) {
			c.count.failures.Add(1)
		}
		return nil
	}
	info, err := f.Stat()
	if err != nil || !info.Mode().IsRegular() || info.Size() == 0 {
		_ = f.Close()
		c.drop(key)
		return nil
	}
	if now := time.Now(); now.Sub(info.ModTime()).Abs() > touchEvery {
		at := unix.NsecToTimeval(now.UnixNano())
		_ = unix.Futimes(int(f.Fd()), []unix.Timeval{at, at}) // on an error, it is evicted too early
	}
	return &file{File: f, size: info.Size()}
}

// make opens an object's file, and creates it if it is missing; nil if that fails. A file gets its name only when it
// has its size, so a growing file is never taken for an object that ends.
func (c *Cache) make(key string) *file {
	if f := c.open(key); f != nil {
		return f
	}
	tmp := newPrefix + rand.Text()
	f, err := c.root.OpenFile(tmp, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		c.count.failures.Add(1)
		return nil
	}
	if err = f.Truncate(maxObject); err == nil {
		err = c.root.Link(tmp, name(key))
	}
	err = errors.Join(err, c.root.Remove(tmp))
	if err == nil {
		return &file{File: f, size: maxObject, fresh: true}
	}
	_ = f.Close()
	if errors.Is(err, fs.ErrExist) {
		return c.open(key)
	}
	c.count.failures.Add(1)
	return nil
}

// read returns a cached range, or less if the object ends before; nil if any part of it is not cached.
func (f *file) read(off, n int64) ([]byte, error) {
	n = max(0, min(n, f.size-off))
	if f.size == maxObject && n == 0 {
		return nil, nil
	}
	if lo, hi, err := f.missing(off, off+n); err != nil || lo < hi {
		return nil, err
	}
	b := make([]byte, n)
	if _, err := f.ReadAt(b, off); err != nil {
		return nil, err
	}
	return b, nil
}

// missing returns the shortest range that contains every missing byte of a range; an empty range if nothing is missing.
func (f *file) missing(from, to int64) (lo, hi int64, err error) {
	lo, hi = to, to
	for at := from; at < to; {
		hole, err := unix.Seek(int(f.Fd()), at, unix.SEEK_HOLE)
		if err != nil {
			return 0, 0, fmt.Errorf("find a hole in %s: %w", f.Name(), err)
		}
		if hole >= to {
			break
		}
		at, err = unix.Seek(int(f.Fd()), hole, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			at, err = to, nil
		}
		if err != nil {
			return 0, 0, fmt.Errorf("find data in %s: %w", f.Name(), err)
		}
		lo, hi = min(lo, hole), min(at, to)
	}
	return lo, hi, nil
}

// around returns a buffer for the part of a span within the object. It is filled with the cached bytes, except those
// between lo and hi.
func (f *file) around(s span) (buf []byte, lo, hi int64) {
	to := max(s.from, min(s.to, f.size))
	buf = make([]byte, to-s.from)
	lo, hi, err := f.missing(s.from, to)
	if err == nil && lo > s.from {
		_, err = f.ReadAt(buf[:lo-s.from], s.from)
	}
	if err == nil && hi < to {
		_, err = f.ReadAt(buf[hi-s.from:], hi)
	}
	if err != nil {
		return buf, s.from, to
	}
	return buf, lo, hi
}

// end records where the object ends. An object has one end, and a file is never made longer.
func (f *file) end(size int64) error {
	if size == f.size {
		return nil
	}
	if f.size != maxObject {
		return errors.New("the store reports another size of the object than before")
	}
	f.size = size
	return f.Truncate(size)
}

func (f *file) writeAt(b []byte, off int64) error {
	_, err := f.WriteAt(b, off)
	return err
}

// probe finds the unit in which a file system reports holes, by trying it.
func probe(root *os.Root) (block int64, err error) {
	name := newPrefix + rand.Text()
	f, err := root.OpenFile(name, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return 0, err
	}
	defer func() { err = errors.Join(err, f.Close(), root.Remove(name)) }()
	const at = 1 << 20
	for block = 4096; block <= 1<<16; block *= 2 {
		if err = errors.Join(f.Truncate(0), f.Truncate(maxObject)); err != nil {
			return 0, err
		}
		if _, err = f.WriteAt(make([]byte, block), at); err != nil {
			return 0, err
		}
		exact := true
		for range 2 { // before and after the data is on the disk
			data, errD := unix.Seek(int(f.Fd()), 0, unix.SEEK_DATA)
			hole, errH := unix.Seek(int(f.Fd()), at, unix.SEEK_HOLE)
			exact = exact && errD == nil && errH == nil && data == at && hole == at+block
			if err = f.Sync(); err != nil {
				return 0, err
			}
		}
		if exact {
			return block, nil
		}
	}
	return 0, core.Errorf(core.FailedPrecondition, core.CodeUnsupported, "the file system of %s does not report the holes of a file", root.Name())
}

// isNew reports whether a name in the directory is that of a file that is being made.
func isNew(name string) bool { return strings.HasPrefix(name, newPrefix) }
