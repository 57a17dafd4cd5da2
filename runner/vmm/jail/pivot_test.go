package jail

import (
	"errors"
	"io/fs"
	"os"
	"slices"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// TestWithoutPivotRoot: where pivot_root is forbidden, as in containers, a jail contains the same as elsewhere.
func TestWithoutPivotRoot(t *testing.T) { //nolint:paralleltest // it replaces pivot_root
	require.Root(t)
	has := func() []string {
		t.Helper()
		j, err := New(t.Context(), Config{Program: "/bin/true", Devices: []string{os.DevNull}})
		if err != nil {
			t.Fatal(err)
		}
		var names []string
		if err := osthread.Do(func() error { // the thread ends with it
			if err := j.Enter(); err != nil {
				return err
			}
			for _, path := range []string{"/etc/passwd", "/../etc/passwd", "../../../etc/passwd", "/proc/1", "/root", "/tmp"} {
				if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
					t.Errorf("%s: %v", path, err)
				}
			}
			if err := os.WriteFile("/x", nil, 0o600); !errors.Is(err, unix.EROFS) {
				t.Errorf("a file is written: %v", err)
			}
			list, err := os.ReadDir("/")
			for _, e := range list {
				names = append(names, e.Name())
			}
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return names
	}
	want := has()
	pivotRoot = func(string, string) error { return unix.EPERM }
	defer func() { pivotRoot = unix.PivotRoot }()
	if got := has(); !slices.Equal(got, want) || len(got) == 0 {
		t.Errorf("it has %q, and with pivot_root %q", got, want)
	}
}
