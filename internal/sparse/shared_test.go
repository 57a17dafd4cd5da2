package sparse_test

import (
	"bytes"
	"os"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/sparse"
)

func TestUnshared(t *testing.T) {
	t.Parallel()
	eachFileSystem(t, func(t *testing.T, dir string, method sparse.Method) {
		t.Helper()
		const size = 4000 * block
		a := newFile(t, dir, size, 0, 1, 2, 10, 500, 2000)
		b := newFile(t, dir, size)
		if _, err := sparse.Clone(b, a); err != nil {
			t.Fatal(err)
		}
		var want sparse.Ranges
		for _, n := range []int64{1, 500, 700, 3999} { // over data, over data, and into holes
			if _, err := b.WriteAt(bytes.Repeat([]byte{9}, block), n*block); err != nil {
				t.Fatal(err)
			}
			want = append(want, sparse.Range{Offset: n * block, Length: block})
		}
		if err := b.Truncate(size + block); err != nil {
			t.Fatal(err)
		}
		for _, f := range []*os.File{a, b} {
			if err := f.Sync(); err != nil {
				t.Fatal(err)
			}
		}
		got, err := sparse.Unshared(a, b)
		if err != nil {
			t.Fatal(err)
		}
		if method == sparse.Reflink {
			if diff := cmp.Diff(want, got); diff != "" {
				t.Error(diff)
			}
		}
		x, y := make([]byte, block), make([]byte, block)
		for at := int64(0); at < size; at += block {
			if _, err := a.ReadAt(x, at); err != nil {
				t.Fatal(err)
			}
			if _, err := b.ReadAt(y, at); err != nil {
				t.Fatal(err)
			}
			if !bytes.Equal(x, y) && !got.Overlaps(at, block) {
				t.Errorf("block %d differs and is not named", at/block)
			}
		}
		if same, err := sparse.Unshared(a, a); err != nil || len(same) > 0 {
			t.Errorf("a file differs from itself in %v (%v)", same, err)
		}
	})
}

func TestRangesOverlaps(t *testing.T) {
	t.Parallel()
	rs := sparse.Ranges{{Offset: 10, Length: 10}, {Offset: 30, Length: 5}}
	for _, c := range []struct {
		off, n int64
		want   bool
	}{{0, 10, false}, {0, 11, true}, {19, 1, true}, {20, 10, false}, {20, 11, true}, {12, 2, true}, {34, 100, true}, {35, 100, false}} {
		if got := rs.Overlaps(c.off, c.n); got != c.want {
			t.Errorf("[%d, +%d): %t", c.off, c.n, got)
		}
	}
}
