package memory

import (
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"sort"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/atomicfile"
)

// Import makes a new base of size bytes of what write puts into an empty file, durably. An error leaves nothing.
func (s *BaseStore) Import(size int64, write func(f *os.File) error) (core.BaseID, error) {
	id := core.NewID[core.BaseID]()
	part := s.path(id) + ".part"
	f, err := os.OpenFile(part, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return "", err
	}
	if err = f.Truncate(size); err == nil {
		err = write(f)
	}
	if err == nil {
		err = errors.Join(f.Chmod(0o444), f.Sync())
	}
	if err = errors.Join(err, f.Close()); err == nil {
		err = atomicfile.Rename(part, s.path(id))
	}
	if err != nil {
		return "", errors.Join(fmt.Errorf("write base %s: %w", id, err), os.RemoveAll(part), s.Remove(id))
	}
	return id, nil
}

// DeltaFile is a delta that is being written, page by page and in any order. It is safe for concurrent use by writers of different
// pages.
type DeltaFile struct {
	file    *os.File
	extents []Extent
	at      []int64 // where each extent's pages are in the file
}

// CreateDelta begins the file of a delta of pages in extents, for a machine with size bytes of RAM. Until it is finished it is not
// durable.
func CreateDelta(path string, size int64, extents []Extent) (_ *DeltaFile, err error) {
	extents = merge(extents)
	dataAt := dataOffset(len(extents))
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return nil, err
	}
	head := headOf(size, extents)
	head = binary.LittleEndian.AppendUint32(head, crc32.Checksum(head, castagnoli))
	d := &DeltaFile{file: f, extents: extents}
	end := dataAt
	for _, e := range extents {
		d.at = append(d.at, end)
		end += e.Length
	}
	if _, err := f.WriteAt(head, 0); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	if err := f.Truncate(end); err != nil {
		return nil, errors.Join(err, f.Close())
	}
	return d, nil
}

// Bytes is the size of the pages.
func (d *DeltaFile) Bytes() int64 {
	var n int64
	for _, e := range d.extents {
		n += e.Length
	}
	return n
}

// WriteAt writes pages of one extent.
func (d *DeltaFile) WriteAt(b []byte, off int64) error {
	i := sort.Search(len(d.extents), func(i int) bool { return d.extents[i].End() > off })
	if i == len(d.extents) || off < d.extents[i].Offset || off+int64(len(b)) > d.extents[i].End() {
		return core.Errorf(core.Internal, core.CodeInternal, "pages at %d belong to no extent of the delta", off)
	}
	_, err := d.file.WriteAt(b, d.at[i]+off-d.extents[i].Offset)
	return err
}

// Finish makes the file durable, and closes it. Pages that were not written are zeros.
func (d *DeltaFile) Finish() error { return errors.Join(d.file.Sync(), d.file.Close()) }

// Close gives the file up.
func (d *DeltaFile) Close() { _ = d.file.Close() }
