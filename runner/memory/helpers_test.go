package memory

import (
	"bytes"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"unsafe"

	"golang.org/x/sys/unix"
)

// ram is a machine's RAM as a VMM has it: a private mapping, here in this process.
type ram struct {
	bytes []byte
	Region
}

// mapPrivate maps a base as a VMM does.
func mapPrivate(t testing.TB, f *os.File, size int64) *ram {
	t.Helper()
	b, err := unix.Mmap(int(f.Fd()), 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE)
	if err != nil {
		t.Fatal(err)
	}
	r := &ram{b, OnePart(os.Getpid(), uint64(uintptr(unsafe.Pointer(unsafe.SliceData(b)))), size)}
	t.Cleanup(func() { r.unmap(t) })
	return r
}

func (r *ram) unmap(t testing.TB) {
	t.Helper()
	if r.bytes == nil {
		return
	}
	if err := unix.Munmap(r.bytes); err != nil {
		t.Error(err)
	}
	r.bytes = nil
}

// model is what the RAM must hold and which pages must be private.
type model struct {
	bytes   []byte
	private []bool
}

func newModel(base []byte) *model {
	return &model{bytes.Clone(base), make([]bool, len(base)/PageSize)}
}

func (m *model) write(off int, b []byte) {
	copy(m.bytes[off:], b)
	for p := off / PageSize; p <= (off+len(b)-1)/PageSize; p++ {
		m.private[p] = true
	}
}

func (m *model) extents() []Extent {
	var out []Extent
	for p, private := range m.private {
		off := int64(p) * PageSize
		switch n := len(out); {
		case !private:
		case n > 0 && out[n-1].End() == off:
			out[n-1].Length += PageSize
		default:
			out = append(out, Extent{off, PageSize})
		}
	}
	return out
}

// newRand returns a generator whose seed the log has. MEMORY_TEST_SEED repeats a run.
func newRand(t testing.TB) *rand.Rand {
	t.Helper()
	seed := rand.Uint64()
	if s := os.Getenv("MEMORY_TEST_SEED"); s != "" {
		var err error
		if seed, err = strconv.ParseUint(s, 10, 64); err != nil {
			t.Fatal(err)
		}
	}
	t.Logf("MEMORY_TEST_SEED=%d", seed)
	return rand.New(rand.NewPCG(seed, 0))
}

// randomWrites writes to RAM and model alike: runs of bytes, some of them zeros, and reads in between, which make no page
// private.
func randomWrites(rng *rand.Rand, r *ram, m *model, n int) {
	var sink byte
	for range n {
		length := 1 + rng.IntN(3*PageSize)
		off := rng.IntN(len(r.bytes) - length)
		if rng.IntN(4) == 0 {
			sink ^= r.bytes[off]
			continue
		}
		b := make([]byte, length)
		if rng.IntN(3) > 0 {
			for i := range b {
				b[i] = byte(rng.Uint32())
			}
		}
		copy(r.bytes[off:], b)
		m.write(off, b)
	}
	_ = sink
}

// newStore opens a store in a directory of the test.
func newStore(t testing.TB, frozen bool) *BaseStore {
	t.Helper()
	s, err := NewBaseStore(filepath.Join(t.TempDir(), "bases"), frozen)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

func zeroBase(t testing.TB, s *BaseStore, size int64) *Base {
	t.Helper()
	b, err := s.Zero(size)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBase(t, b) })
	return b
}

func closeBase(t testing.TB, b *Base) {
	t.Helper()
	if err := b.Close(); err != nil {
		t.Error(err)
	}
}

// capture captures RAM into a delta that was written to a file and opened again.
func capture(t testing.TB, r Region) *Delta {
	t.Helper()
	c, err := Prepare(r)
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if err := c.Copy(); err != nil {
		t.Fatal(err)
	}
	return reopen(t, c.Delta())
}

func reopen(t testing.TB, d *Delta) *Delta {
	t.Helper()
	path := filepath.Join(t.TempDir(), "delta")
	if err := d.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	out, err := OpenDelta(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(out.Close)
	return out
}

func rebase(t testing.TB, s *BaseStore, b *Base, d *Delta) *Base {
	t.Helper()
	out, err := s.Rebase(b, d)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { closeBase(t, out) })
	return out
}

// content reads what a VMM that maps the base finds there.
func content(t testing.TB, b *Base) []byte {
	t.Helper()
	out := make([]byte, b.Size)
	if _, err := b.File().ReadAt(out, 0); err != nil {
		t.Fatal(err)
	}
	return out
}

// descriptors counts the open files of this process that are memfds or below dir.
func descriptors(t testing.TB, dir string) int {
	t.Helper()
	links, err := filepath.Glob("/proc/self/fd/*")
	if err != nil {
		t.Fatal(err)
	}
	n := 0
	for _, l := range links {
		to, err := os.Readlink(l)
		if err == nil && (bytes.HasPrefix([]byte(to), []byte("/memfd:base_")) || bytes.HasPrefix([]byte(to), []byte(dir))) {
			n++
		}
	}
	return n
}
