package snapshotstore

import (
	"cmp"
	"maps"
	"slices"

	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Pages are stored again where many generations have scattered them, so that reading costs the same however many have written. What of that is for
// regions and what is for packs has a bound of its own, a share of the pages that a write stores anyway.
const (
	// The pages of a leaf are in at most this many frames; those go that are nearly alone in theirs, when others of the leaf are stored anyway.
	maxScatter  = 3 * manifest.LeafPages / manifest.FramePages
	maxAlone    = manifest.FramePages / 4
	gatherShare = 8 // an eighth

	// The pages of an image are in at most this many small packs: a small one has so few of them that it costs a request of its own for little.
	maxSmall   = 3
	smallPages = (8 << 20) / manifest.PageSize
	mergeShare = 40 // of a hundred
)

// compaction is what one write does to one image.
type compaction struct {
	w      *writer
	src    Source
	tree   *manifest.Tree   // before
	edit   *manifest.Editor // with the pages that became zeros
	stored map[int64]bool   // pages that are in frames of this write
	frames *frameBuilder
}

func (w *writer) compact(src Source, tree *manifest.Tree, edit *manifest.Editor, stored map[int64]bool, frames *frameBuilder) error {
	c := &compaction{w, src, tree, edit, stored, frames}
	n := len(stored)
	if err := c.gather(n / gatherShare); err != nil {
		return err
	}
	return c.merge(n * mergeShare / 100)
}

// move stores pages again.
func (c *compaction) move(pages []int64) error {
	b := make([]byte, manifest.PageSize)
	for _, page := range pages {
		if err := c.src.Read(b, page*manifest.PageSize); err != nil {
			return err
		}
		c.w.out.Moved += manifest.PageSize
		c.stored[page] = true
		if err := c.frames.add(page, b); err != nil {
			return err
		}
	}
	return nil
}

// gather stores again what is scattered over frames, the worst leaves first.
func (c *compaction) gather(budget int) error {
	type scattered struct {
		leaf   int64
		frames int
	}
	var list []scattered
	for _, n := range leavesOf(c.stored) {
		if f := len(c.tree.Frames(n)); f > maxScatter {
			list = append(list, scattered{n, f})
		}
	}
	slices.SortFunc(list, func(a, b scattered) int { return cmp.Or(cmp.Compare(b.frames, a.frames), cmp.Compare(a.leaf, b.leaf)) })
	for _, s := range list {
		alone := c.alone(s.leaf)
		if len(alone) < manifest.FramePages || len(alone) > budget && budget < manifest.FramePages {
			continue
		}
		alone = alone[:min(len(alone), budget)]
		budget -= len(alone)
		if err := c.move(alone); err != nil {
			return err
		}
	}
	return nil
}

// alone are the pages of a leaf that stay where they are, in frames that have few others of the leaf.
func (c *compaction) alone(leaf int64) []int64 {
	share := c.tree.Frames(leaf)
	var out []int64
	first := leaf * manifest.LeafPages
	for page := first; page < min(first+manifest.LeafPages, c.tree.Pages()); page++ {
		f := c.edit.At(page).Frame
		if f != nil && !c.stored[page] && share[f] <= maxAlone {
			out = append(out, page)
		}
	}
	return out
}

// merge stores again what is in the smallest packs, as far as there are too many of them. One that is too large to go at once goes in several writes:
// what is left of it is the smallest then.
func (c *compaction) merge(budget int) error {
	type pack struct {
		object string
		pages  int // that stay there
	}
	live := make(map[string]int)
	c.staying(func(_ int64, object string) { live[object]++ })
	var small []pack
	for object, n := range live {
		if n < smallPages {
			small = append(small, pack{object, n})
		}
	}
	if len(small) < maxSmall || budget == 0 { // with the one that is being written
		return nil
	}
	slices.SortFunc(small, func(a, b pack) int { return cmp.Or(cmp.Compare(a.pages, b.pages), cmp.Compare(a.object, b.object)) })
	going := make(map[string][]int64)
	for n, left := 0, budget; n <= len(small)-maxSmall && left > 0; n++ {
		going[small[n].object] = nil
		left -= small[n].pages
	}
	c.staying(func(page int64, object string) {
		if pages, ok := going[object]; ok {
			going[object] = append(pages, page)
		}
	})
	var pages []int64
	for _, p := range small[:len(going)] {
		slices.Sort(going[p.object])
		pages = append(pages, going[p.object]...)
	}
	pages = pages[:min(len(pages), budget)]
	slices.Sort(pages) // neighbours come into one frame
	return c.move(pages)
}

// staying calls each for the pages that are where they were, with the object that they are in.
func (c *compaction) staying(each func(page int64, object string)) {
	for page, f := range c.edit.Pages() {
		if !c.stored[page] {
			each(page, f.Object)
		}
	}
}

func leavesOf(pages map[int64]bool) []int64 {
	leaves := make(map[int64]bool)
	for p := range pages {
		leaves[p/manifest.LeafPages] = true
	}
	return slices.Sorted(maps.Keys(leaves))
}
