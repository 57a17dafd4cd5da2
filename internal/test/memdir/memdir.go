// Package memdir finds a directory whose files are in memory, for tests that make many small files and need them only while they run.
package memdir

import (
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/procfs"
)

// room is what must be free for Dir to return a directory: many tests use it at the same time.
const room = 8 << 30 // bytes

// Dir returns a directory whose files are in memory. It returns "" if TMPDIR is set, or if no such directory has enough room; os.MkdirTemp then
// uses the usual one. A PostgreSQL cluster and each of its databases are a thousand files: on a disk, tests that make many of them take
// twice the processor time.
func Dir() string {
	const dir = "/dev/shm"
	var fs unix.Statfs_t
	if os.Getenv("TMPDIR") != "" || unix.Statfs(dir, &fs) != nil || fs.Type != unix.TMPFS_MAGIC || fs.Bavail*uint64(fs.Bsize) < room { //nolint:gosec // G115: a size of blocks
		return ""
	}
	if fs.Flags&unix.MS_NOEXEC != 0 || limited() { // the flags of statfs are those of mount
		return ""
	}
	if kib, err := procfs.KiB("/proc/meminfo", "MemAvailable"); err != nil || kib < room>>10 {
		return ""
	}
	return dir
}

// limited reports whether the container of this process may use less memory than room. Files in memory count as memory.
func limited() bool {
	for _, file := range []string{"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"} {
		b, err := os.ReadFile(file)
		if err != nil {
			continue
		}
		if n, err := strconv.ParseUint(strings.TrimSpace(string(b)), 10, 64); err == nil && n < room {
			return true
		}
	}
	return false
}

// Use makes that directory the one for temporary files of this process and its children. Call it from TestMain.
func Use() error {
	if dir := Dir(); dir != "" {
		return os.Setenv("TMPDIR", dir)
	}
	return nil
}
