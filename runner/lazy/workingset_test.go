package lazy

import (
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/coppice-dev/coppice/core"
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
		b := EncodeWorkingSet(extents)
		got := DecodeWorkingSet(b, pages)
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
			for _, g := range DecodeWorkingSet(b[:r.IntN(len(b)+1)], pages/2) {
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
	var w WorkingSets
	base := core.NewID[core.BaseID]()
	if !w.Claim(base) || w.Claim(base) || w.Claim("") || w.Of(base).Pages != nil {
		t.Error("not the first one only")
	}
	w.observed(base, []byte{1, 1})
	if set := w.Of(base); len(set.Pages) != 2 || set.Rehearsed || w.Claim(base) {
		t.Error("it was forgotten")
	}
	w.SetRehearsed(base, []byte{1, 1, 1})
	w.observed(base, []byte{1, 1})
	if set := w.Of(base); len(set.Pages) != 3 || !set.Rehearsed {
		t.Errorf("what a rehearsal has said: %v", set)
	}
	for range 2 * maxWorkingSets {
		w.Claim(core.NewID[core.BaseID]())
	}
	if len(w.sets) > maxWorkingSets {
		t.Errorf("%d sets", len(w.sets))
	}
}
