// Package testhalt lets tests stop a process without ending it, as a debugger or a deadlock does.
package testhalt

import (
	"errors"
	"fmt"
	"os"
	"syscall"
	"testing"

	"github.com/coppice-dev/coppice/internal/procfs"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// Halt stops a process and waits until the kernel says that it has stopped. What it returns has it go on.
func Halt(tb testing.TB, pid int) (goOn func()) {
	tb.Helper()
	if pid <= 1 || pid == os.Getpid() {
		tb.Fatalf("process %d is not to be stopped", pid)
	}
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		tb.Fatal(err)
	}
	goOn = func() {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil && !errors.Is(err, syscall.ESRCH) {
			tb.Error(err)
		}
	}
	eventually.True(tb, "the process has stopped", func() bool { return State(tb, pid) == "T" })
	return goOn
}

// State is what the kernel says of a process: R, S, D, T, Z, or nothing of one that is gone.
func State(tb testing.TB, pid int) string {
	tb.Helper()
	s, err := procfs.ReadStat(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ESRCH) {
		tb.Fatal(err)
	}
	return s.State()
}
