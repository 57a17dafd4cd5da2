// Package room accounts for the free space of a disk. A fetch reserves the bytes that it will take
// before it writes the first one. So concurrent fetches cannot count on the same space, and a floor
// of free space stays for the machines that run.
package room

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// The floor where none is configured: a share of the file system, but not more than this.
const (
	floorShare = 16
	mostFloor  = 4 << 30
)

// overhead is the space that a file system needs for its own records of n bytes.
func overhead(n int64) int64 { return n / 128 }

// Room is the space of one file system that may be taken. It is safe for concurrent use.
type Room struct {
	dir   string
	floor int64

	mu   sync.Mutex // guards what follows, and is held while the file system is asked
	left int64      // bytes that are reserved and not written yet
}

// New keeps account of the free bytes of a directory's file system. floor is the number of bytes that must stay free; 0 means a sixteenth
// of the file system, at most 4 GiB.
func New(dir string, floor int64) *Room { return &Room{dir: dir, floor: floor} }

// Reservation is space that its owner alone may write. The methods of nil do nothing. It is safe for concurrent use.
type Reservation struct {
	room *Room
	left int64 // guarded by the room's mu
}

// ShortError says that there is not enough space.
type ShortError struct {
	Need, Free int64 // bytes
}

// Error implements error.
func (e *ShortError) Error() string {
	return fmt.Sprintf("it needs %d MiB of disk, and %d MiB may be taken", (e.Need+1<<20-1)>>20, e.Free>>20)
}

// Unwrap gives the error a code.
func (e *ShortError) Unwrap() error {
	return core.Errorf(core.Exhausted, core.CodeDiskFull, "%s", e.Error())
}

// Free is how many bytes can be reserved now; 0 at the floor or below.
func (r *Room) Free() (int64, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	free, err := r.free()
	return max(free, 0), err
}

// free may be negative. The caller holds mu.
func (r *Room) free() (int64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(r.dir, &fs); err != nil {
		return 0, fmt.Errorf("ask for the free space of %s: %w", r.dir, err)
	}
	size := int64(fs.Blocks) * fs.Bsize
	avail := int64(fs.Bavail) * fs.Bsize
	floor := r.floor
	if floor == 0 {
		floor = min(size/floorShare, mostFloor)
	}
	return avail - floor - r.left, nil
}

// Reserve takes n bytes, or none and returns a *ShortError.
func (r *Room) Reserve(n int64) (*Reservation, error) {
	if n < 0 {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "%d bytes of disk cannot be reserved", n)
	}
	n += overhead(n)
	r.mu.Lock()
	defer r.mu.Unlock()
	free, err := r.free()
	if err != nil {
		return nil, err
	}
	if n > free {
		return nil, &ShortError{Need: n, Free: max(free, 0)}
	}
	r.left += n
	return &Reservation{room: r, left: n}, nil
}

// Hold takes n bytes that were promised before, by an earlier process, whether they are free or not.
func (r *Room) Hold(n int64) *Reservation {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.left += n
	return &Reservation{room: r, left: n}
}

// Wrote notes that n of the bytes are written: the file system counts them from now on.
func (v *Reservation) Wrote(n int64) {
	if v == nil {
		return
	}
	v.room.mu.Lock()
	defer v.room.mu.Unlock()
	v.set(v.left - n)
}

// Left says how many bytes are still to be written.
func (v *Reservation) Left(n int64) {
	if v == nil {
		return
	}
	v.room.mu.Lock()
	defer v.room.mu.Unlock()
	v.set(n)
}

// Bytes is how many bytes are reserved and not written.
func (v *Reservation) Bytes() int64 {
	if v == nil {
		return 0
	}
	v.room.mu.Lock()
	defer v.room.mu.Unlock()
	return v.left
}

// set changes what is left. The caller holds the room's mu.
func (v *Reservation) set(n int64) {
	n = max(n, 0)
	v.room.left += n - v.left
	v.left = n
}

// Split moves n of the bytes, or as many as there are, into a reservation of their own.
func (v *Reservation) Split(n int64) *Reservation {
	if v == nil {
		return nil
	}
	v.room.mu.Lock()
	defer v.room.mu.Unlock()
	n = min(n+overhead(n), v.left)
	v.left -= n
	return &Reservation{room: v.room, left: n}
}

// Release gives back the bytes that were not written.
func (v *Reservation) Release() { v.Left(0) }
