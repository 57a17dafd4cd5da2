package main

import (
	"errors"
	"os"

	"golang.org/x/sys/unix"
)

const (
	pageSize  = 4096
	lowRAMEnd = 3 << 30 // where the hole for devices begins
	highRAM   = 4 << 30 // where it ends
)

type memoryRange struct {
	GPA    uint64 `json:"gpa"`
	Length uint64 `json:"length"`
}

// mapping is one part of RAM.
type mapping struct {
	memoryRange
	mem []byte
}

// memory is the VM's RAM.
type memory struct {
	maps []mapping // ascending
}

func (m *memory) close() {
	for _, r := range m.maps {
		_ = unix.Munmap(r.mem) // fails only for a range that was never mapped
	}
}

// newMemory maps RAM: one zone on a file, privately, around the hole.
func newMemory(c *vmConfig) (_ *memory, err error) {
	if len(c.Memory.Zones) == 0 {
		return nil, chain{"No memory zones found"}
	}
	if c.Memory.Size != 0 || len(c.Memory.Zones) > 1 {
		return nil, chain{"Memory configuration is not valid"}
	}
	z := c.Memory.Zones[0]
	if z.Size == 0 || z.Size%pageSize != 0 {
		return nil, chain{"Memory size is misaligned with default page size or its hugepage size"}
	}
	if z.Shared {
		return nil, chain{"fakech: a zone that is shared changes the base"}
	}
	f, err := os.Open(z.File)
	if err != nil {
		return nil, wrap("Failed to stat filesystem", err)
	}
	defer f.Close()
	m := &memory{}
	low := min(z.Size, lowRAMEnd)
	if err = m.add(f, 0, memoryRange{0, low}); err == nil && z.Size > low {
		err = m.add(f, low, memoryRange{highRAM, z.Size - low})
	}
	if err != nil {
		m.close()
		return nil, err
	}
	return m, nil
}

func (m *memory) add(f *os.File, offset uint64, r memoryRange) error {
	mem, err := unix.Mmap(int(f.Fd()), int64(offset), int(r.Length), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
	if err != nil {
		return wrap("Error from region creation", err)
	}
	_ = unix.Madvise(mem, unix.MADV_DONTDUMP) // a kernel without it dumps them
	m.maps = append(m.maps, mapping{r, mem})
	return nil
}

// ranges are what a snapshot would have to save: none of RAM is shared with its file.
func (m *memory) ranges() []memoryRange {
	out := []memoryRange{}
	for _, r := range m.maps {
		out = append(out, r.memoryRange)
	}
	return out
}

// fill copies saved RAM over the base. Holes are not read.
func (m *memory) fill(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return wrap("Error opening snapshot file", err)
	}
	defer f.Close()
	begin := int64(0)
	for _, r := range m.maps {
		end := begin + int64(len(r.mem))
		for at := begin; at < end; {
			data, err := unix.Seek(int(f.Fd()), at, unix.SEEK_DATA)
			if errors.Is(err, unix.ENXIO) || err == nil && data >= end { // also past the end of a file that is too short
				break
			}
			if err != nil {
				return wrap("Error reading from snapshot file", err)
			}
			hole, err := unix.Seek(int(f.Fd()), data, unix.SEEK_HOLE)
			if err != nil {
				return wrap("Error reading from snapshot file", err)
			}
			at = min(hole, end)
			if _, err := f.ReadAt(r.mem[data-begin:at-begin], data); err != nil {
				return wrap("Error reading from snapshot file", err)
			}
		}
		begin = end
	}
	return nil
}
