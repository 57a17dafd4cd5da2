package snapshotstore_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// TestFramesThatACheckRemembers: a check remembers a limited number of frames, also within one checkpoint. It reads a
// forgotten frame again and accepts it again.
func TestFramesThatACheckRemembers(t *testing.T) {
	t.Parallel()
	const most = 5
	x := newRig(t)
	m := newImage(4 << 20)
	for i := range m.size / page {
		m.pages[i] = content(rand.New(rand.NewPCG(1, uint64(i)))) // a frame of its own for every few pages
	}
	w := x.seal(nil, nil, m, m.whole())
	c := snapshotstore.NewChecker(x.store(), snapshotstore.Whole)
	if n := c.Remember(most); n != snapshotstore.MaxSeen {
		t.Errorf("a checker remembers %d frames, want %d", n, snapshotstore.MaxSeen)
	}
	var frames int64
	for round := range 2 {
		faults, err := c.Check(t.Context(), w.Manifest)
		if err != nil || len(faults) > 0 {
			t.Fatal(faults, err)
		}
		if n := c.Seen(); n > most {
			t.Errorf("the checker remembers %d frames, and %d are allowed", n, most)
		}
		if round == 0 {
			frames = c.Frames
		}
	}
	if frames < 3*most || c.Frames <= frames+frames-most-1 {
		t.Errorf("%d frames were read, then %d: want more than %d, and all but %d again", frames, c.Frames-frames, 3*most, most)
	}
}

// TestHeaderOfAnExport: a file with a header of 64 KiB is read. With one more byte, it is refused before the header is
// read.
func TestHeaderOfAnExport(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	m := newImage(1 << 20)
	m.write(rand.New(rand.NewPCG(5, 6)), 10)
	s, err := snapshotstore.Open(t.Context(), x.store(), x.seal(nil, nil, m, m.whole()).Manifest)
	if err != nil {
		t.Fatal(err)
	}
	named := func(n int) string { // a header of n bytes
		around := len(`{"format":1,"image_name":""}`)
		return strings.Repeat("n", n-around)
	}
	e, err := snapshotstore.NewExport(s, named(snapshotstore.MaxExportHeader))
	if err != nil {
		t.Fatal(err)
	}
	var file bytes.Buffer
	if err := e.Write(t.Context(), x.store(), &file); err != nil {
		t.Fatal(err)
	}
	if _, err := snapshotstore.ReadImport(&file); err != nil {
		t.Errorf("a header of %d bytes: %v", snapshotstore.MaxExportHeader, err)
	}
	if _, err := snapshotstore.NewExport(s, named(snapshotstore.MaxExportHeader+1)); core.CodeOf(err) != core.CodeInternal {
		t.Errorf("a header of %d bytes was written: %v", snapshotstore.MaxExportHeader+1, err)
	}
	long := exported(`{"format":1,"image_name":"`+named(snapshotstore.MaxExportHeader+1)+`"}`, nil)
	r := &countedReader{r: bytes.NewReader(long)}
	if _, err := snapshotstore.ReadImport(r); core.CodeOf(err) != core.CodeImportInvalid || r.n > 16 {
		t.Errorf("a header of %d bytes: %v, after %d bytes", snapshotstore.MaxExportHeader+1, err, r.n)
	}
}

// countedReader counts the bytes that are read from it.
type countedReader struct {
	r io.Reader
	n int
}

func (c *countedReader) Read(b []byte) (int, error) {
	n, err := c.r.Read(b)
	c.n += n
	return n, err
}

// aliases is a store in which one manifest has several keys.
type aliases struct {
	blob.Blobs
	key string
}

func (a aliases) Get(ctx context.Context, key string, off, n int64) (io.ReadCloser, error) {
	if strings.HasPrefix(key, "alias-") {
		key = a.key
	}
	return a.Blobs.Get(ctx, key, off, n)
}

// TestNodesOfSharedManifests: a manifest and the manifests that it shares nodes with have at most 256 MiB of nodes
// together.
func TestNodesOfSharedManifests(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	h := manifest.Header{
		ProjectID: x.project, CheckpointID: core.NewID[core.CheckpointID](), CapturedAt: "2026-11-22T12:00:00Z", GuestImage: core.DigestOf([]byte("image")),
		Class: map[string]string{"arch": "amd64"}, Resources: core.Resources{VCPUs: 1, MemoryMiB: 128, DiskGiB: 1},
	}
	put := func(key string, h manifest.Header, nodes manifest.Nodes) manifest.Ref {
		b, err := manifest.Encode(h, nodes)
		if err != nil {
			t.Fatal(err)
		}
		ref := manifest.Ref{Key: key, Digest: core.DigestOf(b), Bytes: int64(len(b))}
		if err := x.blobs.Put(t.Context(), key, bytes.NewReader(b), ref.Bytes, ref.Digest); err != nil {
			t.Fatal(err)
		}
		return ref
	}
	const each = 33 << 20
	nodes := make(manifest.Nodes)
	for i := range each / (64 << 10) {
		b := make([]byte, 64<<10)
		_, _ = rand.NewChaCha8([32]byte{byte(i), byte(i >> 8)}).Read(b[:2<<10]) // the rest compresses, but within the limit for nodes
		nodes[sha256.Sum256(b)] = b
	}
	large := put("v1/large/manifest", h, nodes)
	store := aliases{x.blobs, large.Key}
	for i := range manifest.MaxShared {
		h.Shared = append(h.Shared, manifest.Ref{Key: fmt.Sprintf("alias-%d", i), Digest: large.Digest, Bytes: large.Bytes})
	}
	_, err := snapshotstore.Open(t.Context(), store, put("v1/all/manifest", h, nil))
	if core.CodeOf(err) != core.CodeManifestInvalid || !strings.Contains(core.MessageOf(err), "too many nodes to be read") {
		t.Errorf("%d manifests with %d MiB of nodes each: %v", len(h.Shared), each>>20, err)
	}
}
