package vmmproc

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// The fields of struct seccomp_data that a filter reads, on a little-endian machine.
const (
	dataNumber = 0
	dataArch   = 4
	dataAdvice = 16 + 2*8 // the third argument's lower half
)

// archOf are the architectures on which the advice is ignored, with their names for the kernel.
var archOf = map[string]uint32{"amd64": unix.AUDIT_ARCH_X86_64, "arm64": unix.AUDIT_ARCH_AARCH64}

// ignoreHugePages makes madvise for huge pages a no-op that succeeds, for this thread and the processes that it starts.
// QEMU gives this advice for all of a guest's memory; for a mapped file, it makes the kernel read 2 to 4 MiB around
// each missing page (docs/adr/0039-a-rehearsal.md). Everything else is allowed: other filters bound a VMM. It needs
// no_new_privs.
func ignoreHugePages() error {
	arch, known := archOf[runtime.GOARCH]
	if !known {
		return nil
	}
	const load, equal, give = unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, unix.BPF_RET | unix.BPF_K
	filter := []unix.SockFilter{
		{Code: load, K: dataArch},
		{Code: equal, K: arch, Jf: 5},
		{Code: load, K: dataNumber},
		{Code: equal, K: unix.SYS_MADVISE, Jf: 3},
		{Code: load, K: dataAdvice},
		{Code: equal, K: unix.MADV_HUGEPAGE, Jf: 1},
		{Code: give, K: unix.SECCOMP_RET_ERRNO}, // errno 0: success
		{Code: give, K: unix.SECCOMP_RET_ALLOW},
	}
	program := unix.SockFprog{Len: uint16(len(filter)), Filter: &filter[0]}
	if err := unix.Prctl(unix.PR_SET_SECCOMP, unix.SECCOMP_MODE_FILTER, uintptr(unsafe.Pointer(&program)), 0, 0); err != nil {
		return fmt.Errorf("filter advice about memory: %w", err)
	}
	runtime.KeepAlive(filter)
	return nil
}
