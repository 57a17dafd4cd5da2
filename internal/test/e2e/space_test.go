package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// TestSpaceComesBack fills checkpoints with what cannot be compressed or shared, deletes them with all that grew from them, and looks at
// the free bytes of the file system that the runner's files are on.
func TestSpaceComesBack(t *testing.T) {
	s := theStack(t)
	ctx := t.Context()
	ws := forkOne(t, s, seed(t))
	const blob = 16 // MiB each
	before := freeBytes(t, s)
	var top coppice.CheckpointID
	for i := range 3 {
		command := fmt.Sprintf("dd if=/dev/urandom of=/root/blob%d bs=1M count=%d conv=fsync status=none", i, blob)
		if res, err := s.client.Exec(ctx, ws, coppice.ExecRequest{Command: []string{"sh", "-c", command}}); err != nil || res.ExitCode != 0 {
			t.Fatalf("%+v, %v", res, err)
		}
		if cp := checkpoint(t, s, ws); top == "" {
			top = cp.ID
		}
	}
	if _, err := s.client.TerminateWorkspace(ctx, ws); err != nil {
		t.Fatal(err)
	}
	full := freeBytes(t, s)
	used := before - full
	plan, err := s.client.DeleteCheckpoints(ctx, top, true, true)
	if err != nil || len(plan.Items) != 3 || plan.Bytes < used {
		t.Fatalf("plan: %+v, %v; %d bytes are used", plan, err, used)
	}
	if used < 3*blob<<20 {
		t.Errorf("the checkpoints take %d bytes; %d were written", used, 3*blob<<20)
	}
	if _, err := s.client.DeleteCheckpoints(ctx, top, true, false); err != nil {
		t.Fatal(err)
	}
	// The file system frees extents behind the deletion, and others' files grow by a little.
	const slack = 8 << 20
	wait, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for freeBytes(t, s) < before-slack {
		select {
		case <-tick.C:
		case <-wait.Done():
			t.Fatalf("free: %d bytes before, %d with the checkpoints, %d after", before, full, freeBytes(t, s))
		}
	}
	t.Logf("free: %d bytes before, %d with three checkpoints, %d after", before, full, freeBytes(t, s))
}

// freeBytes asks the file system of the runner's volume, after it has written back what it holds.
func freeBytes(t *testing.T, s *stack) int64 {
	t.Helper()
	fd, err := unix.Open(filepath.Join(s.data, "volume"), unix.O_RDONLY|unix.O_CLOEXEC, 0)
	if errors.Is(err, unix.ENOENT) { // the data directory's own file system has reflinks
		fd, err = unix.Open(s.data, unix.O_RDONLY|unix.O_CLOEXEC, 0)
	}
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = unix.Close(fd) }()
	if err := unix.Syncfs(fd); err != nil {
		t.Fatal(err)
	}
	var st unix.Statfs_t
	if err := unix.Fstatfs(fd, &st); err != nil {
		t.Fatal(err)
	}
	return int64(st.Bfree) * st.Bsize
}
