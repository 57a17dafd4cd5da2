package memdir

import (
	"os"
	"testing"

	"golang.org/x/sys/unix"
)

// TestDir: a TMPDIR that is set stays; otherwise temporary files go to memory, if they go to the directory that Dir returned.
func TestDir(t *testing.T) { //nolint:paralleltest // the environment is the process's
	t.Setenv("TMPDIR", "/somewhere")
	if got := Dir(); got != "" {
		t.Errorf("TMPDIR is set, and files go to %q", got)
	}
	if err := os.Unsetenv("TMPDIR"); err != nil { // t.Setenv sets it again
		t.Fatal(err)
	}
	dir := Dir()
	if err := Use(); err != nil || os.Getenv("TMPDIR") != dir {
		t.Errorf("TMPDIR is %q, want %q (%v)", os.Getenv("TMPDIR"), dir, err)
	}
	if dir == "" {
		t.Log("this host has no directory in memory that tests may use")
		return
	}
	made, err := os.MkdirTemp("", "memdir-") //nolint:usetesting // it says where temporary files go
	if err != nil {
		t.Fatal(err)
	}
	defer os.Remove(made)
	var fs unix.Statfs_t
	if err := unix.Statfs(made, &fs); err != nil || fs.Type != unix.TMPFS_MAGIC {
		t.Errorf("%s is on a file system of type %#x, want a tmpfs (%v)", made, fs.Type, err)
	}
}
