package memory

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"testing"
)

// TestDeltaFile: a delta that is written page by page reads as one that was written at once.
func TestDeltaFile(t *testing.T) {
	t.Parallel()
	path := filepath.Join(t.TempDir(), "delta")
	extents := []Extent{{8 * PageSize, 2 * PageSize}, {0, PageSize}, {PageSize, PageSize}}
	d, err := CreateDelta(path, 64*PageSize, extents)
	if err != nil {
		t.Fatal(err)
	}
	page := func(b byte) []byte { return bytes.Repeat([]byte{b}, PageSize) }
	if err := errors.Join(d.WriteAt(page(9), 9*PageSize), d.WriteAt(append(page(1), page(2)...), 0)); err != nil {
		t.Fatal(err)
	}
	for _, off := range []int64{2 * PageSize, 10 * PageSize, 7 * PageSize} {
		if err := d.WriteAt(page(1), off); err == nil {
			t.Errorf("a page at %d was taken", off)
		}
	}
	if err := d.WriteAt(append(page(1), page(2)...), 9*PageSize); err == nil {
		t.Error("a page beyond an extent was taken")
	}
	if d.Bytes() != 4*PageSize {
		t.Errorf("%d bytes", d.Bytes())
	}
	if err := d.Finish(); err != nil {
		t.Fatal(err)
	}
	got, err := OpenDelta(path)
	if err != nil {
		t.Fatal(err)
	}
	defer got.Close()
	var all []byte
	if err := got.Each(func(_ Extent, b []byte) error { all = append(all, b...); return nil }); err != nil {
		t.Fatal(err)
	}
	want := bytes.Join([][]byte{page(1), page(2), page(0), page(9)}, nil)
	if !bytes.Equal(all, want) || got.Size != 64*PageSize || len(got.Extents) != 2 {
		t.Errorf("%d bytes of %v for %d", len(all), got.Extents, got.Size)
	}
}

// TestImport: a base of given bytes, or nothing.
func TestImport(t *testing.T) {
	t.Parallel()
	s, err := NewBaseStore(t.TempDir(), false)
	if err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	if _, err := s.Import(4*PageSize, func(*os.File) error { return broken }); !errors.Is(err, broken) {
		t.Errorf("got %v", err)
	}
	id, err := s.Import(4*PageSize, func(f *os.File) error {
		_, err := f.WriteAt([]byte("here"), PageSize)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	b, err := s.Open(id)
	if err != nil {
		t.Fatal(err)
	}
	defer b.Close()
	got := make([]byte, 4)
	if _, err := b.File().ReadAt(got, PageSize); err != nil || string(got) != "here" || b.Size != 4*PageSize {
		t.Errorf("%q, %d, %v", got, b.Size, err)
	}
	ids, err := s.List()
	if err != nil || len(ids) != 1 {
		t.Errorf("%v, %v", ids, err)
	}
}
