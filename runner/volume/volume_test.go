package volume_test

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/runner/volume"
)

func TestVolume(t *testing.T) {
	require.Root(t)
	require.Program(t, "mkfs.xfs", "xfsprogs")
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	dir := t.TempDir()
	if ok, err := sparse.CanReflink(dir); err != nil || ok {
		t.Skipf("the temporary directory has reflink itself (%v): require nothing of a loop mount here", err)
	}
	if _, err := volume.Open(t.Context(), dir, 1<<20, log); core.CodeOf(err) != core.CodeInvalidField {
		t.Fatalf("Open with a budget of 1 MiB = %v, want %s", err, core.CodeInvalidField)
	}
	v, err := volume.Open(t.Context(), dir, volume.MinBudget, log)
	if err != nil {
		t.Fatal(err)
	}
	marker := filepath.Join(v.Path, "marker")
	if err := os.WriteFile(marker, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	if ok, err := sparse.CanReflink(v.Path); err != nil || !ok || !v.Reflink {
		t.Fatalf("CanReflink(volume) = %v, %v", ok, err)
	}
	again, err := volume.Open(t.Context(), dir, volume.MinBudget, log) // as after a kill: the mount is still there
	if err != nil || again.Path != v.Path {
		t.Fatalf("Open of a mounted volume = %+v, %v", again, err)
	}
	fill(t, filepath.Join(v.Path, "full"))
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(marker); !os.IsNotExist(err) {
		t.Fatalf("the marker is there after the unmount: %v", err)
	}
	v, err = volume.Open(t.Context(), dir, volume.MinBudget, log)
	if err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(marker); err != nil || string(b) != "kept" {
		t.Errorf("the marker after a remount = %q, %v", b, err)
	}
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestPinnedVolume has a process that took a copy of the mount into a namespace of its own: the volume can be closed and opened again
// all the same.
func TestPinnedVolume(t *testing.T) {
	require.Root(t)
	require.Program(t, "mkfs.xfs", "xfsprogs")
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	dir := t.TempDir()
	if ok, err := sparse.CanReflink(dir); err != nil || ok {
		t.Skipf("the temporary directory has reflink itself (%v): require nothing of a loop mount here", err)
	}
	v, err := volume.Open(t.Context(), dir, volume.MinBudget, log)
	if err != nil {
		t.Fatal(err)
	}
	marker := filepath.Join(v.Path, "marker")
	if err := os.WriteFile(marker, []byte("kept"), 0o600); err != nil {
		t.Fatal(err)
	}
	pin := exec.Command("cat")
	pin.SysProcAttr = &syscall.SysProcAttr{Cloneflags: unix.CLONE_NEWNS}
	in, err := pin.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := pin.Start(); err != nil {
		t.Fatal(err)
	}
	if err := v.Close(); err != nil {
		t.Fatal(err)
	}
	if v, err = volume.Open(t.Context(), dir, volume.MinBudget, log); err != nil {
		t.Fatal(err)
	}
	if b, err := os.ReadFile(marker); err != nil || string(b) != "kept" {
		t.Errorf("the marker after a remount = %q, %v", b, err)
	}
	if err := errors.Join(in.Close(), pin.Wait(), v.Close()); err != nil {
		t.Fatal(err)
	}
}

// fill shows that the budget is one: more than it holds cannot be written.
func fill(t *testing.T, path string) {
	t.Helper()
	f, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	if err := unix.Fallocate(int(f.Fd()), 0, 0, volume.MinBudget); !errors.Is(err, unix.ENOSPC) {
		t.Errorf("reserving the whole budget = %v, want %v", err, unix.ENOSPC)
	}
	_, _ = io.WriteString(f, "x")
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
}
