package main

import (
	"fmt"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/procfs"
)

// availableMiB is how much memory the host could still give away.
func availableMiB() (float64, error) {
	kib, err := procfs.KiB("/proc/meminfo", "MemAvailable")
	return float64(kib) / 1024, err
}

// usedMiB returns how much of the file system of dir is in use.
func usedMiB(dir string) (float64, error) {
	var fs unix.Statfs_t
	if err := unix.Statfs(dir, &fs); err != nil {
		return 0, fmt.Errorf("examine %s: %w", dir, err)
	}
	return float64(fs.Blocks-fs.Bfree) * float64(fs.Bsize) / mib, nil
}
