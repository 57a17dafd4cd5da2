package room_test

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/room"
)

// volume mounts a file system of a size.
func volume(t *testing.T, size string) string {
	t.Helper()
	require.Root(t)
	dir := t.TempDir()
	if err := unix.Mount("tmpfs", dir, "tmpfs", 0, "size="+size); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return dir
}

// TestRace has many reserve and write at once on a volume that has room for some of them. Nobody who was promised space finds the disk
// full, and the floor is free at every moment.
func TestRace(t *testing.T) {
	t.Parallel()
	const floor, each, many = 16 << 20, 8 << 20, 32
	dir := volume(t, "64m")
	r := room.New(dir, floor)
	var wg sync.WaitGroup
	var mu sync.Mutex
	var wrote, refused int
	for i := range many {
		wg.Go(func() {
			v, err := r.Reserve(each)
			if short, ok := errors.AsType[*room.ShortError](err); ok {
				if core.CodeOf(err) != core.CodeDiskFull || short.Need < each {
					t.Errorf("refused with %v", err)
				}
				mu.Lock()
				refused++
				mu.Unlock()
				return
			}
			if err != nil {
				t.Error(err)
				return
			}
			defer v.Release()
			f, err := os.Create(filepath.Join(dir, string(rune('a'+i))))
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			for range each >> 20 {
				if _, err := f.Write(bytes.Repeat([]byte{1}, 1<<20)); err != nil {
					t.Errorf("what was promised could not be written: %v", err)
				}
				v.Wrote(1 << 20)
				var fs unix.Statfs_t
				if err := unix.Statfs(dir, &fs); err != nil || int64(fs.Bavail)*fs.Bsize < floor {
					t.Errorf("%d bytes are free, and %d must be: %v", int64(fs.Bavail)*fs.Bsize, floor, err)
				}
			}
			mu.Lock()
			wrote++
			mu.Unlock()
		})
	}
	wg.Wait()
	if wrote != 5 || refused != many-5 { // 48 MiB, less what the file system needs itself
		t.Errorf("%d were written and %d refused", wrote, refused)
	}
}

// TestAccount follows one reservation through all that can happen to it.
func TestAccount(t *testing.T) {
	t.Parallel()
	r := room.New(volume(t, "64m"), 1<<20)
	all, err := r.Free()
	if err != nil {
		t.Fatal(err)
	}
	want := func(what string, reserved int64) {
		t.Helper()
		if free, err := r.Free(); err != nil || free != all-reserved {
			t.Errorf("%s: %d bytes are reserved, want %d: %v", what, all-free, reserved, err)
		}
	}
	v, err := r.Reserve(128 << 10)
	if err != nil {
		t.Fatal(err)
	}
	const n = 128<<10 + 1<<10
	want("reserved", n)
	part := v.Split(64 << 10)
	want("split", n)
	v.Wrote(1 << 10)
	want("written", n-1<<10)
	v.Wrote(1 << 30)
	want("written more than was reserved", 64<<10+512)
	part.Left(4096)
	want("4096 bytes left", 4096)
	part.Release()
	part.Release()
	v.Release()
	want("released", 0)
	old := r.Hold(1 << 40)
	if free, err := r.Free(); free != 0 || err != nil {
		t.Errorf("with more promised than there is, %d bytes are free: %v", free, err)
	}
	if _, err := r.Reserve(1); core.CodeOf(err) != core.CodeDiskFull {
		t.Errorf("one byte more: %v", err)
	}
	old.Release()
	want("the old one released", 0)
	var none *room.Reservation
	none.Wrote(1)
	none.Split(1).Release()
}

// TestFloorOfNothingConfigured: a sixteenth of the file system stays free, on a large one not more than 4 GiB. tmpfs takes no memory for what
// nobody writes.
func TestFloorOfNothingConfigured(t *testing.T) {
	t.Parallel()
	const gib = int64(1 << 30)
	for _, tc := range []struct {
		size  string
		floor int64
	}{{"32g", 2 * gib}, {"48g", 3 * gib}, {"64g", 4 * gib}, {"80g", 4 * gib}, {"2048g", 4 * gib}} {
		dir := volume(t, tc.size)
		var fs unix.Statfs_t
		if err := unix.Statfs(dir, &fs); err != nil {
			t.Fatal(err)
		}
		r := room.New(dir, 0)
		free, err := r.Free()
		if want := int64(fs.Bavail)*fs.Bsize - tc.floor; err != nil || free != want {
			t.Errorf("of %s, %d bytes may be taken, want %d: %v", tc.size, free, want, err)
		}
		all, err := r.Reserve(free - free/128) // the rest is what the file system needs for its own records
		if err != nil {
			t.Errorf("of %s, what is above the floor cannot be reserved: %v", tc.size, err)
		}
		if _, err := r.Reserve(free / 128); core.CodeOf(err) != core.CodeDiskFull {
			t.Errorf("of %s, the floor was given away: %v", tc.size, err)
		}
		all.Release()
		if again, err := r.Free(); again != free || err != nil {
			t.Errorf("of %s, %d bytes may be taken afterwards, and it was %d: %v", tc.size, again, free, err)
		}
	}
}
