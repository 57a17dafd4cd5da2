package memory

import (
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"os"
	"runtime"
	"runtime/debug"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// Delta is a set of pages and their contents: everything a machine differs in from its base. A Delta is immutable and
// safe for concurrent use until it is closed.
type Delta struct {
	Size    int64    // bytes of RAM it belongs to
	Extents []Extent // sorted, merged
	data    []byte   // the extents' bytes one behind the other
	mapping []byte   // what Close unmaps; nil when the data is borrowed
}

// The file of a delta, little-endian:
//
//	0   8  magic "COPPDLT1"
//	8   8  bytes of RAM
//	16  8  number of extents n
//	24  8  offset of the data: the header's length rounded up to a page
//	32  16 x n   offset and length of each extent, in bytes
//	..  4  CRC-32C of all bytes before it
//	..  zeros up to the data, then the extents' pages one behind the other
const (
	deltaMagic  = "COPPDLT1"
	deltaHeader = 32
)

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// Bytes is the size of the pages.
func (d *Delta) Bytes() int64 { return int64(len(d.data)) }

// WriteFile writes the delta to a new file and makes it durable, without making its directory durable. An error leaves no
// file.
func (d *Delta) WriteFile(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if err != nil {
		return err
	}
	if err := d.write(f, path); err != nil {
		return errors.Join(err, f.Close(), os.Remove(path))
	}
	return f.Close()
}

// dataOffset is where the pages begin in a file with an index of n extents.
func dataOffset(n int) int64 {
	return (int64(deltaHeader+16*n+4) + PageSize - 1) / PageSize * PageSize
}

// headOf is the header of a delta up to its checksum.
func headOf(size int64, extents []Extent) []byte {
	head := make([]byte, 0, dataOffset(len(extents)))
	head = append(head, deltaMagic...)
	head = binary.LittleEndian.AppendUint64(head, uint64(size))
	head = binary.LittleEndian.AppendUint64(head, uint64(len(extents)))
	head = binary.LittleEndian.AppendUint64(head, uint64(dataOffset(len(extents))))
	for _, e := range extents {
		head = binary.LittleEndian.AppendUint64(head, uint64(e.Offset))
		head = binary.LittleEndian.AppendUint64(head, uint64(e.Length))
	}
	return head
}

func (d *Delta) write(f *os.File, path string) error {
	dataAt := dataOffset(len(d.Extents))
	head := headOf(d.Size, d.Extents)
	head = binary.LittleEndian.AppendUint32(head, crc32.Checksum(head, castagnoli))
	if _, err := f.Write(head[:dataAt]); err != nil {
		return fmt.Errorf("write the index of %s: %w", path, err)
	}
	if _, err := f.Write(d.data); err != nil {
		return fmt.Errorf("write %d bytes of pages to %s: %w", len(d.data), path, err)
	}
	if err := f.Sync(); err != nil {
		return fmt.Errorf("make %s durable: %w", path, err)
	}
	return nil
}

// OpenDelta maps a delta file. The file may be removed while it is open.
func OpenDelta(path string) (*Delta, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, err
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, err
	}
	if info.Size() == 0 {
		return nil, corruptDelta(path, "it is empty")
	}
	m, err := unix.Mmap(int(f.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map %s: %w", path, err)
	}
	d := &Delta{mapping: m}
	if err := guardFaults(func() error { return d.parse(m, path) }); err != nil {
		d.Close()
		return nil, err
	}
	return d, nil
}

// guardFaults runs fn, which reads a mapped file. A page that cannot be read, because the disk fails or the file was cut off,
// is an error of fn then and not the end of the program.
func guardFaults(fn func() error) (err error) {
	defer debug.SetPanicOnFault(debug.SetPanicOnFault(true))
	defer func() {
		cause := recover()
		if cause == nil {
			return
		}
		fault, ok := cause.(interface {
			runtime.Error
			Addr() uintptr
		})
		if !ok {
			panic(cause)
		}
		err = core.Wrapf(fault, core.DataLoss, core.CodeCheckpointCorrupt, "a memory delta cannot be read: the disk fails, or its file was cut off")
	}()
	return fn()
}

func (d *Delta) parse(m []byte, path string) error {
	if len(m) < deltaHeader+4 {
		return corruptDelta(path, "it has only %d bytes", len(m))
	}
	count, dataAt := binary.LittleEndian.Uint64(m[16:]), binary.LittleEndian.Uint64(m[24:])
	if string(m[:8]) != deltaMagic || count > uint64(len(m))/16 || dataAt > uint64(len(m)) || deltaHeader+16*count+4 > dataAt {
		return corruptDelta(path, "its header is not that of a delta")
	}
	sum := m[deltaHeader+16*count : dataAt]
	if crc32.Checksum(m[:deltaHeader+16*count], castagnoli) != binary.LittleEndian.Uint32(sum) {
		return corruptDelta(path, "the checksum of its index does not match")
	}
	if dataAt != uint64(dataOffset(int(count))) || len(bytes.Trim(sum[4:], "\x00")) > 0 {
		return corruptDelta(path, "its pages do not begin where its index ends")
	}
	d.Size = int64(binary.LittleEndian.Uint64(m[8:]))
	if d.Size <= 0 || d.Size%PageSize != 0 {
		return corruptDelta(path, "no machine has %d bytes of RAM", d.Size)
	}
	d.data = m[dataAt:]
	d.Extents = make([]Extent, count)
	end := int64(0)
	for i := range d.Extents {
		at := deltaHeader + 16*i
		e := Extent{int64(binary.LittleEndian.Uint64(m[at:])), int64(binary.LittleEndian.Uint64(m[at+8:]))}
		if e.Offset < end || e.Length <= 0 || e.Length > d.Size-e.Offset || e.Offset%PageSize != 0 || e.Length%PageSize != 0 {
			return corruptDelta(path, "extent %d is out of order or out of range", i)
		}
		d.Extents[i], end = e, e.End()
	}
	if TotalBytes(d.Extents) != int64(len(d.data)) {
		return corruptDelta(path, "it holds %d bytes of pages instead of %d", len(d.data), TotalBytes(d.Extents))
	}
	return nil
}

func corruptDelta(path, format string, a ...any) error {
	return core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the memory delta %s is damaged: "+format, append([]any{path}, a...)...)
}

// Inject writes the pages into a machine that has not run yet.
func (d *Delta) Inject(r Region) error {
	if r.Size != d.Size {
		return core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost, "a memory delta of a machine with %d bytes of RAM does not fit one with %d", d.Size, r.Size)
	}
	return write(r, d.Extents, d.data)
}

// Each calls fn with every extent and its bytes, in order, until fn fails.
func (d *Delta) Each(fn func(e Extent, data []byte) error) error {
	var at int64
	for _, e := range d.Extents {
		if err := fn(e, d.data[at:at+e.Length]); err != nil {
			return err
		}
		at += e.Length
	}
	return nil
}

// Close unmaps the file. Idempotent; the delta must not be used afterwards.
func (d *Delta) Close() {
	if d.mapping != nil {
		_ = unix.Munmap(d.mapping)
		d.mapping, d.data = nil, nil
	}
}
