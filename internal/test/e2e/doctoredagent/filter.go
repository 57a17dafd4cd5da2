//go:build linux

package main

import (
	"fmt"
	"runtime"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Offsets in struct seccomp_data: the number of the call, and the low half of its second argument.
const (
	callAt     = 0
	argument2  = 16 + 8
	allowCalls = unix.SECCOMP_RET_ALLOW
)

// filter makes the kernel do action instead of a system call whose second argument is one of those given, or whatever its
// arguments if none is given, for every thread of this process, for ever.
func filter(call uint32, second []uint32, action uint32) error {
	load := func(at uint32) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_LD | unix.BPF_W | unix.BPF_ABS, K: at}
	}
	jump := func(k uint32, yes, no uint8) unix.SockFilter {
		return unix.SockFilter{Code: unix.BPF_JMP | unix.BPF_JEQ | unix.BPF_K, K: k, Jt: yes, Jf: no}
	}
	ret := func(k uint32) unix.SockFilter { return unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K, K: k} }

	code := []unix.SockFilter{load(callAt), jump(call, 1, 0), ret(allowCalls)}
	if len(second) > 0 {
		code = append(code, load(argument2))
		for i, v := range second {
			code = append(code, jump(v, uint8(len(second)-i), 0)) // a handful
		}
		code = append(code, ret(allowCalls))
	}
	code = append(code, ret(action))

	prog := unix.SockFprog{Len: uint16(len(code)), Filter: &code[0]} // a handful
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, unix.SECCOMP_SET_MODE_FILTER, unix.SECCOMP_FILTER_FLAG_TSYNC, uintptr(unsafe.Pointer(&prog)))
	runtime.KeepAlive(code)
	if errno != 0 {
		return fmt.Errorf("install a seccomp filter: %w", errno)
	}
	return nil
}
