package snapshotstore_test

import (
	"bytes"
	"context"
	"io"
	"os"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// nowhere accepts objects and discards them.
type nowhere struct{ blob.Blobs }

func (nowhere) Put(_ context.Context, _ string, body io.ReaderAt, size int64, _ core.Digest) error {
	_, err := io.Copy(io.Discard, io.NewSectionReader(body, 0, size))
	return err
}

// BenchmarkWrite stores pages of a program's file, encrypted and unencrypted in turns, and reports how many MiB one
// core stores in a second.
func BenchmarkWrite(b *testing.B) {
	path, err := os.Executable()
	if err != nil {
		b.Fatal(err)
	}
	content, err := os.ReadFile(path)
	if err != nil {
		b.Fatal(err)
	}
	content = bytes.Repeat(content[:len(content)/page*page], 4)
	src := snapshotstore.Source{
		Name: "memory", Size: int64(len(content)), Changed: []snapshotstore.Range{{Offset: 0, Length: int64(len(content))}},
		Read: func(p []byte, off int64) error { copy(p, content[off:]); return nil },
	}
	h := manifest.Header{
		ProjectID: core.NewID[core.ProjectID](), CheckpointID: core.NewID[core.CheckpointID](), CapturedAt: "2026-11-22T12:00:00Z", GuestImage: core.DigestOf([]byte("image")),
		Class: map[string]string{"arch": "amd64"}, Resources: core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1},
	}
	cpu := func() float64 {
		var u unix.Rusage
		if err := unix.Getrusage(unix.RUSAGE_SELF, &u); err != nil {
			b.Fatal(err)
		}
		return float64(u.Utime.Nano()+u.Stime.Nano()) / 1e9
	}
	write := func(key *envelope.Key) (seconds float64, stored int64) {
		began := cpu()
		w, err := snapshotstore.Write(b.Context(), nowhere{}, "v1/p/c/1/", h, nil, []snapshotstore.Source{src}, snapshotstore.Options{Dir: b.TempDir(), Key: key})
		if err != nil {
			b.Fatal(err)
		}
		return cpu() - began, w.Stored
	}
	key := envelope.NewKey(core.NewDataKey(), 1)
	var plain, encrypted float64
	var storedPlain, storedEncrypted int64
	for b.Loop() {
		s, n := write(nil)
		plain, storedPlain = plain+s, n
		s, n = write(key)
		encrypted, storedEncrypted = encrypted+s, n
	}
	mib := float64(src.Size) * float64(b.N) / (1 << 20)
	b.ReportMetric(mib/plain, "clear-MiB/cpu-s")
	b.ReportMetric(mib/encrypted, "encrypted-MiB/cpu-s")
	b.ReportMetric(100*float64(storedEncrypted-storedPlain)/float64(storedPlain), "%-more-bytes")
}
