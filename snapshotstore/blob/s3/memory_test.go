package s3

import (
	"io"
	"runtime"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/tests3"
)

// zeros are bytes that take no memory.
type zeros struct{}

// ReadAt implements io.ReaderAt.
func (zeros) ReadAt(p []byte, _ int64) (int, error) {
	clear(p)
	return len(p), nil
}

// TestMemoryIsBounded puts an object of many parts and counts the allocated memory. It runs before the parallel tests.
func TestMemoryIsBounded(t *testing.T) { //nolint:paralleltest // other tests allocate, too
	const size = 12 * partSize
	server := tests3.Start(t)
	s := open(t, server, server.Address, server.Bucket(t), "")
	digest, _, err := core.DigestReader(io.NewSectionReader(zeros{}, 0, size))
	if err != nil {
		t.Fatal(err)
	}
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	if err := s.Put(t.Context(), object, zeros{}, size, digest); err != nil {
		t.Fatal(err)
	}
	runtime.ReadMemStats(&after)
	const most = (senders + 1) * partSize // one part for everything else
	got := after.TotalAlloc - before.TotalAlloc
	t.Logf("%d MiB for an object of %d MiB", got>>20, size>>20)
	if got > most {
		t.Errorf("%d bytes were allocated, want %d at most", got, most)
	}
}
