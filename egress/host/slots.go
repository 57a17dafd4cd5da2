package host

import (
	"encoding/binary"
	"errors"
	"os"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// slots are counters in a file, so that counts outlive this process, however it ends. Each slot has a count and the
// time of its last change.
type slots struct {
	file *os.File
	used map[int]bool
	next int // where the search for a free slot begins
}

const (
	slotsName = "counts"
	slotSize  = 16
	maxSlots  = 64 << 10
)

func openSlots(dir *os.Root) (slots, error) {
	f, err := dir.OpenFile(slotsName, os.O_RDWR|os.O_CREATE, 0o600)
	return slots{file: f, used: map[int]bool{}}, err
}

// take returns a free slot. Slot numbers begin with 1.
func (s *slots) take() (int, error) {
	if len(s.used) >= maxSlots {
		return 0, core.Errorf(core.Exhausted, core.CodeDiskFull, "all %d counters for denied flows of this host's sandboxes are in use", maxSlots)
	}
	for {
		if s.next = s.next%maxSlots + 1; !s.used[s.next] {
			s.used[s.next] = true
			return s.next, nil
		}
	}
}

func (s *slots) give(slot int) { delete(s.used, slot) }

func (s *slots) write(slot int, count int64, last time.Time) error {
	var b [slotSize]byte
	binary.LittleEndian.PutUint64(b[:8], uint64(count)) //nolint:gosec // G115: read back as it is
	binary.LittleEndian.PutUint64(b[8:], uint64(last.UnixNano()))
	_, err := s.file.WriteAt(b[:], int64(slot)*slotSize)
	return err
}

// read returns the count and its time. An unreadable slot counts as one, without a time.
func (s *slots) read(slot int) (count int64, last time.Time) {
	var b [slotSize]byte
	if _, err := s.file.ReadAt(b[:], int64(slot)*slotSize); err != nil || slot <= 0 || slot > maxSlots {
		return 1, time.Time{}
	}
	count = int64(binary.LittleEndian.Uint64(b[:8]))                    //nolint:gosec // G115: as it was written
	last = time.Unix(0, int64(binary.LittleEndian.Uint64(b[8:]))).UTC() //nolint:gosec // G115: as it was written
	return max(count, 1), last
}

func (s *slots) close() error {
	if s.file == nil {
		return nil
	}
	return errors.Join(s.file.Close())
}
