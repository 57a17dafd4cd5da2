package main

import (
	"errors"
	"io"
	"os"

	"golang.org/x/sys/unix"
)

const (
	pageSize  = 4096
	lowRAMEnd = 3 << 30 // where the hole for devices begins
	highRAM   = 4 << 30 // where it ends
)

// mapping is one stretch of RAM.
type mapping struct {
	gpa, size, fileOffset uint64
	zone                  string
	slot                  uint32
	shared                bool
	mem                   []byte
}

// memory is the VM's RAM.
type memory struct {
	maps     []*mapping // ascending
	bootRAM  uint64
	nextSlot uint32
}

func (m *memory) close() {
	for _, r := range m.maps {
		_ = unix.Munmap(r.mem) // fails only for a range that was never mapped
	}
}

// zones are those of the configuration, which may be one without a name.
func (c memoryConfig) zones() ([]zoneConfig, error) {
	switch {
	case c.Size == 0 && len(c.Zones) == 0:
		return nil, chain{"No memory zones found"}
	case c.Size != 0 && c.Zones != nil:
		return nil, chain{"Memory configuration is not valid"}
	case c.Size != 0:
		return []zoneConfig{{ID: "mem0", Size: c.Size, Shared: c.Shared, HugePages: c.HugePages}}, nil
	}
	return c.Zones, nil
}

// newMemory maps the RAM of a VM that boots: zone after zone, around the hole.
func newMemory(c memoryConfig) (_ *memory, err error) {
	zones, err := c.zones()
	if err != nil {
		return nil, err
	}
	m := &memory{}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	seen := map[string]bool{}
	gpa := uint64(0)
	for _, z := range zones {
		if z.Size%pageSize != 0 {
			return nil, chain{"Memory size is misaligned with default page size or its hugepage size"}
		}
		if seen[z.ID] {
			return nil, chain{"Memory zone identifier is not unique"}
		}
		seen[z.ID] = true
		for offset := uint64(0); offset < z.Size || z.Size == 0; {
			size := z.Size - offset
			if gpa < lowRAMEnd {
				size = min(size, lowRAMEnd-gpa)
			}
			if err := m.add(z, &mapping{gpa: gpa, size: size, fileOffset: offset}); err != nil {
				return nil, err
			}
			offset += size
			if gpa += size; gpa == lowRAMEnd {
				gpa = highRAM
			}
		}
		m.bootRAM += z.Size
	}
	m.number()
	return m, nil
}

// restoreMemory maps the RAM of a snapshot. A mapping of a zone that the configuration does not have is left out without a word.
func restoreMemory(c memoryConfig, s memoryState) (_ *memory, err error) {
	zones, err := c.zones()
	if err != nil {
		return nil, err
	}
	m := &memory{bootRAM: s.BootRAM, nextSlot: s.NextMemorySlot}
	defer func() {
		if err != nil {
			m.close()
		}
	}()
	for _, g := range s.GuestRAMMappings {
		for _, z := range zones {
			if z.ID != g.ZoneID {
				continue
			}
			if err := m.add(z, &mapping{gpa: g.GPA, size: g.Size, fileOffset: g.FileOffset}); err != nil {
				return nil, err
			}
		}
	}
	if len(m.maps) == 0 {
		return nil, chain{"Guest region collection error", "No memory region found"}
	}
	m.number()
	return m, nil
}

// number gives each mapping the next slot: the numbers grow from one generation to the next.
func (m *memory) number() {
	for _, r := range m.maps {
		r.slot = m.nextSlot
		m.nextSlot++
	}
}

func (m *memory) add(z zoneConfig, r *mapping) error {
	r.zone, r.shared = z.ID, z.Shared
	fd, flags := -1, unix.MAP_PRIVATE
	if z.Shared {
		flags = unix.MAP_SHARED
	}
	switch {
	case z.File != nil:
		info, err := os.Stat(*z.File)
		if err != nil {
			return wrap("Failed to stat filesystem", err)
		}
		if info.IsDir() {
			return chain{"Using a directory as a backing file for memory is not supported"}
		}
		mode := os.O_RDONLY
		if z.Shared {
			mode = os.O_RDWR
		}
		f, err := os.OpenFile(*z.File, mode, 0)
		if err != nil {
			return wrap("Failed to create shared file", err)
		}
		defer f.Close()
		fd = int(f.Fd())
	case z.HugePages:
		return chain{"fakech: it has no huge pages"}
	default:
		flags |= unix.MAP_ANONYMOUS
	}
	mem, err := unix.Mmap(fd, int64(r.fileOffset), int(r.size), unix.PROT_READ|unix.PROT_WRITE, flags|unix.MAP_NORESERVE)
	if err != nil {
		return wrap("Error from region creation", err)
	}
	_ = unix.Madvise(mem, unix.MADV_DONTDUMP) // a kernel without it dumps them
	r.mem = mem
	m.maps = append(m.maps, r)
	return nil
}

// ranges are what a snapshot has to save: all but what is shared with a file.
func (m *memory) ranges(c memoryConfig) []memoryRange {
	backed := map[string]bool{}
	for _, z := range c.Zones {
		backed[z.ID] = z.File != nil
	}
	out := []memoryRange{}
	for _, r := range m.maps {
		if !r.shared || !backed[r.zone] {
			out = append(out, memoryRange{r.gpa, r.size})
		}
	}
	return out
}

func (m *memory) at(gpa uint64) []byte {
	for _, r := range m.maps {
		if gpa >= r.gpa && gpa < r.gpa+r.size {
			return r.mem[gpa-r.gpa:]
		}
	}
	return nil
}

// fill copies the saved ranges over RAM. No file is opened when there are none, and holes are not read.
func (m *memory) fill(path string, ranges []memoryRange) error {
	if len(ranges) == 0 {
		return nil
	}
	f, err := os.Open(path)
	if err != nil {
		return wrap("Error opening snapshot file", err)
	}
	defer f.Close()
	cursor := int64(0)
	for _, r := range ranges {
		end := cursor + int64(r.Length)
		for at := cursor; at < end; {
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
			hole = min(hole, end)
			to := m.at(r.GPA + uint64(data-cursor))
			if int64(len(to)) < hole-data {
				return chain{"Error copying snapshot into region", "fakech: the range is not in RAM"}
			}
			if _, err := f.ReadAt(to[:hole-data], data); err != nil {
				return wrap("Error reading from snapshot file", err)
			}
			at = hole
		}
		cursor = end
	}
	return nil
}

// save writes the ranges one after the other.
func (m *memory) save(f *os.File, ranges []memoryRange) error {
	total := int64(0)
	for _, r := range ranges {
		total += int64(r.Length)
	}
	_ = f.Truncate(total) // a file system that cannot gets it written anyway
	cursor := int64(0)
	for _, r := range ranges {
		if _, err := f.Seek(cursor, io.SeekStart); err != nil {
			return wrap("Error seeking memory snapshot file", err)
		}
		if _, err := f.Write(m.at(r.GPA)[:r.Length]); err != nil {
			return wrap("Error writing dense memory snapshot region", err)
		}
		cursor += int64(r.Length)
	}
	return nil
}
