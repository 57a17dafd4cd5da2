//go:build linux

package guestagent

import (
	"context"
	"os"
	"os/exec"
	"time"
)

// workload is where the user's processes live. The agent sees them from outside.
type workload interface {
	// inside runs fn on a thread that sees the workload's file system and starts children in its namespaces. Several
	// calls may run at once. fn must not block for long, except in the file system.
	inside(fn func() error) error

	// join moves the calling thread for good to where inside runs functions. The thread must be locked to its goroutine.
	join() error

	// start starts a process in the workload. It must be called from within inside.
	start(cmd *exec.Cmd) error

	// startHook starts a process outside of the workload, where the freeze does not reach it. It must also be called
	// from within inside.
	startHook(cmd *exec.Cmd) error

	// endHooks kills the processes that hooks have left running.
	endHooks() error

	// freeze stops every process of the workload and returns their number. If a process does not stop in time, the
	// error is NOT_QUIESCED and names it, and everything runs again.
	freeze(ctx context.Context, timeout time.Duration) (int, error)

	// thaw undoes freeze. It is idempotent.
	thaw(ctx context.Context) error

	// frozen reports whether everything in the workload is stopped.
	frozen() (bool, error)

	// pids lists the workload's processes with the numbers that the agent sees.
	pids() ([]int, error)

	// innerPID returns the number of a process within the workload, or 0 when it is gone.
	innerPID(pid int) int

	// proc is the directory under which the agent sees the workload's own /proc.
	proc() string
}

// runDir has the files that the guest's programs may read: generation, token, boot id.
const runDir = "/run/coppice"

// pollable returns f as a file that the runtime waits for without a thread.
func pollable(fd int, name string) *os.File { return os.NewFile(uintptr(fd), name) }
