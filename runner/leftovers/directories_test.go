package leftovers_test

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/leftovers"
)

// TestBusyDirectory: a directory that cannot be removed when its shell goes is removed as soon as it can be.
func TestBusyDirectory(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := filepath.Join(t.TempDir(), "left")
	busy := filepath.Join(dir, "busy")
	if err := errors.Join(os.MkdirAll(busy, 0o700), unix.Mount("test", busy, "tmpfs", 0, "size=64K")); err != nil {
		t.Fatal(err)
	}
	var d leftovers.Directories
	if err := d.Remove(dir); !errors.Is(err, unix.EBUSY) {
		t.Errorf("a busy directory was removed: %v", err)
	}
	if n, err := d.RemoveAgain(); n != 1 || !errors.Is(err, unix.EBUSY) {
		t.Errorf("%d busy directories were removed: %v", n, err)
	}
	if err := unix.Unmount(busy, 0); err != nil {
		t.Fatal(err)
	}
	for _, want := range []int{1, 0} {
		if n, err := d.RemoveAgain(); n != want || err != nil {
			t.Errorf("%d directories were removed, want %d: %v", n, want, err)
		}
	}
	if _, err := os.Stat(dir); !errors.Is(err, os.ErrNotExist) {
		t.Error("it is still there")
	}
}
