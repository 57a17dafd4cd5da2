package ext4

import "encoding/binary"

// Extent is a run of a file's blocks: Length blocks from the file's block Logical on are the disk's from Physical on. What no extent
// covers reads as zeros.
type Extent struct{ Logical, Physical, Length int64 }

const (
	extentMagic = 0xF30A
	extentEntry = 12
	maxDepth    = 5       // of a file's tree: the kernel's own bound
	maxExtents  = 1 << 18 // of one file: 1 GiB in blocks that have no two together
	longest     = 32768   // an initialized extent; one that is longer has been allocated and not written
)

// Extents lists the extents of a file in order, without those that are allocated but not written.
func (fs *FS) Extents(in *Inode) ([]Extent, error) {
	if in.flags&flagExtents == 0 {
		if in.Size == 0 {
			return nil, nil
		}
		return nil, damaged("inode %d has no extents", in.Number)
	}
	w := &extentWalk{fs: fs, inode: in.Number, end: (in.Size + fs.blockSize - 1) / fs.blockSize}
	if err := w.node(in.content[:], -1, 0, 1<<32); err != nil {
		return nil, err
	}
	return w.out, nil
}

type extentWalk struct {
	fs    *FS
	inode uint32
	end   int64 // of the file, in blocks
	next  int64 // the first block that the next extent may begin at
	sum   int64 // blocks so far: no more than the disk has, for each is in one place
	out   []Extent
	nodes int
}

// node walks one node. depth is what it must have, -1 for a root; its entries lie within [from, to).
func (w *extentWalk) node(b []byte, depth int, from, to int64) error {
	le := binary.LittleEndian
	count, has := int(le.Uint16(b[2:])), int(le.Uint16(b[6:]))
	switch {
	case le.Uint16(b) != extentMagic || count > len(b)/extentEntry-1:
		return damaged("a node of the extents of inode %d is not one", w.inode)
	case depth < 0 && has > maxDepth, depth >= 0 && has != depth, depth >= 0 && count == 0:
		return damaged("a node of the extents of inode %d has the depth %d", w.inode, has)
	}
	if w.nodes++; w.nodes > maxExtents {
		return damaged("inode %d has more than %d extents", w.inode, maxExtents)
	}
	if has == 0 {
		return w.leaf(b, count, to)
	}
	// Reading a child may drop this node from the cache.
	entries := append([]byte(nil), b[extentEntry:(count+1)*extentEntry]...)
	for i := range count {
		e := entries[i*extentEntry:]
		first, end := int64(le.Uint32(e)), to
		if i+1 < count {
			end = int64(le.Uint32(entries[(i+1)*extentEntry:]))
		}
		if first < from || first >= end || end > to {
			return damaged("the extents of inode %d are out of order", w.inode)
		}
		if le.Uint16(e[8:]) != 0 {
			return damaged("a node of the extents of inode %d is outside of the disk", w.inode)
		}
		child, err := w.fs.block(int64(le.Uint32(e[4:])))
		if err != nil {
			return err
		}
		if err := w.node(child, has-1, first, end); err != nil {
			return err
		}
		from = end
	}
	return nil
}

func (w *extentWalk) leaf(b []byte, count int, to int64) error {
	le := binary.LittleEndian
	for i := range count {
		e := b[(i+1)*extentEntry:]
		x := Extent{int64(le.Uint32(e)), int64(le.Uint32(e[8:])), int64(le.Uint16(e[4:]))}
		unwritten := x.Length > longest
		if unwritten {
			x.Length -= longest
		}
		switch {
		case x.Length == 0 || x.Logical < w.next || x.Logical+x.Length > to:
			return damaged("the extents of inode %d are out of order", w.inode)
		case le.Uint16(e[6:]) != 0 || x.Physical == 0 || x.Physical+x.Length > w.fs.blocks:
			return damaged("inode %d has blocks outside of the disk", w.inode)
		case len(w.out) == maxExtents:
			return damaged("inode %d has more than %d extents", w.inode, maxExtents)
		}
		if w.sum += x.Length; w.sum > w.fs.blocks {
			return damaged("inode %d has more blocks than the disk", w.inode)
		}
		w.next = x.Logical + x.Length
		if x.Length = min(x.Length, w.end-x.Logical); x.Length > 0 && !unwritten {
			w.out = append(w.out, x)
		}
	}
	return nil
}
