package e2e

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/pager"
)

// reboot takes from a host whose runner was killed what no reboot leaves: machines, namespaces, sockets, journals, mounts.
func (s *stack) reboot(t *testing.T) {
	t.Helper()
	for pid := range s.vmms() {
		// It may have died of a page of its base that cannot be read any more.
		if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
			t.Fatal(err)
		}
	}
	carrier := egress.NewClient(egress.SocketPath(filepath.Join(s.runDir(), "egress")))
	if hello, err := carrier.Hello(t.Context()); err == nil {
		if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		until(t, "the egress process has ended", func() (bool, error) {
			_, err := carrier.Hello(t.Context())
			return err != nil, nil
		})
	}
	pages := pager.NewClient(pager.SocketPath(filepath.Join(s.runDir(), "pager")))
	if hello, err := pages.Hello(t.Context()); err == nil {
		if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
			t.Fatal(err)
		}
		until(t, "the pager has ended", func() (bool, error) {
			_, err := pages.Hello(t.Context())
			return err != nil, nil
		})
		if err := pager.Clean(filepath.Join(s.runDir(), "pager")); err != nil {
			t.Fatal(err)
		}
	}
	until(t, "the machines have ended", func() (bool, error) { return len(s.vmms()) == 0, nil })
	spaces, err := s.namespaces()
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range spaces {
		_ = unix.Unmount(path, unix.MNT_DETACH) // it is a plain file if it was half made
		if err := os.Remove(path); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.RemoveAll(s.runDir()); err != nil {
		t.Fatal(err)
	}
	volume := filepath.Join(s.data, "volume")
	if _, err := os.Lstat(volume); errors.Is(err, os.ErrNotExist) { // one that was shut down has another error
		return
	}
	// A process that ends gives its memory back, by which it is found, before its files.
	until(t, "the volume is unmounted", func() (bool, error) {
		err := unix.Unmount(volume, 0)
		if errors.Is(err, unix.EBUSY) {
			return false, nil
		}
		return true, err
	})
	// A copy of the mount in another program's namespace keeps the file system, which may be shut down for good.
	until(t, "the volume is free", func() (bool, error) {
		left, err := s.loops()
		return len(left) == 0, err
	})
}
