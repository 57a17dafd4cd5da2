package memdir

import (
	"os"
	"testing"
)

// TestDir: a TMPDIR of the user's stays.
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
	t.Logf("files in memory go to %q", dir)
}
