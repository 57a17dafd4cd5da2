package runner

import (
	"bytes"
	"context"
	"io"
	"os"
	"path/filepath"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
)

// TestExportFromHost: a host without a store writes a checkpoint as one file, from which another cluster forks a machine with the same memory,
// disk and devices. The host keeps nothing of an export, whatever its end, and makes two at once.
func TestExportFromHost(t *testing.T) {
	t.Parallel()
	r := newFakeRig(t, func(*Config) {})
	id := r.capture(r.fork(r.capture(r.fork(r.boot())))) // memory in a base and a delta
	in := runnerapi.ExportCheckpoint{ProjectID: core.NewID[core.ProjectID](), ImageName: "debian"}
	nothingLeft := func(when string) {
		t.Helper()
		left, err := os.ReadDir(filepath.Join(r.cfg.DataDir, "exports"))
		if err != nil || len(left) > 0 {
			t.Errorf("%s: %d directories are left, %v", when, len(left), err)
		}
	}
	var file bytes.Buffer
	var size int64
	to := func(n int64) io.Writer {
		size = n
		return &file
	}
	if err := r.Export(t.Context(), id, in, to); err != nil {
		t.Fatal(err)
	}
	if size != int64(file.Len()) {
		t.Errorf("%d bytes were announced, and %d sent", size, file.Len())
	}
	nothingLeft("after an export")

	p := newSealPool(t)
	im, err := snapshotstore.ReadImport(&file)
	if err != nil {
		t.Fatal(err)
	}
	if im.Export.ImageName != "debian" || im.Manifest.CheckpointID != id || im.Manifest.ProjectID != in.ProjectID {
		t.Errorf("%+v %+v", im.Export, im.Manifest)
	}
	h := im.Manifest
	stored, err := im.Store(t.Context(), p.blobs, "v1/imported/1/", nil, h)
	if err != nil {
		t.Fatal(err)
	}
	b := p.runner(nil)
	at := runnerapi.Stored{CheckpointID: id, Manifest: stored.Manifest.Key, Digest: stored.Manifest.Digest, Bytes: stored.Manifest.Bytes}
	out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{b.child()}, Sources: []runnerapi.Stored{at}})
	if err != nil || out.Children[0].Problem != nil {
		t.Fatalf("%+v, %v", out, err)
	}
	wantSame(t, r, b, id)

	never := func(int64) io.Writer { t.Error("a file was announced"); return io.Discard }
	if err := r.Export(t.Context(), core.NewID[core.CheckpointID](), in, never); core.CodeOf(err) != core.CodeCheckpointNotFound {
		t.Errorf("an unknown checkpoint: %v", err)
	}
	nothingLeft("after an unknown checkpoint")
	ctx, cancel := context.WithCancel(t.Context())
	if err := r.Export(ctx, id, in, func(int64) io.Writer { cancel(); return io.Discard }); err == nil {
		t.Error("an export goes on without its reader")
	}
	nothingLeft("after a reader that left")

	first, second := make(chan struct{}), make(chan struct{})
	done := make(chan error, 2)
	for _, begun := range []chan struct{}{first, second} {
		go func() {
			done <- r.Export(t.Context(), id, in, func(int64) io.Writer {
				begun <- struct{}{}
				<-begun
				return io.Discard
			})
		}()
	}
	<-first
	<-second
	if err := r.Export(t.Context(), id, in, never); core.CodeOf(err) != core.CodeCapacity {
		t.Errorf("the third at once: %v", err)
	}
	first <- struct{}{}
	second <- struct{}{}
	for range 2 {
		if err := <-done; err != nil {
			t.Error(err)
		}
	}
	nothingLeft("at the end")
}
