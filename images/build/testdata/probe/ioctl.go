package main

import (
	"os"
	"unsafe"

	"golang.org/x/sys/unix"
)

// EXT4_IOC_RESIZE_FS, _IOW('f', 16, __u64).
const ext4Resize = 0x40086610

func ioctlResize(f *os.File, blocks uint64) error {
	if _, _, errno := unix.Syscall(unix.SYS_IOCTL, f.Fd(), ext4Resize, uintptr(unsafe.Pointer(&blocks))); errno != 0 {
		return errno
	}
	return nil
}
