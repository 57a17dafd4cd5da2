package pgcluster

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/osthread"
	"github.com/coppice-dev/coppice/internal/test/require"
)

// TestForeignMountsStayOut: in the mount namespace of PostgreSQL there is no mount of anybody else, whatever its kind, and an unmount
// on the host is one there.
func TestForeignMountsStayOut(t *testing.T) {
	t.Parallel()
	require.Root(t)
	foreign, err := os.MkdirTemp("", "foreign") //nolint:usetesting // everybody can enter it, so that nothing in it is bound
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.Remove(foreign) })
	closed := filepath.Join(t.TempDir(), "closed")
	data := filepath.Join(closed, "data")
	if err := errors.Join(os.Mkdir(closed, 0o700), os.Mkdir(data, 0o700)); err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(
		unix.Mount("foreign", foreign, "tmpfs", 0, "size=64k"),
		unix.Mount("", foreign, "", unix.MS_SHARED, ""),
	); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(foreign, unix.MNT_DETACH) })
	mine := filepath.Join(foreign, "mine") // of a path that is needed
	if err := os.Mkdir(mine, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mount("mine", mine, "tmpfs", 0, "size=64k"); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(mine, unix.MNT_DETACH) })
	run := filepath.Join(mine, "run")
	if err := os.Mkdir(run, 0o700); err != nil {
		t.Fatal(err)
	}
	seen := func(needed ...string) (before, after string) {
		t.Helper()
		if err := osthread.Do(func() error { // the thread's namespace is changed for good
			if err := makeReachable(serverUser{name: "nobody", uid: 65534, gid: 65534, drop: true}, "/bin/true", needed); err != nil {
				return err
			}
			b, err := os.ReadFile("/proc/thread-self/mountinfo")
			if err != nil {
				return err
			}
			before = string(b)
			unmounted := make(chan error)
			go func() { unmounted <- unix.Unmount(mine, 0) }() // by a thread that is on the host
			if err := <-unmounted; err != nil && !errors.Is(err, unix.EINVAL) {
				return err
			}
			b, err = os.ReadFile("/proc/thread-self/mountinfo")
			after = string(b)
			return err
		}); err != nil {
			t.Fatal(err)
		}
		return before, after
	}
	before, after := seen(data, run)
	if !strings.Contains(before, mine) {
		t.Errorf("a mount that holds a needed path is missing:\n%s", before)
	}
	if strings.Contains(after, mine) {
		t.Errorf("a mount that its owner has unmounted is still there:\n%s", after)
	}
	if before, _ := seen(data); strings.Contains(before, foreign) {
		t.Errorf("somebody else's mount is there:\n%s", before)
	}
}
