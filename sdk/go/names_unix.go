//go:build unix

package coppice

import (
	"io/fs"
	"syscall"
)

// names is how many names a file has; 0 where that is not known.
func names(info fs.FileInfo) uint64 {
	if st, ok := info.Sys().(*syscall.Stat_t); ok {
		return uint64(st.Nlink) //nolint:unconvert // its type differs between systems
	}
	return 0
}
