package diskdiff

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
)

// BenchmarkCompare compares a disk of 20,000 files of 4 KiB with its clone, in which one has changed, in the temporary directory:
// TMPDIR on a file system with reflink reads no file but that one.
func BenchmarkCompare(b *testing.B) {
	dir := b.TempDir()
	from := filepath.Join(dir, "from", "upper")
	content := make([]byte, 4096)
	for i := range 20_000 {
		sub := filepath.Join(from, strconv.Itoa(i/200))
		content[0], content[1] = byte(i), byte(i>>8)
		if err := errors.Join(os.MkdirAll(sub, 0o755), os.WriteFile(filepath.Join(sub, strconv.Itoa(i)), content, 0o644)); err != nil {
			b.Fatal(err)
		}
	}
	path, other := filepath.Join(dir, "a"), filepath.Join(dir, "b")
	ext4test.Make(b, path, 512<<20, filepath.Dir(from))
	x, errX := os.OpenFile(path, os.O_RDWR, 0)
	y, errY := os.Create(other)
	if err := errors.Join(errX, errY); err != nil {
		b.Fatal(err)
	}
	defer func() { _ = errors.Join(x.Close(), y.Close()) }()
	if _, err := sparse.Clone(y, x); err != nil {
		b.Fatal(err)
	}
	ext4test.Change(b, other, "cd /upper/50", "sif 10000 size 4095")
	if err := errors.Join(x.Sync(), y.Sync()); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		p, err := Compare(b.Context(), Request{A: x, B: y, Lower: small, Limit: 10})
		if err != nil || len(p.Changes) != 1 {
			b.Fatal(p, err)
		}
	}
}
