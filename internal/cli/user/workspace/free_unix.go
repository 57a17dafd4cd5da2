//go:build unix

package workspace

import "golang.org/x/sys/unix"

// freeBytes is what this user may still write on the file system of a path.
func freeBytes(path string) (int64, bool) {
	var st unix.Statfs_t
	if err := unix.Statfs(path, &st); err != nil {
		return 0, false
	}
	return int64(st.Bavail) * int64(st.Bsize), true //nolint:unconvert,gosec // the types differ between systems
}
