package tarcopy

import (
	"archive/tar"
	"bytes"
	"errors"
	"fmt"
	"io"
	"strconv"
	"testing"

	"github.com/coppice-dev/coppice/controller/builds/plan"
	"github.com/coppice-dev/coppice/core"
)

// TestUnpackedIsBounded: a context that is too large without its compression is refused when the bound is reached, and not at its end.
func TestUnpackedIsBounded(t *testing.T) {
	t.Parallel()
	head := new(bytes.Buffer)
	if err := tar.NewWriter(head).WriteHeader(&tar.Header{Name: "bomb", Typeflag: tar.TypeReg, Size: 1 << 40}); err != nil {
		t.Fatal(err)
	}
	endless := &zeros{}
	_, err := Select(plan.Copy{Sources: []string{"bomb"}, Dest: "/x"}, func() io.Reader { return io.MultiReader(head, endless) })
	if core.CodeOf(err) != core.CodeBodyTooLarge || endless.given > maxUnpacked+1<<20 {
		t.Errorf("%v after %d bytes", err, endless.given)
	}
	b := &bounded{from: bytes.NewReader(make([]byte, 11)), left: 10}
	if n, err := io.Copy(io.Discard, b); n != 10 || !errors.Is(err, errLarge) {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestSparseFilesAreBounded: the holes of a sparse file are not in the stream, and count nevertheless.
func TestSparseFilesAreBounded(t *testing.T) {
	t.Parallel()
	record := func(key, value string) string {
		for n := len(key) + len(value) + 4; ; n++ {
			if r := fmt.Sprintf("%d %s=%s\n", n, key, value); len(r) == n {
				return r
			}
		}
	}
	const size = "1099511627776"
	records := record("GNU.sparse.size", size) + record("GNU.sparse.numblocks", "1") + record("GNU.sparse.map", size+",0")
	out := new(bytes.Buffer)
	w := tar.NewWriter(out)
	if err := w.WriteHeader(&tar.Header{Name: "x", Typeflag: tar.TypeReg, Size: int64(len(records)), Format: tar.FormatUSTAR}); err != nil {
		t.Fatal(err)
	}
	if _, err := io.WriteString(w, records); err != nil {
		t.Fatal(err)
	}
	if err := w.WriteHeader(&tar.Header{Name: "bomb", Typeflag: tar.TypeReg, Format: tar.FormatUSTAR}); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	b := out.Bytes() // the writer makes no sparse files, so the first entry is made a header of records
	sum := 'x' - '0'
	b[156] = 'x'
	old, err := strconv.ParseInt(string(bytes.Trim(b[148:156], "\x00 ")), 8, 32)
	if err != nil {
		t.Fatal(err)
	}
	copy(b[148:156], fmt.Sprintf("%06o\x00 ", old+int64(sum)))
	h, err := tar.NewReader(bytes.NewReader(b)).Next()
	if err != nil || h.Size != 1<<40 || h.Typeflag != tar.TypeReg {
		t.Fatalf("the test's file: %+v, %v", h, err)
	}
	if _, err := Select(plan.Copy{Sources: []string{"bomb"}, Dest: "/x"}, func() io.Reader { return bytes.NewReader(b) }); core.CodeOf(err) != core.CodeBodyTooLarge {
		t.Error(err)
	}
}

// zeros never ends.
type zeros struct{ given int64 }

func (z *zeros) Read(b []byte) (int, error) {
	z.given += int64(len(b))
	return len(b), nil
}
