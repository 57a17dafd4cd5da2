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
	// inside runs fn on a thread that sees the workload's file system and starts children in its namespaces. Several may
	// run at once. fn must not block for long on anything but the file system.
	inside(fn func() error) error

	// start starts a process in the workload. It must be called from within inside.
	start(cmd *exec.Cmd) error

	// startHook starts a process beside the workload, where the freeze does not reach. The same holds.
	startHook(cmd *exec.Cmd) error

	// endHooks kills what hooks have left running.
	endHooks() error

	// freeze stops every process of the workload and returns how many there are. A process that does not stop in time is a
	// NOT_QUIESCED that names it, and everything runs again then.
	freeze(ctx context.Context, timeout time.Duration) (int, error)

	// thaw undoes freeze. It is idempotent.
	thaw(ctx context.Context) error

	// frozen reports whether everything in the workload is stopped.
	frozen() (bool, error)

	// pids lists the workload's processes by the numbers that the agent sees.
	pids() ([]int, error)

	// innerPID is the number by which the workload knows one of its processes, 0 when it is gone.
	innerPID(pid int) int

	// proc is the directory where the workload's own /proc is seen by the agent.
	proc() string
}

// runDir holds what the guest shows to its programs: generation, token, boot id.
const runDir = "/run/coppice"

// pollable returns f as a file that the runtime waits for without a thread.
func pollable(fd int, name string) *os.File { return os.NewFile(uintptr(fd), name) }
