package vmmproc

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// limit bounds the threads of a process with its own user. The calling thread is changed permanently: it takes that
// user as its real user. Only that user may set a limit of the process, or a holder of CAP_SYS_RESOURCE, which a runner
// need not have.
func limit(pid int, c Command) error {
	if c.UID == 0 {
		return nil
	}
	const same = ^uintptr(0)
	for _, call := range []struct{ number, id uintptr }{{unix.SYS_SETRESGID, uintptr(c.GID)}, {unix.SYS_SETRESUID, uintptr(c.UID)}} {
		// The raw call changes this thread; package syscall's changes all threads.
		if _, _, errno := unix.RawSyscall(call.number, call.id, same, same); errno != 0 {
			return fmt.Errorf("take the user of the process: %w", errno)
		}
	}
	if err := unix.Prlimit(pid, unix.RLIMIT_NPROC, &unix.Rlimit{Cur: maxThreads, Max: maxThreads}, nil); err != nil {
		return fmt.Errorf("limit its threads: %w", err)
	}
	return nil
}
