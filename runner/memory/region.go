package memory

import (
	"cmp"
	"slices"
)

// PageSize is the granularity of everything here, in bytes: that of x86-64 and of arm64 as Debian configures it.
const PageSize = 4096

// Region is where a machine's RAM is mapped in its VMM process: in one part, or in several where the guest's address space has a hole
// that the VMM maps around.
type Region struct {
	PID   int
	Size  int64  // bytes, a multiple of PageSize
	Parts []Part // in order, without gaps: together they are Size bytes
}

// Part is one mapping of a region.
type Part struct {
	Offset int64  // into RAM, bytes
	Addr   uint64 // in the address space of the process, page aligned
	Size   int64  // bytes, a multiple of PageSize
}

// OnePart is a region that is mapped in one part.
func OnePart(pid int, addr uint64, size int64) Region {
	return Region{PID: pid, Size: size, Parts: []Part{{Addr: addr, Size: size}}}
}

// Addr returns the address of the byte of RAM at offset in the process; 0 if offset is outside the region.
func (r Region) Addr(offset int64) uint64 {
	for _, p := range r.Parts {
		if offset >= p.Offset && offset < p.Offset+p.Size {
			return p.Addr + uint64(offset-p.Offset)
		}
	}
	return 0
}

// Extent is a run of pages: an offset into RAM and a length, both in bytes and multiples of PageSize.
type Extent struct {
	Offset int64
	Length int64
}

// End returns the offset just behind the extent.
func (e Extent) End() int64 { return e.Offset + e.Length }

// TotalBytes sums the lengths of extents.
func TotalBytes(extents []Extent) int64 {
	var n int64
	for _, e := range extents {
		n += e.Length
	}
	return n
}

// merge sorts extents and joins those that touch or overlap.
func merge(extents []Extent) []Extent {
	slices.SortFunc(extents, func(a, b Extent) int { return cmp.Compare(a.Offset, b.Offset) })
	out := extents[:0]
	for _, e := range extents {
		if n := len(out); n > 0 && e.Offset <= out[n-1].End() {
			out[n-1].Length = max(out[n-1].End(), e.End()) - out[n-1].Offset
			continue
		}
		out = append(out, e)
	}
	return out
}
