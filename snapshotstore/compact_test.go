package snapshotstore_test

import (
	"cmp"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// TestScattered: a region that every generation changes a little stays in few frames.
func TestScattered(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(9, 10))
	m := newImage(4 << 20)
	for at := range m.size / page {
		m.pages[at] = content(r)
	}
	ref := x.seal(nil, nil, m, m.whole()).Snapshot
	var dirty, moved int64
	for i := range int64(72) { // more than a leaf may have frames
		before := m.clone()
		var changed []snapshotstore.Range
		for leaf := range m.size / page / manifest.LeafPages {
			at := leaf*manifest.LeafPages + (i*37)%manifest.LeafPages
			m.pages[at] = content(r)
			changed = append(changed, snapshotstore.Range{Offset: at * page, Length: page})
		}
		changed = append(changed, snapshotstore.Range{Offset: 0, Length: 0})
		// Changes in one busy leaf make the budget larger, as in a real machine.
		for at := range int64(manifest.LeafPages) {
			m.pages[at] = content(r)
		}
		slices.SortFunc(changed, func(a, b snapshotstore.Range) int { return int(a.Offset - b.Offset) })
		changed = append([]snapshotstore.Range{{Offset: 0, Length: manifest.LeafPages * page}}, changed...)
		w := x.seal(ref, before, m, changed)
		dirty, moved, ref = dirty+w.Dirty, moved+w.Moved, w.Snapshot
	}
	x.check(ref.Ref(), "memory", m)
	worst := 0
	for leaf := range m.size / page / manifest.LeafPages {
		worst = max(worst, len(ref.Image("memory").Frames(leaf)))
	}
	t.Logf("at most %d frames a leaf; moved %d for %d dirty bytes", worst, moved, dirty)
	if worst > 64 || moved > dirty/7+dirty/2 { // the budgets for leaves and for packs
		t.Errorf("at most %d frames a leaf; moved %d for %d dirty bytes", worst, moved, dirty)
	}
}

const packsRequests = 2 // for each pack, at most, on average

// TestManyGenerations: after any number of generations, an image is in few packs and its map in few manifests. Reading
// all of it takes about as many requests and bytes as at depth 1. Most written pages are written again later, as in a
// machine's memory.
func TestManyGenerations(t *testing.T) {
	t.Parallel()
	x := newRig(t)
	r := rand.New(rand.NewPCG(31, 32))
	m := newImage(48 << 20)
	for at := range m.size / page * 3 / 4 {
		m.pages[at] = content(r)
	}
	root := x.seal(nil, nil, m, m.whole())
	first := m.clone()
	hot := r.Perm(int(m.size / page))[:400]
	last := root
	var dirty, stored, moved int64
	for range 64 {
		before := m.clone()
		var changed []snapshotstore.Range
		write := func(at int64) {
			m.pages[at] = content(r)
			changed = append(changed, snapshotstore.Range{Offset: at * page, Length: page})
		}
		for _, at := range hot {
			if r.IntN(10) < 7 {
				write(int64(at))
			}
		}
		for range 4 { // and new pages, next to each other
			at := r.Int64N(m.size/page - 16)
			for i := range int64(16) {
				write(at + i)
			}
		}
		slices.SortFunc(changed, func(a, b snapshotstore.Range) int { return cmp.Compare(a.Offset, b.Offset) })
		last = x.seal(last.Snapshot, before, m, changed)
		dirty, stored, moved = dirty+last.Dirty, stored+last.Stored, moved+last.Moved
	}
	deep := x.check(last.Manifest, "memory", m)
	shallow := x.check(x.seal(root.Snapshot, first, m, m.whole()).Manifest, "memory", m)
	packs, shared := len(last.Snapshot.Image("memory").Objects()), len(last.Snapshot.Header().Shared)
	t.Logf("%d packs, %d more manifests; %d requests and %d bytes, at depth 1 %d and %d; %d of %d dirty bytes were moved, %d stored", packs, shared, deep.Requests, deep.Bytes, shallow.Requests, shallow.Bytes, moved, dirty, stored)
	if packs > 20 || shared > 5 || deep.Requests > shallow.Requests+packsRequests*int64(packs) || deep.Bytes > shallow.Bytes*4/3 {
		t.Error("that is too many")
	}
	if moved > dirty*5/8 {
		t.Errorf("%d bytes were moved for %d dirty ones", moved, dirty)
	}
}
