// Package erofstest writes file systems of the format erofs that mkfs.erofs would not: with directories in themselves, names twice
// and sizes that the disk does not have. What it is told to write is what a hostile image may have.
package erofstest

import (
	"encoding/binary"
	"slices"
	"strings"
)

// The types of entries and modes of files.
const (
	Regular = 1
	Dir     = 2
	Symlink = 7

	ModeRegular = 0o100644
	ModeDir     = 0o040755
	ModeSymlink = 0o120777
)

const (
	block = 4096
	slot  = 32 // of inodes
)

// Entry is a name in a directory, for the file of that index.
type Entry struct {
	Name string
	File int
	Type uint8
}

// File is a file of an image.
type File struct {
	Mode    uint16
	Size    uint64  // 0: as long as its content
	Data    []byte  // of a regular file or a symlink
	Entries []Entry // of a directory, besides "." and ".."
	Times   int     // its content again and again, by chunks of a block that are all the same block; 0: once
}

// Image writes an image. The first file is the root directory.
func Image(files ...File) []byte {
	at := make([]int, len(files)) // the block of each inode
	next := 2                     // the superblock, and a block that is no inode's
	for i, f := range files {
		at[i] = next
		next += 1 + (4*f.Times+block-1)/block
	}
	le := binary.LittleEndian
	out := make([]byte, next*block)
	for i, f := range files {
		data := f.Data
		if f.Mode&0o170000 == 0o040000 {
			data = directory(append([]Entry{{".", i, Dir}, {"..", 0, Dir}}, f.Entries...), func(file int) uint64 { return uint64(at[file]-1) * block / slot })
		}
		size, layout := uint64(len(data)), uint16(0)
		in := out[at[i]*block:]
		first := uint32(len(out) / block)
		if f.Times > 0 {
			layout, size = 4, uint64(f.Times)*block
			for n := range f.Times {
				le.PutUint32(in[64+4*n:], first)
			}
			first = 0 // chunks of one block, without an index
		}
		if f.Size > 0 {
			size = f.Size
		}
		le.PutUint16(in, 1|layout<<1) // an extended inode
		le.PutUint16(in[4:], f.Mode)
		le.PutUint64(in[8:], size)
		le.PutUint32(in[16:], first)
		le.PutUint32(in[20:], uint32(i))
		le.PutUint32(in[44:], 1)
		out = append(out, data...)
		out = append(out, make([]byte, (block-len(out)%block)%block)...)
	}
	super := out[1024:]
	le.PutUint32(super, 0xe0f5e1e2)
	super[12] = 12 // bits of a block
	le.PutUint16(super[14:], uint16((at[0]-1)*block/slot))
	le.PutUint64(super[16:], uint64(len(files)))
	le.PutUint32(super[36:], uint32(len(out)/block))
	le.PutUint32(super[40:], 1) // inodes begin with block 1
	le.PutUint32(super[80:], 4) // chunks
	return out
}

// directory writes the blocks of a directory.
func directory(entries []Entry, nid func(int) uint64) []byte {
	slices.SortStableFunc(entries, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	var out []byte
	for len(entries) > 0 {
		n, size := 0, 0
		for n < len(entries) && size+12+len(entries[n].Name) <= block {
			size += 12 + len(entries[n].Name)
			n++
		}
		b := make([]byte, 12*n, block)
		for i, e := range entries[:n] {
			binary.LittleEndian.PutUint64(b[12*i:], nid(e.File))
			binary.LittleEndian.PutUint16(b[12*i+8:], uint16(len(b)))
			b[12*i+10] = e.Type
			b = append(b, e.Name...)
		}
		if entries = entries[n:]; len(entries) > 0 {
			b = b[:block]
		}
		out = append(out, b...)
	}
	return out
}
