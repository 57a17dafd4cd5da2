package runner

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// TestFullHostDisk fills the disk of the host: the guest's write is an I/O error, and its machine goes on.
func TestFullHostDisk(t *testing.T) { //nolint:paralleltest // its machines take both CPUs
	r := newRig(t, func(*Config) {})
	s := r.fork(r.template())
	r.sh(s, "dd if=/dev/urandom of=disk bs=1M count=1 oflag=direct status=none")
	path := filepath.Join(r.cfg.DataDir, "filler")
	filler, err := os.Create(path)
	if err != nil {
		t.Fatal(err)
	}
	for size := int64(1 << 30); size >= 4096; { // whole, then what is left of it
		at, err := filler.Seek(0, 2)
		if err != nil {
			t.Fatal(err)
		}
		switch err := unix.Fallocate(int(filler.Fd()), 0, at, size); {
		case errors.Is(err, unix.ENOSPC):
			size /= 2
		case err != nil:
			t.Fatal(err)
		}
	}
	if err := filler.Close(); err != nil {
		t.Fatal(err)
	}
	said := r.sh(s, "dd if=/dev/urandom of=disk bs=1M seek=1 count=8 oflag=direct conv=notrunc 2>&1 || true")
	if !strings.Contains(strings.ToLower(said), "error") {
		t.Errorf("a write to a full disk: %q", said)
	}
	if running, err := r.sandboxes[s].machine.Running(t.Context()); err != nil || !running {
		t.Errorf("after the error the machine runs: %v, %v", running, err)
	}
	if err := os.Remove(path); err != nil {
		t.Fatal(err)
	}
	r.sh(s, "dd if=/dev/urandom of=/dev/shm/x bs=1M count=1 status=none")
}
