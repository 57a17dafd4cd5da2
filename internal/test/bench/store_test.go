package main

import (
	"bytes"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/bench/report"
	"github.com/coppice-dev/coppice/internal/test/tests3"
	"github.com/coppice-dev/coppice/snapshotstore/blob/bloburl"
	"github.com/coppice-dev/coppice/snapshotstore/blob/s3"
)

// TestDiffering splits an image into differences and puts it together again.
func TestDiffering(t *testing.T) {
	t.Parallel()
	before := bytes.Repeat([]byte{1}, 5*pageSize)
	now := bytes.Clone(before)
	now[pageSize] = 2
	clear(now[4*pageSize:])
	d := differing(before, now)
	if len(d.pages) != 2 || d.pages[0] != 1 || d.pages[1] != 4 || len(d.ranges()) != 2 {
		t.Errorf("pages %v differ, want 1 and 4", d.pages)
	}
	if d.to(before); !bytes.Equal(before, now) {
		t.Error("a step does not lead to what comes after it")
	}
}

// TestStoreReplay measures the store alone with a small history, on a real server.
func TestStoreReplay(t *testing.T) {
	t.Parallel()
	server := tests3.Start(t)
	store, err := bloburl.Open(t.Context(), server.URL(server.Bucket(t)), s3.Credentials{AccessKey: server.AccessKey, SecretKey: server.SecretKey})
	if err != nil {
		t.Fatal(err)
	}
	defer store.Close()
	random := rand.New(rand.NewPCG(1, 2))
	image := func(pages int) []byte { // half of each page compresses
		b := make([]byte, pages*pageSize)
		for i := range b {
			if i/(pageSize/2)%2 == 0 {
				b[i] = byte(random.Uint32())
			}
		}
		return b
	}
	h := history{first: image(256)}
	for range 4 {
		d := pageSet{bytes: image(32)}
		for i := range 32 {
			d.pages = append(d.pages, int64(i*8))
		}
		h.steps = append(h.steps, d)
	}
	r := &storeReport{Body: report.NewBody()}
	b := &storeBench{cfg: storeConfig{depth: len(h.steps), reads: 3}, report: r, dir: t.TempDir(), say: t.Logf}
	if err := b.replay(t.Context(), &replay{blobs: store, dir: b.dir, project: core.NewID[core.ProjectID]()}, h); err != nil {
		t.Fatal(err)
	}
	if v := r.Ratios["stored_over_dirty"]; v < 0.5 || v > 0.7 {
		t.Errorf("%.3f of what differs was stored, want half and what the map takes", v)
	}
	if r.Ratios["depth_64_over_1"] <= 0 || len(r.Aims) != 2 {
		t.Errorf("%+v", r)
	}
	var out strings.Builder
	if err := r.show(&out); err != nil || !strings.Contains(out.String(), "stored_over_dirty") {
		t.Errorf("%v\n%s", err, &out)
	}
}
