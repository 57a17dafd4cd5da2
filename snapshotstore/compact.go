package snapshotstore

import (
	"cmp"
	"maps"
	"slices"

	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// When many generations have scattered pages, writes store these pages again, so that the cost of reading does not
// depend on the number of generations. The work for leaves and the work for packs have a bound each: a share of the
// pages that a write stores anyway.
const (
	// A leaf whose pages are in more than maxScatter frames is gathered, when the write stores pages of the leaf
	// anyway. The pages that move are those in frames with at most maxAlone pages of the leaf.
	maxScatter  = 3 * manifest.LeafPages / manifest.FramePages
	maxAlone    = manifest.FramePages / 4
	gatherShare = 8 // an eighth

	// An image has at most maxSmall small packs. A small pack has so few pages of the image that a request for it is
	// expensive.
	maxSmall   = 3
	smallPages = (8 << 20) / manifest.PageSize
	mergeShare = 40 // percent
)

// compaction is the work of one write on one image.
type compaction struct {
	w      *writer
	src    Source
	tree   *manifest.Tree   // the map before this write
	edit   *manifest.Editor // the new map; pages that became zeros are already set
	stored map[int64]bool   // pages in frames of this write
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

// gather moves pages of leaves whose pages are scattered over many frames, the worst leaves first.
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

// alone returns the pages of a leaf that this write has not stored and whose frames have few other pages of the leaf.
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

// merge moves the pages of the smallest packs while there are too many small packs. A pack that is too large for one
// write is moved in several: after each, its rest is the smallest pack.
func (c *compaction) merge(budget int) error {
	type pack struct {
		object string
		pages  int // pages that are still in the pack
	}
	live := make(map[string]int)
	c.staying(func(_ int64, object string) { live[object]++ })
	var small []pack
	for object, n := range live {
		if n < smallPages {
			small = append(small, pack{object, n})
		}
	}
	if len(small) < maxSmall || budget == 0 { // the pack of this write counts too
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
	slices.Sort(pages) // neighbours go into one frame
	return c.move(pages)
}

// staying calls each for every page that this write has not stored, with its object.
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
