package snapshotstore_test

import (
	"log/slog"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testmetrics"
	"github.com/coppice-dev/coppice/snapshotstore/blob/cache"
)

// flip changes one bit in the middle of the data of every file in a directory.
func flip(t *testing.T, dir, pattern string) {
	t.Helper()
	paths, err := filepath.Glob(filepath.Join(dir, pattern))
	if err != nil || len(paths) == 0 {
		t.Fatalf("%q, %v", paths, err)
	}
	for _, path := range paths {
		f, err := os.OpenFile(path, os.O_RDWR, 0)
		if err != nil {
			t.Fatal(err)
		}
		info, err := f.Stat()
		if err != nil {
			t.Fatal(err)
		}
		b := make([]byte, 1)
		if _, err := f.ReadAt(b, info.Size()/2); err != nil {
			t.Fatal(err)
		}
		b[0] ^= 1
		if _, err := f.WriteAt(b, info.Size()/2); err != nil {
			t.Fatal(err)
		}
		if err := f.Close(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestRot changes bits in the host's cache, and then in the store. Wrong bytes in the cache are replaced and counted;
// in the store, they are CHECKPOINT_CORRUPT. When the store is repaired, reads succeed again.
func TestRot(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(21, 0))
	m := newImage(2 << 20)
	m.write(r, 400)
	ref := x.seal(nil, nil, m, m.whole()).Manifest
	counts, path, store := prometheus.NewRegistry(), filepath.Join(t.TempDir(), "cache"), x.blobs
	kept, err := cache.Open(cache.Config{Dir: path, Budget: 1 << 30, Behind: store, Log: slog.New(slog.DiscardHandler), Metrics: counts})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = kept.Close() })
	x.blobs = kept
	x.check(ref, "memory", m)
	flip(t, path, "[0-9a-f]*")
	for range 2 {
		x.check(ref, "memory", m)
		if rot := testmetrics.One(t, counts, "coppice_cache_rot_total"); rot != 2 {
			t.Errorf("%v reads of rot, want one of the manifest and one of the pack", rot)
		}
	}
	pack := strings.TrimSuffix(ref.Key, "manifest") + "pack-0"
	flip(t, filepath.Join(x.dir, filepath.Dir(pack)), "pack-0")
	x.check(ref, "memory", m) // the cache has the right bytes
	flip(t, path, "[0-9a-f]*")
	for range 2 {
		if _, _, err := x.load(ref, "memory"); core.CodeOf(err) != core.CodeCheckpointCorrupt || !strings.Contains(err.Error(), pack) {
			t.Fatalf("the store is corrupt: %v", err)
		}
	}
	flip(t, filepath.Join(x.dir, filepath.Dir(pack)), "pack-0")
	x.check(ref, "memory", m)
}
