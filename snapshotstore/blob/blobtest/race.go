package blobtest

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
)

const (
	writers = 8
	rounds  = 20
)

func testRacingWriters(t *testing.T, s Store) {
	t.Helper()
	for round := range rounds {
		race(t, s, fmt.Sprintf("race/%d", round), small)
	}
	clean(t, s)
}

func testRacingLargeWriters(t *testing.T, s Store) {
	t.Helper()
	race(t, s, "race/large", 17<<20)
	clean(t, s)
}

// race lets writers put four kinds of bytes under one key while others read it. The writers of one kind succeed, all
// others get ErrExists, and every reader sees only the winner's bytes.
func race(t *testing.T, s Store, key string, size int) {
	t.Helper()
	kinds := make([][]byte, writers/2)
	for i := range kinds {
		kinds[i] = Bytes(uint64(100+i), size)
	}
	errs := make([]error, writers)
	var seen [2][]byte
	begin, done := make(chan struct{}), make(chan struct{})
	var writing, reading sync.WaitGroup
	for i := range errs {
		writing.Go(func() {
			<-begin
			errs[i] = Put(t.Context(), s, key, kinds[i%len(kinds)])
		})
	}
	for i := range seen {
		reading.Go(func() {
			<-begin
			for last := false; ; {
				got, err := Get(t.Context(), s, key, 0, int64(size)+1)
				switch {
				case errors.Is(err, blob.ErrNotFound) && seen[i] == nil && !last:
				case err != nil:
					t.Errorf("a reader: %v", err)
					return
				case seen[i] == nil:
					seen[i] = got
				case !bytes.Equal(got, seen[i]):
					t.Errorf("a reader saw the object change")
					return
				}
				if last {
					return
				}
				select {
				case <-done:
					last = true
				default:
				}
			}
		})
	}
	close(begin)
	writing.Wait()
	close(done)
	reading.Wait()
	winner := -1
	for i, kind := range kinds {
		if bytes.Equal(seen[0], kind) && bytes.Equal(seen[1], kind) {
			winner = i
		}
	}
	if winner < 0 {
		t.Fatalf("%s: readers saw nobody's bytes", key)
	}
	for i, err := range errs {
		if won := i%len(kinds) == winner; won && err != nil || !won && !errors.Is(err, blob.ErrExists) {
			t.Errorf("%s: writer %d, who won: %v, got %v", key, i, won, err)
		}
	}
}

// testRacingDeletes puts and deletes neighbouring objects at the same time: nothing fails, and the last Put of each
// object counts.
func testRacingDeletes(t *testing.T, s Store) {
	t.Helper()
	var g errgroup.Group
	for i := range writers {
		g.Go(func() error {
			key := fmt.Sprintf("shared/dir/%d", i)
			for range rounds {
				if err := Put(t.Context(), s, key, []byte(key)); err != nil {
					return err
				}
				if err := s.Delete(t.Context(), key); err != nil {
					return err
				}
			}
			return Put(t.Context(), s, key, []byte(key))
		})
	}
	if err := g.Wait(); err != nil {
		t.Fatal(err)
	}
	if got := Keys(t, s, ""); len(got) != writers {
		t.Errorf("%q are left", got)
	}
	clean(t, s)
}

// canceller cancels a context when its bytes have been read up to an offset.
type canceller struct {
	io.ReaderAt
	at     int64
	cancel context.CancelFunc
}

// ReadAt implements io.ReaderAt.
func (c canceller) ReadAt(p []byte, off int64) (int, error) {
	if off <= c.at && off+int64(len(p)) > c.at {
		c.cancel()
	}
	return c.ReaderAt.ReadAt(p, off)
}

func testCancelled(t *testing.T, s Store) {
	t.Helper()
	for _, c := range []struct{ size, at int64 }{{small, 0}, {10 << 20, 9 << 20}, {large, 0}, {large, 20 << 20}, {large, large - 1}} {
		key, data := fmt.Sprintf("cancelled/%d-%d", c.size, c.at), Bytes(12, int(c.size))
		ctx, cancel := context.WithCancel(t.Context())
		err := s.Put(ctx, key, canceller{bytes.NewReader(data), c.at, cancel}, c.size, core.DigestOf(data))
		cancel()
		switch {
		case err == nil: // the cancellation came too late
			holds(t, s, key, data)
		case !errors.Is(err, context.Canceled):
			t.Errorf("%s: got %v, want that it was cancelled", key, err)
		default:
			got, err := Get(t.Context(), s, key, 0, c.size+1) // the server may have received everything
			if !errors.Is(err, blob.ErrNotFound) && !bytes.Equal(got, data) {
				t.Errorf("%s: %d bytes of %d are there, %v", key, len(got), c.size, err)
			}
		}
		mustPut(t, s, key, data)
	}
	// A server may still be storing a part after its sender has gone, and may keep it although its upload was aborted
	// since.
	eventually.True(t, "a sweep leaves nothing", func() bool {
		if err := s.Sweep(t.Context(), time.Now().Add(time.Hour)); err != nil {
			t.Fatal(err)
		}
		return s.Leftovers(t) == 0
	})
	ctx, cancel := context.WithCancel(t.Context())
	r, err := s.Get(ctx, "cancelled/10485760-9437184", 0, 10<<20)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(r, make([]byte, 1000)); err != nil {
		t.Error(err)
	}
	cancel()
	if _, err := io.Copy(io.Discard, r); !errors.Is(err, context.Canceled) {
		t.Errorf("a read under a cancelled context: %v", err)
	}
	_ = r.Close()
}
