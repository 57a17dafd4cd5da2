package vmmproc

import (
	"fmt"

	"golang.org/x/sys/unix"
)

// limit bounds the threads of a process that has a user of its own. The calling thread is changed for good: it takes the user as its
// real one, because only that user, or CAP_SYS_RESOURCE, which a runner need not have, may set a limit of the process.
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
