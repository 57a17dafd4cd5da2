package runner

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/require"
)

// TestDebrisIsRemoved: a directory that cannot be removed when its shell goes is removed as soon as it can be.
func TestDebrisIsRemoved(t *testing.T) {
	t.Parallel()
	require.Root(t)
	r := newFakeRig(t, func(*Config) {})
	dir := filepath.Join(r.shellsDir(), "left")
	busy := filepath.Join(dir, "busy")
	if err := errors.Join(os.MkdirAll(busy, 0o700), unix.Mount("test", busy, "tmpfs", 0, "size=64K")); err != nil {
		t.Fatal(err)
	}
	if err := r.directories.Remove(dir); !errors.Is(err, unix.EBUSY) {
		t.Errorf("a busy directory was removed: %v", err)
	}
	if err := unix.Unmount(busy, 0); err != nil {
		t.Fatal(err)
	}
	tick := time.NewTicker(10 * time.Millisecond)
	defer tick.Stop()
	for began := time.Now(); ; <-tick.C {
		if _, err := os.Stat(dir); errors.Is(err, os.ErrNotExist) {
			break
		}
		if time.Since(began) > time.Minute {
			t.Fatal("it is still there")
		}
	}
	r.wantOnly()
}
