//go:build unix

package coppice

import (
	"io/fs"
	"os"
	"syscall"
)

// names returns how many names a file has; 0 if that is unknown.
func names(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink) //nolint:unconvert // its type differs between systems
	}
	return 0
}

// owned reports whether a file belongs to the user of this process.
func owned(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid()
}
