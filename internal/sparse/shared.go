package sparse

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Range is a part of a file, in bytes.
type Range struct{ Offset, Length int64 }

// End is the byte after the last.
func (r Range) End() int64 { return r.Offset + r.Length }

// Ranges are sorted and do not touch.
type Ranges []Range

// Overlaps reports whether any byte of [off, off+n) is in one of the ranges.
func (rs Ranges) Overlaps(off, n int64) bool {
	i, _ := slices.BinarySearchFunc(rs, off, func(r Range, off int64) int {
		if r.End() <= off {
			return -1
		}
		return 1
	})
	return i < len(rs) && rs[i].Offset < off+n
}

// add appends a range that begins at or after the last one's beginning.
func (rs Ranges) add(r Range) Ranges {
	if r.Length <= 0 {
		return rs
	}
	if n := len(rs); n > 0 && rs[n-1].End() >= r.Offset {
		rs[n-1].Length = max(rs[n-1].End(), r.End()) - rs[n-1].Offset
		return rs
	}
	return append(rs, r)
}

// Unshared returns where the bytes of two files may differ: everywhere but where both are holes, or beyond their end, or have the
// same blocks of the disk. Both must have been synced since they were last written: a file system may go on naming the old blocks
// of what is still in the page cache. Where it names none at all, the answer is all that is data in either.
func Unshared(a, b *os.File) (Ranges, error) {
	var infoA, infoB unix.Stat_t
	if err := errors.Join(unix.Fstat(int(a.Fd()), &infoA), unix.Fstat(int(b.Fd()), &infoB)); err != nil {
		return nil, fmt.Errorf("compare %s and %s: %w", a.Name(), b.Name(), err)
	}
	same := infoA.Dev == infoB.Dev
	if same && infoA.Ino == infoB.Ino {
		return nil, nil
	}
	listA, errA := extents(a, infoA.Size)
	listB, errB := extents(b, infoB.Size)
	if err := errors.Join(errA, errB); err != nil {
		return nil, err
	}
	var out Ranges
	at, size := int64(0), max(infoA.Size, infoB.Size)
	for at < size {
		var hereA, hereB extent
		var end int64
		hereA, listA, end = skip(listA, at, size)
		hereB, listB, end = skip(listB, at, end)
		if hereA != hereB || hereA.known && !same || hereA.data && !hereA.known {
			out = out.add(Range{at, end - at})
		}
		at = end
	}
	return out, nil
}

// Data returns where a file has data. A range may be of zeros all the same.
func Data(f *os.File) (Ranges, error) {
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	list, err := dataOf(f, info.Size())
	if err != nil {
		return nil, err
	}
	var out Ranges
	for _, e := range list {
		out = out.add(Range{e.logical, e.length})
	}
	return out, nil
}

// extent is what is known of a part of a file.
type extent struct {
	logical, length int64
	physical        int64 // of the byte at logical
	data, known     bool  // not a hole; and physical says where it is
}

// skip returns what a file has at a byte, with physical counted for that byte, and where that ends, at most at limit.
func skip(list []extent, at, limit int64) (extent, []extent, int64) {
	for len(list) > 0 && list[0].logical+list[0].length <= at {
		list = list[1:]
	}
	if len(list) == 0 {
		return extent{}, list, limit
	}
	e := list[0]
	if e.logical > at {
		return extent{}, list, min(limit, e.logical)
	}
	end := min(limit, e.logical+e.length)
	here := extent{data: true, known: e.known}
	if e.known {
		here.physical = e.physical + at - e.logical
	}
	return here, list, end
}

// The interface of FS_IOC_FIEMAP (linux/fiemap.h).
const (
	fiemapIoctl   = 0xC020660B
	fiemapBatch   = 512
	fiemapLast    = 0x1
	fiemapUnknown = 0x2 | 0x4 | 0x8 | 0x80 | 0x100 | 0x200 | 0x400 // not placed yet, encoded, encrypted, in line, unaligned
	maxExtents    = 1 << 22
)

type fiemap struct {
	start, length   uint64
	flags, mapped   uint32
	count, reserved uint32
	extents         [fiemapBatch]fiemapExtent
}

type fiemapExtent struct {
	logical, physical, length uint64
	_                         [2]uint64
	flags                     uint32
	_                         [3]uint32
}

// extents lists the data of a file.
func extents(f *os.File, size int64) ([]extent, error) {
	var out []extent
	m := new(fiemap)
	for at := int64(0); at < size; {
		*m = fiemap{start: uint64(at), length: uint64(size - at), count: fiemapBatch}                //nolint:gosec // G115: at is between 0 and size
		_, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), fiemapIoctl, uintptr(unsafe.Pointer(m))) //nolint:gosec // G103: how this ioctl is given its argument
		if errno == unix.EOPNOTSUPP || errno == unix.ENOTTY || errno == unix.EINVAL {
			return dataOf(f, size)
		}
		if errno != 0 {
			return nil, fmt.Errorf("list the extents of %s: %w", f.Name(), errno)
		}
		if m.mapped == 0 {
			return out, nil
		}
		for _, e := range m.extents[:min(m.mapped, fiemapBatch)] {
			out = append(out, extent{
				logical: int64(e.logical), length: int64(e.length), physical: int64(e.physical), data: true, known: e.flags&fiemapUnknown == 0, //nolint:gosec // G115: the kernel's offsets are below 2^63
			})
			at = int64(e.logical + e.length) //nolint:gosec // G115: likewise
			if e.flags&fiemapLast != 0 {
				return out, nil
			}
		}
		if len(out) > maxExtents {
			return nil, fmt.Errorf("%s has more than %d extents", f.Name(), maxExtents)
		}
	}
	return out, nil
}

// dataOf lists the data of a file without knowing where it is.
func dataOf(f *os.File, size int64) ([]extent, error) {
	var out []extent
	for at := int64(0); at < size; {
		start, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
		if errors.Is(err, unix.ENXIO) {
			break
		}
		if err != nil {
			return nil, fmt.Errorf("find data in %s: %w", f.Name(), err)
		}
		end, err := unix.Seek(int(f.Fd()), start, unix.SEEK_HOLE)
		if err != nil {
			return nil, fmt.Errorf("find a hole in %s: %w", f.Name(), err)
		}
		out = append(out, extent{logical: start, length: end - start, data: true})
		at = end
	}
	return out, nil
}
