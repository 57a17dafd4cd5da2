package cache

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/require"
	"github.com/coppice-dev/coppice/snapshotstore/blob/blobtest"
)

// TestGivesWay fills the file system of a cache with other files: the cache evicts as much as they need, and uses room
// again that they leave.
func TestGivesWay(t *testing.T) {
	t.Parallel()
	require.Root(t)
	behind := files(t)
	fillStore(t, behind)
	path := t.TempDir()
	if err := unix.Mount("cache", path, "tmpfs", 0, "size=12m"); err != nil {
		t.Fatal(err)
	}
	inside := filepath.Join(path, "cache")
	c, err := Open(Config{Dir: inside, Budget: 1 << 30, Spare: 4 << 20, Behind: behind, Log: slog.New(slog.DiscardHandler)})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		c.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-done
		if err := errors.Join(c.Close(), unix.Unmount(path, 0)); err != nil {
			t.Error(err)
		}
	})
	read := func() {
		t.Helper()
		for i := range objects {
			key, data := object(i)
			if got, err := blobtest.Get(t.Context(), c, key, 0, objectSize); err != nil || !bytes.Equal(got, data) {
				t.Fatalf("%s: %d bytes, %v", key, len(got), err)
			}
		}
	}
	read()
	before, _ := taken(t, inside)
	other, err := os.Create(filepath.Join(path, "other"))
	if err != nil {
		t.Fatal(err)
	}
	const step = 2 << 20
	for size := int64(0); size < 5*step; size += step { // more than was free at the beginning
		eventually.True(t, "there is room for others again", func() bool {
			var st unix.Statfs_t
			return unix.Statfs(path, &st) == nil && int64(st.Bavail)*st.Bsize >= step
		})
		if err := unix.Fallocate(int(other.Fd()), 0, size, step); err != nil {
			t.Fatalf("others got %d bytes of 12 MiB, of which the cache had %d: %v", size, before, err)
		}
	}
	if n, _ := taken(t, inside); n >= before || before < 6<<20 {
		t.Errorf("%d bytes are taken, %d before", n, before)
	}
	read()
	if err := errors.Join(other.Close(), os.Remove(other.Name())); err != nil {
		t.Fatal(err)
	}
	read()
	if n, _ := taken(t, inside); n < before/2 {
		t.Errorf("with room again %d bytes are taken, %d before", n, before)
	}
}
