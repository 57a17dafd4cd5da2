package runner

import (
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
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
	x := newExpectation(t)
	bad := &spoiler{Blobs: x.blobs, seen: map[int64]bool{}}
	b := x.runner(func(c *Config) { c.Store.Blobs = bad })
	root := make([]byte, 8<<20)
	if _, err := rand.NewChaCha8([32]byte{9}).Read(root); err != nil {
		t.Fatal(err)
	}
	snapshot, err := snapshotstore.Open(t.Context(), x.blobs, refOf(x.forge(x.a, x.c, root)))
	if err != nil {
		t.Fatal(err)
	}
	bad.mu.Lock()
	bad.spoil = true
	bad.mu.Unlock()
	tree := snapshot.Image(imageRoot)
	data := dataBytes(tree.Runs())
	const rest = 1 << 20
	v, err := b.room.Reserve(data + rest)
	if err != nil {
		t.Fatal(err)
	}
	defer v.Release()
	f := &fetching{r: b.Runner, room: v}
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
