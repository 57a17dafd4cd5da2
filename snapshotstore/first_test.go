package snapshotstore_test

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// TestFirst: pages that readers ask for first are in frames of their own at the beginning, and reading them reads
// little else.
func TestFirst(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(41, 1))
	now := newImage(4096 * page)
	for p := range int64(4096) {
		now.pages[p] = content(r)
	}
	var first []snapshotstore.Range
	hot := map[int64]bool{}
	for p := int64(3); p < 4096; p += 1 + r.Int64N(60) {
		first = append(first, snapshotstore.Range{Offset: p*page + 7, Length: page / 2}) // a part of it is enough
		hot[p] = true
	}
	src := snapshotstore.Source{Name: "memory", Size: now.size, Changed: now.whole(), Read: now.read, First: first}
	w := x.sealAll(nil, src)
	if w.Dirty != now.size || w.Compared != now.size {
		t.Errorf("%d bytes compared and %d stored of %d", w.Compared, w.Dirty, now.size)
	}
	x.check(w.Manifest, "memory", now)
	tree := w.Snapshot.Image("memory")
	frames := map[*manifest.Frame]bool{}
	var end int64
	for p := range int64(4096) {
		frame := tree.At(p).Frame
		if hot[p] {
			frames[frame] = true
			end = max(end, frame.Offset+frame.Length)
		}
	}
	for p := range int64(4096) {
		if frames[tree.At(p).Frame] && !hot[p] {
			t.Fatalf("page %d, which is not asked for first, is in a frame with some that are", p)
		}
	}
	if want := (len(hot) + manifest.FramePages - 1) / manifest.FramePages; len(frames) != want {
		t.Errorf("%d pages are in %d frames, want %d", len(hot), len(frames), want)
	}
	var runs []manifest.Run
	for p := range hot {
		s := tree.At(p)
		runs = append(runs, manifest.Run{Page: p, Count: 1, Frame: s.Frame, Slot: s.Index})
	}
	got, err := snapshotstore.Fetch(t.Context(), x.store(), slices.Values(runs), snapshotstore.FetchOptions{}, func(int64, []byte) error { return nil })
	if most := int64(len(hot)) * page; err != nil || got.Bytes > most {
		t.Errorf("%d pages took %d bytes, %v", len(hot), got.Bytes, err)
	}
	if end > int64(len(hot))*page {
		t.Errorf("they end at %d", end)
	}
	// Such pages are not stored again when they equal the reference's.
	next := now.clone()
	changed := next.write(r, 100)
	src = snapshotstore.Source{Name: "memory", Size: next.size, Changed: changed, Read: next.read, Reference: now.read, First: first}
	again := x.sealAll(w.Snapshot, src)
	if again.Dirty > 100*page {
		t.Errorf("%d bytes were stored for 100 pages", again.Dirty)
	}
	x.check(again.Manifest, "memory", next)
}
