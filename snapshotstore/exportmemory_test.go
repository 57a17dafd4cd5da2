package snapshotstore_test

import (
	"context"
	"io"
	"math/rand/v2"
	"runtime"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

// heapPeak measures the heap whenever a pack is stored.
type heapPeak struct {
	blob.Blobs
	peak atomic.Uint64
	puts atomic.Int64
}

func (h *heapPeak) Put(ctx context.Context, key string, body io.ReaderAt, size int64, digest core.Digest) error {
	h.puts.Add(1)
	err := h.Blobs.Put(ctx, key, body, size, digest)
	runtime.GC()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	h.peak.Store(max(h.peak.Load(), m.HeapAlloc))
	return err
}

// TestExportMemory: exporting and importing a file of 128 MiB takes little memory. Not parallel: it measures the heap
// of the whole process.
func TestExportMemory(t *testing.T) { //nolint:paralleltest // other tests allocate, too
	x, y := newRig(t), newRig(t)
	const size = 128 << 20
	src := snapshotstore.Source{Name: "memory", Size: size, Changed: []snapshotstore.Range{{Offset: 0, Length: size}}, Read: func(p []byte, off int64) error {
		key := [32]byte{byte(off >> 12), byte(off >> 20), byte(off >> 28)}
		_, err := rand.NewChaCha8(key).Read(p)
		return err
	}}
	w := x.sealAll(nil, src)
	s, err := snapshotstore.Open(t.Context(), x.store(), w.Manifest)
	if err != nil {
		t.Fatal(err)
	}
	e, err := snapshotstore.NewExport(s, "dev")
	if err != nil {
		t.Fatal(err)
	}
	to := &heapPeak{Blobs: y.blobs}
	y.blobs = to
	runtime.GC()
	var before runtime.MemStats
	runtime.ReadMemStats(&before)
	r, out := io.Pipe()
	done := make(chan error, 1)
	go func() {
		err := e.Write(t.Context(), x.store(), out)
		_ = out.CloseWithError(err)
		done <- err
	}()
	if _, _, err := y.importFile(r, "v1/a/b/1/"); err != nil {
		t.Fatal(err)
	}
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	most := int64(to.peak.Load()) - int64(before.HeapAlloc)
	t.Logf("%d bytes in %d objects; the heap was at most %d MiB larger", e.Size(), to.puts.Load(), most>>20)
	if most > 64<<20 || to.puts.Load() < 8 {
		t.Errorf("%d objects; the heap was %d bytes larger", to.puts.Load(), most)
	}
}
