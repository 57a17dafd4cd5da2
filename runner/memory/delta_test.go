package memory

import (
	"bytes"
	"encoding/binary"
	"errors"
	"flag"
	"fmt"
	"hash/crc32"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
)

var long = flag.Bool("long", false, "damage every byte in every way, and not in one of them")

// newDelta makes a delta with pages that tell their place.
func newDelta(size int64, extents ...Extent) *Delta {
	d := &Delta{Size: size, Extents: extents, data: make([]byte, TotalBytes(extents))}
	for i := range d.data {
		d.data[i] = byte(i/PageSize + i)
	}
	return d
}

func sampleDelta() *Delta {
	return newDelta(64*PageSize, Extent{0, PageSize}, Extent{3 * PageSize, 2 * PageSize}, Extent{63 * PageSize, PageSize})
}

func TestDeltaRoundTrip(t *testing.T) {
	t.Parallel()
	many := make([]Extent, 3000) // an index of several pages
	for i := range many {
		many[i] = Extent{int64(2*i) * PageSize, PageSize}
	}
	for _, d := range []*Delta{
		sampleDelta(), newDelta(PageSize), newDelta(1<<40, Extent{1<<40 - PageSize, PageSize}), newDelta(6000*PageSize, many...),
	} {
		got := reopen(t, d)
		if got.Size != d.Size || !bytes.Equal(got.data, d.data) {
			t.Errorf("a delta of %d extents has other pages after its way through a file", len(d.Extents))
		}
		if len(d.Extents) > 0 {
			if diff := cmp.Diff(d.Extents, got.Extents); diff != "" {
				t.Error(diff)
			}
		}
		var each []byte
		if err := got.Each(func(_ Extent, data []byte) error { each = append(each, data...); return nil }); err != nil || !bytes.Equal(each, d.data) {
			t.Errorf("Each gives %d bytes, want %d (%v)", len(each), len(d.data), err)
		}
		got.Close()
		got.Close()
	}
}

func TestEachStops(t *testing.T) {
	t.Parallel()
	stop, calls := errors.New("stop"), 0
	err := sampleDelta().Each(func(Extent, []byte) error { calls++; return stop })
	if !errors.Is(err, stop) || calls != 1 {
		t.Errorf("got %v after %d calls", err, calls)
	}
}

func TestWriteFileLeavesNothing(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "delta")
	if err := os.WriteFile(path, []byte("of somebody else"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := sampleDelta().WriteFile(path); err == nil {
		t.Error("a file that was there was written")
	}
	if b, err := os.ReadFile(path); err != nil || string(b) != "of somebody else" {
		t.Errorf("the file has %q (%v)", b, err)
	}
	if err := sampleDelta().WriteFile(filepath.Join(path, "x")); err == nil {
		t.Error("a file was written into a file")
	}
}

// openBytes opens a file with the bytes.
func openBytes(t testing.TB, b []byte) (*Delta, error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "delta")
	if err := os.WriteFile(path, b, 0o600); err != nil {
		t.Fatal(err)
	}
	return OpenDelta(path)
}

func fileOf(t testing.TB, d *Delta) []byte {
	t.Helper()
	path := filepath.Join(t.TempDir(), "delta")
	if err := d.WriteFile(path); err != nil {
		t.Fatal(err)
	}
	b, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func wantCorrupt(t *testing.T, what string, b []byte) {
	t.Helper()
	d, err := openBytes(t, b)
	if err == nil {
		d.Close()
	}
	if core.CodeOf(err) != core.CodeCheckpointCorrupt || core.CategoryOf(err) != core.DataLoss {
		t.Errorf("%s: got %v, want CHECKPOINT_CORRUPT", what, err)
	}
}

func TestDamagedDelta(t *testing.T) {
	t.Parallel()
	good := fileOf(t, sampleDelta())
	for i := range dataOffset(3) {
		flips := []byte{0x01, 0x80, 0xff}
		if !*long { // each byte in one way, in turn
			flips = flips[i%3 : i%3+1]
		}
		for _, flip := range flips {
			b := bytes.Clone(good)
			b[i] ^= flip
			wantCorrupt(t, fmt.Sprintf("byte %d flipped by %#x", i, flip), b)
		}
	}
	for n := 0; n < len(good); n += 97 {
		wantCorrupt(t, fmt.Sprintf("cut off at %d", n), good[:n])
	}
	wantCorrupt(t, "cut off by one byte", good[:len(good)-1])
	wantCorrupt(t, "one byte too long", append(bytes.Clone(good), 0))
	wantCorrupt(t, "one page too long", append(bytes.Clone(good), make([]byte, PageSize)...))
	wantCorrupt(t, "twice", append(bytes.Clone(good), good...))
	wantCorrupt(t, "a page of zeros", make([]byte, PageSize))
	if _, err := OpenDelta(filepath.Join(t.TempDir(), "absent")); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("an absent delta: %v", err)
	}
}

// header makes a file with a right checksum around whatever is said.
func header(size, count, dataAt uint64, extents []Extent, total int) []byte {
	b := append([]byte(deltaMagic), make([]byte, 24)...)
	binary.LittleEndian.PutUint64(b[8:], size)
	binary.LittleEndian.PutUint64(b[16:], count)
	binary.LittleEndian.PutUint64(b[24:], dataAt)
	for _, e := range extents {
		b = binary.LittleEndian.AppendUint64(b, uint64(e.Offset))
		b = binary.LittleEndian.AppendUint64(b, uint64(e.Length))
	}
	b = binary.LittleEndian.AppendUint32(b, crc32.Checksum(b, castagnoli))
	return append(b, make([]byte, max(0, total-len(b)))...)
}

// TestLyingDelta has files whose checksum is right and whose index makes no sense.
func TestLyingDelta(t *testing.T) {
	t.Parallel()
	const p = PageSize
	one := []Extent{{0, p}}
	if _, err := openBytes(t, header(8*p, 1, p, one, 2*p)); err != nil {
		t.Fatalf("the file that the others differ from: %v", err)
	}
	for name, b := range map[string][]byte{
		"no RAM":                 header(0, 1, p, one, 2*p),
		"negative RAM":           header(1<<63, 0, p, nil, p),
		"RAM of half a page":     header(8*p+p/2, 1, p, one, 2*p),
		"count beyond the file":  header(8*p, 1<<60, p, one, 2*p),
		"count that overflows":   header(8*p, 1<<63, p, one, 2*p),
		"data beyond the file":   header(8*p, 1, 1<<62, one, 2*p),
		"data within the index":  header(8*p, 1, 8, one, 2*p),
		"data too late":          header(8*p, 1, 2*p, one, 3*p),
		"data between pages":     header(8*p, 1, p+16, one, 2*p+16),
		"too few pages":          header(8*p, 1, p, one, p),
		"too many pages":         header(8*p, 1, p, one, 3*p),
		"behind the end":         header(8*p, 1, p, []Extent{{8 * p, p}}, 2*p),
		"over the end":           header(8*p, 1, p, []Extent{{7 * p, 2 * p}}, 3*p),
		"negative offset":        header(8*p, 1, p, []Extent{{-p, p}}, 2*p),
		"negative length":        header(8*p, 1, p, []Extent{{p, -p}}, p),
		"empty extent":           header(8*p, 1, p, []Extent{{0, 0}}, p),
		"length that overflows":  header(8*p, 1, p, []Extent{{p, 1<<63 - p}}, 2*p),
		"offset within a page":   header(8*p, 1, p, []Extent{{100, p}}, 2*p),
		"length within a page":   header(8*p, 1, p, []Extent{{0, 100}}, p+100),
		"overlapping":            header(8*p, 2, p, []Extent{{0, 2 * p}, {p, p}}, 4*p),
		"out of order":           header(8*p, 2, p, []Extent{{2 * p, p}, {0, p}}, 3*p),
		"the same twice":         header(8*p, 2, p, []Extent{{0, p}, {0, p}}, 3*p),
		"something in the space": append(header(8*p, 1, p, one, p-1), append([]byte{1}, make([]byte, p)...)...),
	} {
		wantCorrupt(t, name, b)
	}
}

// TestDeltaCutOffWhileOpen is what a failing disk looks like: pages of a mapped file that cannot be read.
func TestDeltaCutOffWhileOpen(t *testing.T) {
	t.Parallel()
	const size = 64 * PageSize
	store := newStore(t, false)
	base := zeroBase(t, store, size)
	path := filepath.Join(t.TempDir(), "delta")
	if err := sampleDelta().WriteFile(path); err != nil {
		t.Fatal(err)
	}
	d, err := OpenDelta(path)
	if err != nil {
		t.Fatal(err)
	}
	defer d.Close()
	if err := os.Truncate(path, PageSize); err != nil {
		t.Fatal(err)
	}
	if _, err := store.Rebase(base, d); core.CodeOf(err) != core.CodeCheckpointCorrupt {
		t.Errorf("rebase: got %v, want CHECKPOINT_CORRUPT", err)
	}
	if err := d.Inject(mapPrivate(t, base.File(), size).Region); err == nil {
		t.Error("pages that are not there were injected")
	}
	if err := d.WriteFile(path + "2"); err == nil {
		t.Error("pages that are not there were written")
	}
	if _, err := os.Stat(path + "2"); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a file that could not be written is left (%v)", err)
	}
	if ids, err := store.List(); err != nil || len(ids) != 0 {
		t.Errorf("the bases are %v (%v)", ids, err)
	}
}

func TestInjectRefusesOtherSize(t *testing.T) {
	t.Parallel()
	r := mapPrivate(t, zeroBase(t, newStore(t, false), 32*PageSize).File(), 32*PageSize)
	if err := sampleDelta().Inject(r.Region); core.CodeOf(err) != core.CodeIncompatibleHost {
		t.Errorf("got %v, want INCOMPATIBLE_HOST", err)
	}
}

func TestInjectAtOnce(t *testing.T) {
	t.Parallel()
	const size = 64 * PageSize
	base := zeroBase(t, newStore(t, false), size)
	d := reopen(t, sampleDelta())
	var children [8]*ram
	for i := range children {
		children[i] = mapPrivate(t, base.File(), size)
	}
	var wg sync.WaitGroup
	for _, c := range children {
		wg.Go(func() {
			if err := d.Inject(c.Region); err != nil {
				t.Error(err)
			}
		})
	}
	wg.Wait()
	for _, c := range children[1:] {
		if !bytes.Equal(c.bytes, children[0].bytes) {
			t.Error("two children differ")
		}
	}
}

// FuzzDelta feeds files to the parser, with a checksum that is right so that it gets past it. What it accepts it must be able
// to give back.
func FuzzDelta(f *testing.F) {
	f.Add(fileOf(f, sampleDelta()))
	f.Add(fileOf(f, newDelta(PageSize)))
	f.Add(header(8*PageSize, 2, PageSize, []Extent{{0, 2 * PageSize}, {PageSize, PageSize}}, 4*PageSize))
	f.Add(header(8*PageSize, 1<<59, PageSize, nil, 2*PageSize))
	f.Add(header(1<<63, 1, 1<<63, []Extent{{-PageSize, 1 << 62}}, PageSize))
	f.Add([]byte(deltaMagic))
	f.Fuzz(func(t *testing.T, b []byte) {
		b = bytes.Clone(b)
		if len(b) >= deltaHeader {
			if end := deltaHeader + 16*binary.LittleEndian.Uint64(b[16:]); end < uint64(len(b)) && end+4 <= uint64(len(b)) {
				binary.LittleEndian.PutUint32(b[end:], crc32.Checksum(b[:end], castagnoli))
			}
		}
		d := &Delta{}
		if err := d.parse(b, "fuzz"); err != nil {
			if core.CodeOf(err) != core.CodeCheckpointCorrupt {
				t.Errorf("got %v, want CHECKPOINT_CORRUPT", err)
			}
			return
		}
		at := int64(0)
		for _, e := range d.Extents {
			if e.Offset < at || e.Length <= 0 || e.End() > d.Size || e.Offset%PageSize != 0 || e.Length%PageSize != 0 {
				t.Fatalf("the extents %v were accepted for %d bytes", d.Extents, d.Size)
			}
			at = e.End()
		}
		if TotalBytes(d.Extents) != d.Bytes() {
			t.Errorf("%d bytes of pages were accepted for extents of %d", d.Bytes(), TotalBytes(d.Extents))
		}
	})
}
