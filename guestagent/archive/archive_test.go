//go:build linux

package archive

import (
	"archive/tar"
	"bytes"
	"errors"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// names reads a tar and returns the names of its entries.
func names(t *testing.T, r io.Reader) []string {
	t.Helper()
	var out []string
	for tr := tar.NewReader(r); ; {
		h, err := tr.Next()
		if errors.Is(err, io.EOF) {
			return out
		}
		if err != nil {
			t.Fatal(err)
		}
		out = append(out, h.Name)
	}
}

// TestPseudoFileSystemsAreLeftOut mounts /proc below a directory, and a file of /proc on a file.
func TestPseudoFileSystemsAreLeftOut(t *testing.T) {
	t.Parallel()
	require.Root(t)
	dir := filepath.Join(t.TempDir(), "top")
	for _, name := range []string{"proc", "sub"} {
		if err := os.MkdirAll(filepath.Join(dir, name), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for _, name := range []string{"sub/real", "cpus"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte("real"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := unix.Mkfifo(filepath.Join(dir, "sub", "pipe"), 0o600); err != nil {
		t.Fatal(err)
	}
	for target, source := range map[string]string{"proc": "/proc", "cpus": "/proc/cpuinfo"} {
		at := filepath.Join(dir, target)
		if err := unix.Mount(source, at, "", unix.MS_BIND, ""); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = unix.Unmount(at, unix.MNT_DETACH) })
	}
	var b bytes.Buffer
	left, err := Write(t.Context(), &b, dir, 1<<20)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := names(t, &b), []string{"top/", "top/proc/", "top/sub/", "top/sub/real"}; !slices.Equal(got, want) {
		t.Errorf("the tar has %q, want %q", got, want)
	}
	if want := []string{filepath.Join(dir, "cpus"), filepath.Join(dir, "proc")}; !slices.Equal(left.Pseudo, want) || left.Special != 1 || left.More != 0 {
		t.Errorf("left out %+v, want %q and one special file", left, want)
	}
	for _, top := range []string{"/proc", "/proc/self/fd", filepath.Join(dir, "cpus")} {
		if err := Check(top); core.CodeOf(err) != guestapi.CodeFileConflict || !strings.Contains(err.Error(), "pseudo file system") {
			t.Errorf("%s: %v", top, err)
		}
	}
	if err := Check(dir); err != nil {
		t.Error(err)
	}
}

func TestTarIsBounded(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, "large"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Truncate(filepath.Join(dir, "large"), 1<<40); err != nil { // a hole
		t.Fatal(err)
	}
	var b bytes.Buffer
	if _, err := Write(t.Context(), &b, dir, 1<<20); core.CodeOf(err) != core.CodeBodyTooLarge {
		t.Errorf("a tar of 1 TiB: %v", err)
	}
	if b.Len() > 1<<20 {
		t.Errorf("%d bytes were written, more than the bound", b.Len())
	}
}

// TestSizesAreOfTheMoment writes a file that has another size now than when the walk saw it.
func TestSizesAreOfTheMoment(t *testing.T) {
	t.Parallel()
	for _, size := range []int{0, 10, smallFile + 10} {
		p := filepath.Join(t.TempDir(), "f")
		if err := os.WriteFile(p, make([]byte, 100), 0o600); err != nil {
			t.Fatal(err)
		}
		seen, err := os.Lstat(p)
		if err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(p, make([]byte, size), 0o600); err != nil {
			t.Fatal(err)
		}
		var b bytes.Buffer
		w := writer{tar: tar.NewWriter(&b), devices: map[uint64]string{}}
		if err := w.file(p, "f", seen); err != nil {
			t.Fatal(err)
		}
		if err := w.tar.Close(); err != nil {
			t.Fatal(err)
		}
		tr := tar.NewReader(&b)
		h, err := tr.Next()
		if err != nil || h.Size != int64(size) {
			t.Errorf("header %+v, %v; want a size of %d", h, err, size)
		}
	}
}

func TestNamesAreBounded(t *testing.T) {
	t.Parallel()
	w := writer{}
	for range maxNamed + 3 {
		w.leaveOut(strings.Repeat("é", 1000))
	}
	if len(w.left.Pseudo) != maxNamed || w.left.More != 3 || len(w.left.Pseudo[0]) > 200 {
		t.Errorf("%d names of %d bytes, %d more", len(w.left.Pseudo), len(w.left.Pseudo[0]), w.left.More)
	}
}
