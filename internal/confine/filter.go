package confine

import (
	"fmt"
	"os"
	"slices"

	seccomp "github.com/elastic/go-seccomp-bpf"
	"github.com/elastic/go-seccomp-bpf/arch"
	"golang.org/x/sys/unix"
)

// computing are the system calls that a Go program needs to compute, to read open files, and to write to its pipes.
var computing = []string{
	"read", "pread64", "readv", "write", "writev", "close", "lseek", "fstat",
	"munmap", "madvise", "mincore", "brk", "mremap",
	"futex", "sched_yield", "sched_getaffinity", "nanosleep", "clock_nanosleep", "clock_gettime", "clock_getres", "gettimeofday", "restart_syscall",
	"rt_sigaction", "rt_sigprocmask", "rt_sigreturn", "sigaltstack", "getpid", "gettid", "getuid", "geteuid", "getgid", "getegid",
	"getrandom", "getrusage", "epoll_create1", "epoll_ctl", "epoll_pwait", "epoll_wait", "eventfd2", "pipe2", "exit", "exit_group",
	"set_robust_list", "rseq", "set_tid_address", "uname",
}

// changing are the additional calls of a task that makes files.
var changing = []string{
	"openat", "newfstatat", "fstatat64", "statx", "readlinkat", "getdents64", "mkdirat", "symlinkat", "linkat", "mknodat", "unlinkat", "renameat2",
	"fchown", "fchownat", "fchmod", "fchmodat", "fchmodat2", "utimensat", "fsetxattr", "ftruncate", "fallocate", "copy_file_range", "pwrite64", "umask",
}

const fiemap = 0xC020660B // FS_IOC_FIEMAP: the places of a file's blocks

// filter allows only the calls above from now on, on all threads. Other calls fail with EPERM, so the Go runtime goes
// on where it only tries a call.
func filter(files bool) error {
	info, err := arch.GetInfo("")
	if err != nil {
		return fmt.Errorf("filter system calls: %w", err)
	}
	names := computing
	if files {
		names = append(slices.Clip(names), changing...)
	}
	var known []string
	for _, name := range names {
		if _, ok := info.SyscallNames[name]; ok { // not every architecture has all of them
			known = append(known, name)
		}
	}
	must := func(c ...seccomp.Condition) seccomp.ArgumentConditions { return c }
	allow := []seccomp.NameWithConditions{
		// Threads are allowed, processes are not.
		{Name: "clone", Conditions: must(seccomp.Condition{Argument: 0, Operation: seccomp.BitsSet, Value: unix.CLONE_THREAD})},
		// Only private memory without execute permission, which the memory limit counts.
		{Name: "mmap", Conditions: must(
			seccomp.Condition{Argument: 2, Operation: seccomp.BitsNotSet, Value: unix.PROT_EXEC},
			seccomp.Condition{Argument: 3, Operation: seccomp.BitsNotSet, Value: unix.MAP_SHARED})},
		{Name: "mprotect", Conditions: must(seccomp.Condition{Argument: 2, Operation: seccomp.BitsNotSet, Value: unix.PROT_EXEC})},
		// Signals only to its own threads: the Go runtime preempts goroutines with them.
		{Name: "tgkill", Conditions: must(seccomp.Condition{Argument: 0, Operation: seccomp.Equal, Value: uint64(os.Getpid())})}, //nolint:gosec // G115: a process id
		{Name: "ioctl", Conditions: must(seccomp.Condition{Argument: 1, Operation: seccomp.Equal, Value: fiemap})},
		{Name: "prctl", Conditions: must(seccomp.Condition{Argument: 0, Operation: seccomp.Equal, Value: unix.PR_SET_VMA})},
		{Name: "prctl", Conditions: must(seccomp.Condition{Argument: 0, Operation: seccomp.Equal, Value: unix.PR_GET_NO_NEW_PRIVS})},
		{Name: "prctl", Conditions: must(seccomp.Condition{Argument: 0, Operation: seccomp.Equal, Value: unix.PR_CAPBSET_READ})},
	}
	// The helper shares the file description of a pipe with the caller, so it must not change flags. It needs no locks,
	// leases and file seals.
	for _, command := range []uint64{unix.F_GETFL, unix.F_GETFD, unix.F_SETFD, unix.F_DUPFD_CLOEXEC} {
		allow = append(allow, seccomp.NameWithConditions{Name: "fcntl", Conditions: must(seccomp.Condition{Argument: 1, Operation: seccomp.Equal, Value: command})})
	}
	policy := seccomp.Policy{
		DefaultAction: seccomp.ActionErrno, // EPERM
		Syscalls: []seccomp.SyscallGroup{
			{Action: seccomp.ActionAllow, Names: known, NamesWithCondtions: allow},
			// The C library of test programs then calls clone, whose flags a filter can check.
			{Action: seccomp.ActionErrno | seccomp.Action(unix.ENOSYS), Names: []string{"clone3"}},
		},
	}
	if err := seccomp.LoadFilter(seccomp.Filter{NoNewPrivs: true, Flag: seccomp.FilterFlagTSync, Policy: policy}); err != nil {
		return fmt.Errorf("filter system calls: %w", err)
	}
	return nil
}
