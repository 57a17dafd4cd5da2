// Package threads reads the kernel's information about threads of other processes from /proc. It
// has the queries of the runner, the pager and the drivers of VMMs about a machine that waits for a
// page.
package threads

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/procfs"
)

// Of reports whether a thread belongs to a process.
func Of(pid, thread int) bool {
	_, err := os.Stat(fmt.Sprintf("/proc/%d/task/%d", pid, thread))
	return err == nil
}

// Kernel reports whether a thread is one of the kernel's own.
func Kernel(thread int) bool {
	const kthread = 0x00200000 // PF_KTHREAD
	stat, err := procfs.ReadStat(fmt.Sprintf("/proc/%d/stat", thread))
	if err != nil {
		return false
	}
	f, err := stat.Number(procfs.Flags)
	return err == nil && f&kthread != 0
}

// Blocked returns a thread of a process that waits in the kernel for something that no signal ends (state D), or 0.
func Blocked(pid int) int {
	for _, thread := range list(pid) {
		if state(pid, thread) == "D" {
			return thread
		}
	}
	return 0
}

// Killed reports whether a thread has been sent SIGKILL, or has ended. A thread that waits for a page ends only when its wait does.
func Killed(thread int) bool {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", thread))
	if err != nil {
		return errors.Is(err, os.ErrNotExist)
	}
	for line := range bytes.Lines(b) {
		name, value, _ := strings.Cut(string(line), ":")
		if name != "SigPnd" && name != "ShdPnd" {
			continue
		}
		pending, err := strconv.ParseUint(strings.TrimSpace(value), 16, 64)
		if err == nil && pending&(1<<(unix.SIGKILL-1)) != 0 {
			return true
		}
	}
	return false
}

// Stop sends SIGSTOP to each thread of a process. The kernel gives a signal for the whole process to one thread, often the first:
// while that thread waits in state D, no thread stops. SIGCONT to the process continues all threads.
func Stop(pid int) error {
	var errs []error
	for _, thread := range list(pid) {
		if err := unix.Tgkill(pid, thread, unix.SIGSTOP); err != nil && !errors.Is(err, unix.ESRCH) {
			errs = append(errs, fmt.Errorf("stop thread %d of process %d: %w", thread, pid, err))
		}
	}
	return errors.Join(errs...)
}

// Standing reports whether no thread of a process runs: each is stopped, or waits in the kernel for something that no signal ends.
func Standing(pid int) bool {
	for _, thread := range list(pid) {
		if s := state(pid, thread); s != "" && s != "T" && s != "D" {
			return false
		}
	}
	return true
}

func list(pid int) []int {
	paths, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*", pid)) // the pattern is good
	out := make([]int, 0, len(paths))
	for _, path := range paths {
		if thread, err := strconv.Atoi(filepath.Base(path)); err == nil {
			out = append(out, thread)
		}
	}
	return out
}

// state is that of a thread, and empty for one that has ended.
func state(pid, thread int) string {
	s, _ := procfs.ReadStat(fmt.Sprintf("/proc/%d/task/%d/stat", pid, thread))
	return s.State()
}
