package peers

import (
	"bytes"
	"context"
	"errors"
	"io"
	"log/slog"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/blobtest"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

func TestMain(m *testing.M) { testleak.Main(m) }

const key = "v1/p/c/1/pack-0"

// counted counts the reads of a store.
type counted struct {
	blob.Blobs
	gets atomic.Int64
}

func (c *counted) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	c.gets.Add(1)
	return c.Blobs.Get(ctx, key, off, n)
}

// hosts answers like the peer that is asked.
type hosts struct {
	data  []byte
	asked map[core.RunnerID]*atomic.Int64
	waits time.Duration // how long the slow peer waited without being cancelled
}

var errDead = errors.New("connection refused")

func (h *hosts) Ask(ctx context.Context, p Peer, _ string, off, n int64) ([]byte, error) {
	h.asked[p.ID].Add(1)
	b := bytes.Clone(h.data[min(off, int64(len(h.data))):min(off+n, int64(len(h.data)))])
	switch p.ID {
	case "lying":
		b[0] ^= 1
	case "dead":
		return nil, errDead
	case "empty":
		return nil, blob.NotFound(key)
	case "slow":
		timer := time.NewTimer(h.waits)
		defer timer.Stop()
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-timer.C:
		}
	}
	return b, nil
}

// TestPeers reads a range three times, with peers of every kind. Each time it acts like a reader that knows the range's
// digest.
func TestPeers(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		peers []core.RunnerID
		asked []int64 // requests to each peer
		store int64   // reads from the store
		wrong int64
	}{
		"nobody":                 {nil, nil, 3, 0},
		"honest":                 {[]core.RunnerID{"honest"}, []int64{3}, 0, 0},
		"lying":                  {[]core.RunnerID{"lying", "honest"}, []int64{1, 0}, 3, 1},
		"dead":                   {[]core.RunnerID{"dead"}, []int64{1}, 3, 0},
		"dead beside another":    {[]core.RunnerID{"dead", "honest"}, []int64{1, 3}, 0, 0},
		"slow":                   {[]core.RunnerID{"slow"}, []int64{1}, 3, 0},
		"empty":                  {[]core.RunnerID{"empty"}, []int64{1}, 3, 0},
		"two without, and third": {[]core.RunnerID{"empty", "dead", "honest"}, []int64{1, 1, 2}, 1, 0},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			files, err := dir.Open(filepath.Join(t.TempDir(), "store"))
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(func() { _ = files.Close() })
			behind := &counted{Blobs: files}
			h := &hosts{data: blobtest.Bytes(1, 100_000), asked: map[core.RunnerID]*atomic.Int64{}, waits: time.Minute}
			if err := blobtest.Put(t.Context(), behind, key, h.data); err != nil {
				t.Fatal(err)
			}
			var list []Peer
			for _, id := range c.peers {
				list, h.asked[id] = append(list, Peer{ID: id}), new(atomic.Int64)
			}
			s, err := New(behind, h, slog.New(slog.DiscardHandler), prometheus.NewRegistry())
			if err != nil {
				t.Fatal(err)
			}
			ctx := With(t.Context(), list)
			for range 3 {
				got, err := blobtest.Get(ctx, s, key, 10_000, 50_000)
				if err == nil && !bytes.Equal(got, h.data[10_000:60_000]) {
					s.Forget(ctx, key, 10_000, 50_000)
					got, err = blobtest.Get(ctx, s, key, 10_000, 50_000)
				}
				if err != nil || !bytes.Equal(got, h.data[10_000:60_000]) {
					t.Fatalf("%d bytes, %v", len(got), err)
				}
			}
			for i, id := range c.peers {
				if n := h.asked[id].Load(); n != c.asked[i] {
					t.Errorf("%s was asked %d times, want %d", id, n, c.asked[i])
				}
			}
			if n := behind.gets.Load(); n != c.store {
				t.Errorf("%d reads of the store, want %d", n, c.store)
			}
			if n := s.count.wrong.Load(); n != c.wrong {
				t.Errorf("%d were wrong, want %d", n, c.wrong)
			}
		})
	}
}
