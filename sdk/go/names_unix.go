//go:build unix

package coppice

import (
	"io/fs"
	"os"
	"syscall"
)

// names is how many names a file has; 0 where that is not known.
func names(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink) //nolint:unconvert // its type differs between systems
	}
	return 0
}

// owned says whether a file belongs to the user of this process.
func owned(info fs.FileInfo) bool {
	st, ok := info.Sys().(*syscall.Stat_t)
	return ok && int(st.Uid) == os.Geteuid()
}
