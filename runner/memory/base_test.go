package memory

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
)

// pages is the content of RAM with the pages filled as told, the others zero.
func pages(size int64, fill map[int]byte) []byte {
	b := make([]byte, size)
	for p, v := range fill {
		for i := range PageSize {
			b[p*PageSize+i] = v
		}
	}
	return b
}

func deltaOf(size int64, from []byte, list ...Extent) *Delta {
	d := &Delta{Size: size, Extents: list}
	for _, e := range list {
		d.data = append(d.data, from[e.Offset:e.End()]...)
	}
	return d
}

func TestRebaseHoles(t *testing.T) {
	t.Parallel()
	const size = 256 * PageSize
	store := newStore(t, false)
	first := pages(size, map[int]byte{1: 1, 2: 2, 100: 3, 255: 4})
	// The delta of a cold boot holds zeros too: pages that were written and cleared.
	base := rebase(t, store, zeroBase(t, store, size), deltaOf(size, first, Extent{0, 8 * PageSize}, Extent{90 * PageSize, 20 * PageSize}, Extent{255 * PageSize, PageSize}))
	wantBase(t, store, base, first, 4)

	// Zeros over a hole, zeros over data, data over a hole, data over data.
	second := pages(size, map[int]byte{2: 9, 50: 5, 100: 3, 255: 4})
	next := rebase(t, store, base, deltaOf(size, second, Extent{0, 4 * PageSize}, Extent{50 * PageSize, 2 * PageSize}))
	wantBase(t, store, next, second, 4)
	wantBase(t, store, base, first, 4)
}

func wantBase(t *testing.T, s *BaseStore, b *Base, want []byte, pages int64) {
	t.Helper()
	if !bytes.Equal(content(t, b), want) {
		t.Error("the base has other bytes")
	}
	// A file system may give a little more than what holds data.
	n, err := s.AllocatedBytes(b.ID)
	if err != nil {
		t.Fatal(err)
	}
	if n > (pages+4)*PageSize {
		t.Errorf("the base takes %d bytes, want %d pages", n, pages)
	}
	info, err := os.Stat(s.path(b.ID))
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o444 || info.Size() != b.Size {
		t.Errorf("the file is %v with %d bytes", info.Mode(), info.Size())
	}
}

func TestStoreSurvives(t *testing.T) {
	t.Parallel()
	const size = 16 * PageSize
	store := newStore(t, false)
	want := pages(size, map[int]byte{3: 7})
	base := rebase(t, store, zeroBase(t, store, size), deltaOf(size, want, Extent{3 * PageSize, PageSize}))
	part := filepath.Join(store.dir, string(core.NewID[core.BaseID]())+".ram.part")
	stranger := filepath.Join(store.dir, "stranger.ram")
	for _, p := range []string{part, stranger} {
		if err := os.WriteFile(p, []byte("half"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	again, err := NewBaseStore(store.dir, true)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(part); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("what a dead process left is still there (%v)", err)
	}
	ids, err := again.List()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]core.BaseID{base.ID}, ids); diff != "" {
		t.Error(diff)
	}
	b, err := again.Open(base.ID)
	if err != nil {
		t.Fatal(err)
	}
	defer closeBase(t, b)
	if !bytes.Equal(content(t, b), want) {
		t.Error("the base has other bytes after a restart")
	}
}

func TestAbsentBase(t *testing.T) {
	t.Parallel()
	store := newStore(t, false)
	id := core.NewID[core.BaseID]()
	for range 2 {
		if _, err := store.Open(id); core.CodeOf(err) != core.CodeCheckpointCorrupt {
			t.Errorf("got %v, want CHECKPOINT_CORRUPT", err)
		}
	}
	if len(store.open) != 0 {
		t.Error("the store remembers a base that is not there")
	}
	if err := store.Remove(id); err != nil {
		t.Errorf("the removal of an absent base: %v", err)
	}
	if _, err := store.AllocatedBytes(id); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("the size of an absent base: %v", err)
	}
}

// TestRemovedInUse removes a base that is open: its users do not notice.
func TestRemovedInUse(t *testing.T) {
	t.Parallel()
	for _, frozen := range []bool{false, true} {
		const size = 16 * PageSize
		store := newStore(t, frozen)
		want := pages(size, map[int]byte{3: 7})
		base := rebase(t, store, zeroBase(t, store, size), deltaOf(size, want, Extent{3 * PageSize, PageSize}))
		if err := store.Remove(base.ID); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(content(t, base), want) {
			t.Errorf("frozen=%v: the removed base has other bytes", frozen)
		}
		more := pages(size, map[int]byte{3: 7, 5: 1})
		next := rebase(t, store, base, deltaOf(size, more, Extent{5 * PageSize, PageSize}))
		if !bytes.Equal(content(t, next), more) {
			t.Errorf("frozen=%v: a base made of a removed one has other bytes", frozen)
		}
	}
}

func TestRebaseRefusesOtherSize(t *testing.T) {
	t.Parallel()
	store := newStore(t, false)
	if _, err := store.Rebase(zeroBase(t, store, 2*PageSize), newDelta(4*PageSize)); err == nil {
		t.Error("a delta was rebased onto a base of another size")
	}
	if entries, err := os.ReadDir(store.dir); err != nil || len(entries) != 0 {
		t.Errorf("%v are left (%v)", entries, err)
	}
}

// TestImmutable tries to write a base in every way that a VMM with its descriptor has.
func TestImmutable(t *testing.T) {
	t.Parallel()
	const size = 16 * PageSize
	for _, frozen := range []bool{false, true} {
		store := newStore(t, frozen)
		want := pages(size, map[int]byte{3: 7})
		base := rebase(t, store, zeroBase(t, store, size), deltaOf(size, want, Extent{3 * PageSize, PageSize}))
		for name, b := range map[string]*Base{"zero": zeroBase(t, store, size), "base": base} {
			f := b.File()
			if frozen {
				// QEMU before 8.2 opens it for writing: that works, and nothing else does.
				var err error
				if f, err = os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", b.File().Fd()), os.O_RDWR, 0); err != nil {
					t.Errorf("%s, frozen=%v: %v", name, frozen, err)
					continue
				}
				defer f.Close()
			}
			if _, err := f.WriteAt([]byte{1}, 0); err == nil {
				t.Errorf("%s, frozen=%v: it was written", name, frozen)
			}
			if err := f.Truncate(PageSize); err == nil {
				t.Errorf("%s, frozen=%v: it was cut off", name, frozen)
			}
			if err := f.Truncate(2 * size); err == nil {
				t.Errorf("%s, frozen=%v: it was made longer", name, frozen)
			}
			if m, err := unix.Mmap(int(f.Fd()), 0, size, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED); err == nil {
				t.Errorf("%s, frozen=%v: it was mapped for writing", name, frozen)
				_ = unix.Munmap(m)
			}
			if err := unix.Fallocate(int(f.Fd()), unix.FALLOC_FL_PUNCH_HOLE|unix.FALLOC_FL_KEEP_SIZE, 0, size); err == nil {
				t.Errorf("%s, frozen=%v: a hole was made in it", name, frozen)
			}
			r := mapPrivate(t, f, size)
			r.bytes[0] = 1
		}
		if !bytes.Equal(content(t, base), want) {
			t.Errorf("frozen=%v: the base has changed", frozen)
		}
	}
}

// TestAtOnce opens, closes, rebases and removes from several goroutines.
func TestAtOnce(t *testing.T) {
	t.Parallel()
	for _, frozen := range []bool{false, true} {
		const size = 64 * PageSize
		store := newStore(t, frozen)
		zero := zeroBase(t, store, size)
		var ids []core.BaseID
		for i := range 4 {
			want := pages(size, map[int]byte{i: byte(i + 1)})
			b, err := store.Rebase(zero, deltaOf(size, want, Extent{0, 4 * PageSize}))
			if err != nil {
				t.Fatal(err)
			}
			ids = append(ids, b.ID)
			closeBase(t, b)
		}
		var wg sync.WaitGroup
		for g := range 8 {
			wg.Go(func() {
				for n := range 60 {
					i := (g + n) % len(ids)
					if err := useBase(store, ids[i], i); err != nil {
						t.Error(err)
					}
				}
			})
		}
		removed := slices.Clone(ids[3:])
		wg.Go(func() {
			for _, id := range removed {
				if err := store.Remove(id); err != nil {
					t.Error(err)
				}
			}
		})
		wg.Wait()
		if len(store.open) != 0 {
			t.Errorf("frozen=%v: %d bases are open", frozen, len(store.open))
		}
		if n := descriptors(t, store.dir); n != 1 && !frozen { // other tests have memfds at the same time
			t.Errorf("%d descriptors are open, want that of the zero base", n)
		}
	}
}

// useBase opens a base and looks at it. One that was removed meanwhile is no error.
func useBase(s *BaseStore, id core.BaseID, i int) error {
	b, err := s.Open(id)
	if core.CodeOf(err) == core.CodeCheckpointCorrupt && i == 3 {
		return nil
	}
	if err != nil {
		return err
	}
	var got [1]byte
	_, err = b.File().ReadAt(got[:], int64(i)*PageSize)
	if err == nil && got[0] != byte(i+1) {
		err = fmt.Errorf("base %d begins with %d", i, got[0])
	}
	return errors.Join(err, b.Close())
}
