//go:build !unix

package coppice

import "io/fs"

// names is how many names a file has; 0 where that is not known.
func names(fs.FileInfo) uint64 { return 0 }
