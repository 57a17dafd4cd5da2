package daemon_test

import (
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/diffhelper"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
	"github.com/coppice-dev/coppice/runner/rootimage/erofstest"
)

// BenchmarkConfinedHelper measures the start of a helper of a program as big as coppice, with the smallest comparison.
func BenchmarkConfinedHelper(b *testing.B) {
	require.Root(b)
	var files []*os.File
	for _, content := range [][]byte{ext4test.Tiny(b), ext4test.Tiny(b), erofstest.Image(erofstest.File{Mode: erofstest.ModeDir})} {
		path := filepath.Join(b.TempDir(), "file")
		if err := os.WriteFile(path, content, 0o600); err != nil {
			b.Fatal(err)
		}
		f, err := os.Open(path)
		if err != nil {
			b.Fatal(err)
		}
		defer f.Close()
		files = append(files, f)
	}
	for b.Loop() {
		_, err := diffhelper.Compare(b.Context(), diffhelper.Request{A: files[0], B: files[1], Root: files[2], Limit: 1, Budget: time.Minute, Wait: time.Minute})
		if err != nil {
			b.Fatal(err)
		}
	}
}
