package runner

import (
	"bytes"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/eventually"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/pager"
)

// TestWorkingSetCode encodes sets of pages and reads them again; too many ranges become fewer with all of their pages, and what is no set is none.
func TestWorkingSetCode(t *testing.T) {
	t.Parallel()
	const pages = 1 << 17
	r := rand.New(rand.NewPCG(1, 1))
	for _, most := range []int{0, 1, 500, 30000} {
		var extents []memory.Extent
		var want []pager.Range
		for at := int64(r.IntN(3)); len(extents) < most && at < pages-8; {
			n := 1 + int64(r.IntN(2))
			extents = append(extents, memory.Extent{Offset: at * memory.PageSize, Length: n * memory.PageSize})
			want = append(want, pager.Range{First: at, Count: n})
			at += n + 1 + int64(r.IntN(3))
		}
		b := encodeWorkingSet(extents)
		got := decodeWorkingSet(b, pages)
		if len(want) <= maxWorkingRanges && !slices.Equal(got, want) {
			t.Errorf("%d ranges became %d", len(want), len(got))
		}
		if len(got) > maxWorkingRanges {
			t.Errorf("%d ranges", len(got))
		}
		for _, w := range want {
			i, _ := slices.BinarySearchFunc(got, w.First, func(g pager.Range, at int64) int { return int(g.First + g.Count - 1 - at) })
			if i == len(got) || got[i].First > w.First || got[i].First+got[i].Count < w.First+w.Count {
				t.Fatalf("%v is not in what was read", w)
			}
		}
		for range 1000 {
			if len(b) > 0 {
				b[r.IntN(len(b))] = byte(r.Uint32())
			}
			last := int64(0)
			for _, g := range decodeWorkingSet(b[:r.IntN(len(b)+1)], pages/2) {
				if g.First < last || g.Count < 0 || g.First+g.Count > pages/2 {
					t.Fatalf("%v", g)
				}
				last = g.First + g.Count
			}
		}
	}
}

// TestWorkingSets: the first machine on a base is observed and no other, and there is a bound.
func TestWorkingSets(t *testing.T) {
	t.Parallel()
	var w workingSets
	base := core.NewID[core.BaseID]()
	if !w.claim(base) || w.claim(base) || w.claim("") || w.of(base).pages != nil {
		t.Error("not the first one only")
	}
	w.observed(base, []byte{1, 1})
	if set := w.of(base); len(set.pages) != 2 || set.rehearsed || w.claim(base) {
		t.Error("it was forgotten")
	}
	w.rehearsed(base, []byte{1, 1, 1})
	w.observed(base, []byte{1, 1})
	if set := w.of(base); len(set.pages) != 3 || !set.rehearsed {
		t.Errorf("what a rehearsal has said: %v", set)
	}
	for range 2 * maxWorkingSets {
		w.claim(core.NewID[core.BaseID]())
	}
	if len(w.sets) > maxWorkingSets {
		t.Errorf("%d sets", len(w.sets))
	}
}

// TestWorkingSetTravels: what the first machine on a base has in use is known of the checkpoints that grow from it, after a restart too, and on another
// host.
func TestWorkingSetTravels(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a := newFakeRig(t, func(c *Config) { c.Store.Blobs = p.blobs })
	template := a.boot()
	first := a.fork(template)
	base := a.recordOf(t, template).Base
	eventually.True(t, "the runner has noted what is in use", func() bool { return a.working.of(base).pages != nil })
	c := a.capture(first)
	set := a.recordOf(t, c).WorkingSet
	if n := len(decodeWorkingSet(set, fakeMiB<<20/memory.PageSize)); n == 0 {
		t.Error("nothing was in use")
	}
	a.stop()
	a.start()
	p.seal(a)
	again := a.capture(a.fork(c))
	p.sealed(t, template, c, again)
	b := p.runner(nil)
	if _, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: again, Children: []runnerapi.Child{b.child()}, Sources: p.sources(again, c, template)}); err != nil {
		t.Fatal(err)
	}
	for where, rec := range map[string]*checkpointRecord{"a child after a restart": a.recordOf(t, again), "the child elsewhere": b.recordOf(t, again)} {
		if !bytes.Equal(rec.WorkingSet, set) {
			t.Errorf("%s has another set: %d bytes, want %d", where, len(rec.WorkingSet), len(set))
		}
	}
}

func (r *fakeRig) recordOf(t *testing.T, id core.CheckpointID) *checkpointRecord {
	t.Helper()
	rec, err := r.checkpoints.get(id)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}
