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

// mapping is one stretch of RAM, as a snapshot has it.
type mapping struct {
	Slot       int    `json:"slot"`
	GPA        uint64 `json:"gpa"`
	Size       uint64 `json:"size"`
	ZoneID     string `json:"zone_id"`
	VirtioMem  bool   `json:"virtio_mem"`
	FileOffset uint64 `json:"file_offset"`
	mem        []byte
}

// memory is the VM's RAM, ascending.
type memory []mapping

func (m memory) close() {
	for _, r := range m {
		_ = unix.Munmap(r.mem) // fails only for a range that was never mapped
	}
}

// mapRAM maps a zone privately, below the hole and above it.
func mapRAM(z zoneConfig) (m memory, err error) {
	f, err := os.Open(z.File)
	if err != nil {
		return nil, wrap("Failed to stat filesystem", err)
	}
	defer f.Close()
	for offset := uint64(0); offset < z.Size; {
		r := mapping{Slot: len(m), GPA: offset, Size: z.Size - offset, ZoneID: z.ID, FileOffset: offset}
		if offset < lowRAMEnd {
			r.Size = min(r.Size, lowRAMEnd-offset)
		} else {
			r.GPA += highRAM - lowRAMEnd
		}
		r.mem, err = unix.Mmap(int(f.Fd()), int64(offset), int(r.Size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_NORESERVE)
		if err != nil {
			m.close()
			return nil, wrap("Error from region creation", err)
		}
		_ = unix.Madvise(r.mem, unix.MADV_DONTDUMP) // a kernel without it dumps them
		m, offset = append(m, r), offset+r.Size
	}
	return m, nil
}

type memoryRange struct {
	GPA    uint64 `json:"gpa"`
	Length uint64 `json:"length"`
}

// memoryState is what of a snapshot's memory-manager is read again.
type memoryState struct {
	Ranges struct {
		Data []memoryRange `json:"data"`
	} `json:"memory_ranges"`
	Mappings memory `json:"guest_ram_mappings"`
}

// fits looks whether RAM is that of a snapshot.
func (m memory) fits(s memoryState) error {
	if len(s.Mappings) == 0 || s.Mappings[0].ZoneID != m[0].ZoneID {
		return chain{"Guest region collection error", "No memory region found"}
	}
	for i, r := range s.Mappings {
		if i >= len(m) || r.GPA != m[i].GPA || r.Size != m[i].Size {
			return chain{"fakech: RAM has another size than in the snapshot"}
		}
	}
	return nil
}

func (m memory) at(gpa uint64) []byte {
	for _, r := range m {
		if gpa >= r.GPA && gpa < r.GPA+r.Size {
			return r.mem[gpa-r.GPA:]
		}
	}
	return nil
}

// fill copies the saved ranges over RAM. No file is opened when there are none, and holes are not read.
func (m memory) fill(path string, ranges []memoryRange) error {
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
			at = min(hole, end)
			to := m.at(r.GPA + uint64(data-cursor))
			if int64(len(to)) < at-data {
				return chain{"Error copying snapshot into region", "fakech: the range is not in RAM"}
			}
			if _, err := f.ReadAt(to[:at-data], data); err != nil {
				return wrap("Error reading from snapshot file", err)
			}
		}
		cursor = end
	}
	return nil
}
