package sparse_test

import (
	"bytes"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/volume"
)

const block = 4096

// eachFileSystem runs a test in a directory whose file system shares no extents and in one whose does.
func eachFileSystem(t *testing.T, test func(t *testing.T, dir string, want sparse.Method)) {
	t.Helper()
	t.Run("temporary directory", func(t *testing.T) {
		t.Parallel()
		dir := t.TempDir()
		can, err := sparse.CanReflink(dir)
		if err != nil {
			t.Fatal(err)
		}
		want := sparse.Copied
		if can {
			want = sparse.Reflink
		}
		test(t, dir, want)
	})
	t.Run("xfs", func(t *testing.T) {
		t.Parallel()
		require.Root(t)
		require.Program(t, "mkfs.xfs", "xfsprogs")
		v, err := volume.Open(t.Context(), t.TempDir(), volume.MinBudget, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := v.Close(); err != nil {
				t.Error(err)
			}
		})
		test(t, v.Path, sparse.Reflink)
	})
}

// newFile makes a file of size bytes with data in the given blocks.
func newFile(t *testing.T, dir string, size int64, data ...int64) *os.File {
	t.Helper()
	f, err := os.CreateTemp(dir, "file")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	if err := f.Truncate(size); err != nil {
		t.Fatal(err)
	}
	for _, n := range data {
		b := bytes.Repeat([]byte{byte(n + 1)}, int(min(block, size-n*block)))
		if _, err := f.WriteAt(b, n*block); err != nil {
			t.Fatal(err)
		}
	}
	return f
}

func content(t *testing.T, f *os.File) []byte {
	t.Helper()
	info, err := f.Stat()
	if err != nil {
		t.Fatal(err)
	}
	b, err := io.ReadAll(io.NewSectionReader(f, 0, info.Size()))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

// atMost wants a file to take little more than n blocks: a file system may keep some for its own map of the extents.
func atMost(t *testing.T, f *os.File, n int64) {
	t.Helper()
	got, err := sparse.Allocated(f)
	if err != nil {
		t.Fatal(err)
	}
	if got > (n+20)*block {
		t.Errorf("%s takes %d bytes, want about %d blocks", filepath.Base(f.Name()), got, n)
	}
}

func TestClone(t *testing.T) {
	t.Parallel()
	const size = 1000*block + 100
	eachFileSystem(t, func(t *testing.T, dir string, method sparse.Method) {
		t.Helper()
		for name, data := range map[string][]int64{
			"empty": nil, "begin": {0, 1, 2}, "middle": {3, 4, 500}, "end": {999, 1000}, "all over": {0, 7, 300, 301, 302, 900, 1000},
		} {
			src := newFile(t, dir, size, data...)
			for before, dst := range map[string]*os.File{
				"nothing": newFile(t, dir, 0), "less": newFile(t, dir, 10*block, 1, 5), "other": newFile(t, dir, size, 0, 500, 998), "more": newFile(t, dir, 3*size, 0, 1500),
			} {
				got, err := sparse.Clone(dst, src)
				if err != nil || got != method {
					t.Fatalf("%s over %s: got %q, %v, want %q", name, before, got, err, method)
				}
				if !bytes.Equal(content(t, dst), content(t, src)) {
					t.Errorf("%s over %s: the clone has other bytes", name, before)
				}
				atMost(t, dst, int64(len(data)))
			}
		}
	})
}

// TestCloneIsolated writes to both sides of a clone.
func TestCloneIsolated(t *testing.T) {
	t.Parallel()
	eachFileSystem(t, func(t *testing.T, dir string, _ sparse.Method) {
		t.Helper()
		src, dst := newFile(t, dir, 16*block, 1, 2, 3), newFile(t, dir, 0)
		if _, err := sparse.Clone(dst, src); err != nil {
			t.Fatal(err)
		}
		was := content(t, src)
		if _, err := dst.WriteAt([]byte("of the clone"), block); err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(content(t, src), was) {
			t.Error("a write of the clone shows in its source")
		}
		if _, err := src.WriteAt([]byte("of the source"), 3*block); err != nil {
			t.Fatal(err)
		}
		if bytes.Contains(content(t, dst), []byte("of the source")) {
			t.Error("a write of the source shows in its clone")
		}
	})
}

// TestCloneAtOnce clones one open file from several goroutines: they share its offset.
func TestCloneAtOnce(t *testing.T) {
	t.Parallel()
	eachFileSystem(t, func(t *testing.T, dir string, _ sparse.Method) {
		t.Helper()
		src := newFile(t, dir, 2000*block, 0, 5, 6, 700, 1400, 1999)
		want := content(t, src)
		var wg sync.WaitGroup
		for range 16 {
			dst := newFile(t, dir, 0)
			wg.Go(func() {
				if _, err := sparse.Clone(dst, src); err != nil {
					t.Error(err)
				} else if !bytes.Equal(content(t, dst), want) {
					t.Error("a clone has other bytes")
				}
			})
		}
		wg.Wait()
	})
}

func TestCloneOntoItself(t *testing.T) {
	t.Parallel()
	eachFileSystem(t, func(t *testing.T, dir string, _ sparse.Method) {
		t.Helper()
		src := newFile(t, dir, 8*block, 0, 1)
		was := content(t, src)
		if _, err := sparse.Clone(src, src); err == nil {
			t.Error("a file was cloned onto itself")
		}
		if !bytes.Equal(content(t, src), was) {
			t.Error("a file that was cloned onto itself has lost its bytes")
		}
	})
}

func TestCloneFails(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	src := newFile(t, dir, 8*block, 0)
	readOnly, err := os.Open(newFile(t, dir, 0).Name())
	if err != nil {
		t.Fatal(err)
	}
	defer readOnly.Close()
	if _, err := sparse.Clone(readOnly, src); err == nil {
		t.Error("a file that is open for reading was written")
	}
	closed := newFile(t, dir, 0)
	_ = closed.Close()
	if _, err := sparse.Clone(closed, src); err == nil {
		t.Error("a closed file was written")
	}
	if _, err := sparse.Clone(newFile(t, dir, 0), closed); err == nil {
		t.Error("a closed file was read")
	}
}

// TestCopySize copies less than there is.
func TestCopySize(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	src := newFile(t, dir, 100*block, 0, 1, 2, 3, 50, 99)
	for _, size := range []int64{0, 1, block, 2*block + 7, 4 * block, 30 * block, 50*block + 1, 100 * block, 200 * block} {
		dst := newFile(t, dir, 0)
		if err := sparse.Copy(dst, src, size); err != nil {
			t.Fatal(err)
		}
		if err := dst.Truncate(100 * block); err != nil {
			t.Fatal(err)
		}
		want := content(t, src)
		clear(want[min(size, 100*block):])
		if !bytes.Equal(content(t, dst), want) {
			t.Errorf("a copy of %d bytes has other bytes", size)
		}
	}
}

func TestZero(t *testing.T) {
	t.Parallel()
	eachFileSystem(t, func(t *testing.T, dir string, _ sparse.Method) {
		t.Helper()
		rng := rand.New(rand.NewPCG(1, 2))
		all := make([]int64, 64)
		for i := range all {
			all[i] = int64(i)
		}
		f := newFile(t, dir, 64*block, all...)
		want := content(t, f)
		for range 20 {
			off := rng.Int64N(60 * block)
			n := 1 + rng.Int64N(4*block)
			if err := sparse.Zero(f, off, n); err != nil {
				t.Fatal(err)
			}
			clear(want[off : off+n])
			if !bytes.Equal(content(t, f), want) {
				t.Fatalf("after zeros at %d+%d the file has other bytes", off, n)
			}
		}
		if err := sparse.Zero(f, 0, 64*block); err != nil {
			t.Fatal(err)
		}
		atMost(t, f, 0)
	})
}

func TestCanReflinkLeavesNothing(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if _, err := sparse.CanReflink(dir); err != nil {
		t.Fatal(err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) > 0 {
		t.Errorf("%v are left (%v)", entries, err)
	}
	if _, err := sparse.CanReflink(filepath.Join(dir, "absent")); err == nil {
		t.Error("a directory that is not there was tried")
	}
}

func BenchmarkClone(b *testing.B) {
	for _, mib := range []int64{1, 64} {
		b.Run(fmt.Sprintf("copy/%dMiB", mib), func(b *testing.B) {
			dir := b.TempDir()
			src, err := os.Create(filepath.Join(dir, "src"))
			if err != nil {
				b.Fatal(err)
			}
			defer src.Close()
			if _, err := src.Write(bytes.Repeat([]byte{1}, int(mib<<20))); err != nil {
				b.Fatal(err)
			}
			if err := src.Truncate(1 << 30); err != nil {
				b.Fatal(err)
			}
			dst, err := os.Create(filepath.Join(dir, "dst"))
			if err != nil {
				b.Fatal(err)
			}
			defer dst.Close()
			b.SetBytes(mib << 20)
			for b.Loop() {
				if _, err := sparse.Clone(dst, src); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
