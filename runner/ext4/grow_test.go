package ext4

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/ext4/ext4test"
)

// TestGrown: a disk that was grown, to the middle of a block group and far beyond, reads as it did.
func TestGrown(t *testing.T) {
	t.Parallel()
	resize := require.Program(t, "resize2fs", "e2fsprogs")
	dir := t.TempDir()
	from, path := filepath.Join(dir, "from"), filepath.Join(dir, "disk")
	if err := os.MkdirAll(filepath.Join(from, "upper", "d"), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(from, "upper", "a"), []byte("hello"), 0o644); err != nil {
		t.Fatal(err)
	}
	ext4test.Make(t, path, 1<<30, from)
	want := map[string]string{}
	walk(t, open(t, path), Root, "", want)
	for _, size := range []int64{1<<30 + 50<<20, 20 << 30, 200<<30 + 3<<12} {
		if err := os.Truncate(path, size); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), resize, "-f", path).CombinedOutput(); err != nil {
			t.Fatalf("resize2fs: %v: %s", err, out)
		}
		got := map[string]string{}
		walk(t, open(t, path), Root, "", got)
		if diff := cmp.Diff(want, got); diff != "" {
			t.Errorf("grown to %d bytes: %s", size, diff)
		}
	}
}
