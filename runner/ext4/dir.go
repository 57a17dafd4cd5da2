package ext4

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strings"
)

// Entry is one name in a directory.
type Entry struct {
	Name  string
	Inode uint32
}

// The bounds of one directory.
const (
	maxDirectory = 32 << 20
	maxEntries   = 1 << 18
	maxNames     = 16 << 20 // bytes of all names
)

// ReadDir lists a directory by name, without "." and "..". Names are bytes of the guest's choice but for "/" and NUL.
func (fs *FS) ReadDir(in *Inode) ([]Entry, error) {
	if in.Type() != TypeDir || in.Size > maxDirectory || in.Size%fs.blockSize != 0 {
		return nil, damaged("inode %d is no directory, or one of %d bytes", in.Number, in.Size)
	}
	extents, err := fs.Extents(in)
	if err != nil {
		return nil, err
	}
	var out []Entry
	names := 0
	for _, x := range extents {
		for n := range x.Length {
			b, err := fs.block(x.Physical + n)
			if err != nil {
				return nil, err
			}
			had := len(out)
			if out, err = appendEntries(out, b, in.Number); err != nil {
				return nil, err
			}
			for _, e := range out[had:] {
				names += len(e.Name)
			}
			if names > maxNames {
				return nil, damaged("directory %d has names of more than %d bytes", in.Number, maxNames)
			}
		}
	}
	slices.SortFunc(out, func(a, b Entry) int { return strings.Compare(a.Name, b.Name) })
	for i := 1; i < len(out); i++ {
		if out[i].Name == out[i-1].Name {
			return nil, damaged("directory %d has a name twice", in.Number)
		}
	}
	return out, nil
}

// appendEntries adds what one block holds. The inner blocks of an indexed directory look like one entry without an inode.
func appendEntries(out []Entry, b []byte, dir uint32) ([]Entry, error) {
	const head = 8
	for len(b) > 0 {
		if len(b) < head {
			return nil, damaged("an entry of directory %d is cut off", dir)
		}
		inode, length, nameLength := binary.LittleEndian.Uint32(b), int(binary.LittleEndian.Uint16(b[4:])), int(b[6])
		if length < head || length%4 != 0 || length > len(b) || inode != 0 && head+nameLength > length {
			return nil, damaged("an entry of directory %d has %d bytes", dir, length)
		}
		if inode != 0 {
			name := b[head : head+nameLength]
			switch {
			case nameLength == 0 || bytes.ContainsAny(name, "/\x00"):
				return nil, damaged("directory %d has a name that no file can have", dir)
			case string(name) == "." || string(name) == "..":
			case len(out) == maxEntries:
				return nil, damaged("directory %d has more than %d names", dir, maxEntries)
			default:
				out = append(out, Entry{string(name), inode})
			}
		}
		b = b[length:]
	}
	return out, nil
}

// maxTarget is the kernel's bound of a symlink's target.
const maxTarget = 4095

// Readlink is the target of a symlink.
func (fs *FS) Readlink(in *Inode) (string, error) {
	if in.Type() != TypeSymlink || in.Size == 0 || in.Size > maxTarget {
		return "", damaged("inode %d is no symlink, or one of %d bytes", in.Number, in.Size)
	}
	if in.flags&flagExtents == 0 {
		if in.Size >= int64(len(in.content)) {
			return "", damaged("the target of inode %d has %d bytes", in.Number, in.Size)
		}
		return string(in.content[:in.Size]), nil
	}
	target := make([]byte, in.Size)
	extents, err := fs.Extents(in)
	if err != nil {
		return "", err
	}
	return string(target), fs.ReadExtents(extents, target, 0)
}

// ReadExtents fills b with a file's bytes from off on.
func (fs *FS) ReadExtents(extents []Extent, b []byte, off int64) error {
	clear(b)
	first, _ := slices.BinarySearchFunc(extents, off, func(x Extent, off int64) int {
		if (x.Logical+x.Length)*fs.blockSize <= off {
			return -1
		}
		return 1
	})
	for _, x := range extents[first:] {
		start := x.Logical * fs.blockSize
		from, to := max(start, off), min(start+x.Length*fs.blockSize, off+int64(len(b)))
		if from >= to {
			break
		}
		if _, err := fs.r.ReadAt(b[from-off:to-off], x.Physical*fs.blockSize+from-start); err != nil {
			return fmt.Errorf("read %d bytes of block %d: %w", to-from, x.Physical, err)
		}
	}
	return nil
}
