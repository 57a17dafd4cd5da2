package fetch

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"math/rand/v2"
	"runtime"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// spoiler is a store whose first read of each range gives one byte that is not what it was.
type spoiler struct {
	blob.Blobs

	mu    sync.Mutex // guards what follows
	spoil bool
	seen  map[int64]bool
}

func (s *spoiler) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	r, err := s.Blobs.Get(ctx, key, off, n)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil || !s.spoil || s.seen[off] {
		return r, err
	}
	s.seen[off] = true
	b, err := io.ReadAll(r)
	if len(b) > 0 {
		b[len(b)-1] ^= 1 // of the last frame: those before it are good, and given twice
	}
	_ = r.Close()
	return io.NopCloser(bytes.NewReader(b)), err
}

// TestReservationLasts: neither zeros nor pages that are read twice use up what is reserved for what is still to be written.
func TestReservationLasts(t *testing.T) {
	t.Parallel()
	root := make([]byte, 8<<20)
	if _, err := rand.NewChaCha8([32]byte{9}).Read(root); err != nil {
		t.Fatal(err)
	}
	blobs, err := dir.Open(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	h := manifest.Header{
		ProjectID: core.NewID[core.ProjectID](), CheckpointID: core.NewID[core.CheckpointID](), CapturedAt: time.Now().UTC().Format(time.RFC3339Nano),
		GuestImage: core.DigestOf(root), Class: map[string]string{"vmm": "none"}, Resources: core.Resources{VCPUs: 1, MemoryMiB: 8, DiskGiB: 1},
	}
	out, err := snapshotstore.Write(t.Context(), blobs, fmt.Sprintf("v1/%s/%s/1/", h.ProjectID, h.CheckpointID), h, nil, []snapshotstore.Source{{
		Name: runnerapi.ImageRoot, Size: int64(len(root)), Changed: []snapshotstore.Range{{Offset: 0, Length: int64(len(root))}},
		Read: func(p []byte, off int64) error {
			clear(p[copy(p, root[min(off, int64(len(root))):]):])
			return nil
		},
	}}, snapshotstore.Options{Dir: t.TempDir()})
	if err != nil {
		t.Fatal(err)
	}
	bad := &spoiler{Blobs: blobs, seen: map[int64]bool{}}
	snapshot, err := snapshotstore.Open(t.Context(), blobs, manifest.Ref{Key: out.Manifest.Key, Digest: out.Manifest.Digest, Bytes: out.Manifest.Bytes})
	if err != nil {
		t.Fatal(err)
	}
	bad.mu.Lock()
	bad.spoil = true
	bad.mu.Unlock()
	tree := snapshot.Image(runnerapi.ImageRoot)
	data := dataBytes(tree.Runs())
	const rest = 1 << 20
	v, err := room.New(t.TempDir(), 1).Reserve(data + rest)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Release()
	f := &fetching{Fetcher: New(Config{Blobs: bad}), room: v}
	var mu sync.Mutex
	var given int64
	runs := func(yield func(manifest.Run) bool) {
		if !yield(manifest.Run{Page: tree.Pages(), Count: 64}) { // zeros
			return
		}
		tree.Runs()(yield)
	}
	if err := f.pages(t.Context(), runs, func(_ int64, p []byte) error {
		mu.Lock()
		defer mu.Unlock()
		given += int64(len(p))
		return nil
	}); err != nil {
		t.Fatal(err)
	}
	if given <= data+64*manifest.PageSize {
		t.Errorf("%d bytes were given, of %d: nothing was read twice", given, data)
	}
	if left := v.Bytes(); left < rest {
		t.Errorf("%d bytes are left of the reservation, and %d are still to be written", left, int64(rest))
	}
}

// TestPageCountOfMuchMemory: what a fetch remembers of the pages that it writes is a small part of them, and each counts once.
func TestPageCountOfMuchMemory(t *testing.T) { //nolint:paralleltest // it measures what this process allocates
	const pages, zeros, each = 32 << 30 / manifest.PageSize, 1000, 3001
	runs := func(yield func(manifest.Run) bool) {
		if !yield(manifest.Run{Page: 0, Count: zeros}) {
			return
		}
		frame := new(manifest.Frame)
		for page := int64(zeros); page < pages; page += each {
			if !yield(manifest.Run{Page: page, Count: int(min(each, pages-page)), Frame: frame}) {
				return
			}
		}
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	c := newPageCount()
	for range c.data(runs) {
	}
	runtime.ReadMemStats(&after)
	if n := after.TotalAlloc - before.TotalAlloc; n > 4<<20 {
		t.Errorf("a fetch of 32 GiB allocates %d KiB to count its pages", n>>10)
	}
	var counted int64
	for range 2 {
		for page := int64(0); page < pages; page += 1024 {
			counted += c.count(page, 1024*manifest.PageSize)
		}
	}
	if want := int64(pages-zeros) * manifest.PageSize; counted != want {
		t.Errorf("%d bytes were counted, of %d", counted, want)
	}
	if n := c.count(pages+5, 1); n != 0 {
		t.Errorf("%d bytes of a page that no run has were counted", n)
	}
}
