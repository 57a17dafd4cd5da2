package manifest

import (
	"iter"
	"maps"
	"slices"

	"github.com/coppice-dev/coppice/core"
)

// The geometry of a map. It is part of the format.
const (
	PageSize   = 4096
	LeafPages  = 128 // pages of a leaf: 512 KiB
	Fanout     = 32  // children of an inner node
	FramePages = 16  // maximum pages in one frame
)

// MaxImageBytes is the size of the largest image that a map can describe.
const MaxImageBytes = int64(PageSize) * LeafPages * Fanout * Fanout * Fanout * Fanout // 512 GiB

// Hash is a sha256.
type Hash [32]byte

// Frame is a run of stored bytes with up to FramePages pages in it. Frames are immutable and compared by value.
type Frame struct {
	Object string // key
	Offset int64  // of the frame in the object
	Length int64  // of the stored bytes
	Pages  int    // number of pages in it
	Hash   Hash   // of the stored bytes
}

// Slot is a place in a frame. The zero Slot is a page of zeros.
type Slot struct {
	Frame *Frame
	Index int
}

// same reports whether two slots are the same place.
func (s Slot) same(o Slot) bool {
	if s.Frame == nil || o.Frame == nil {
		return s.Frame == o.Frame
	}
	return s.Index == o.Index && (s.Frame == o.Frame || *s.Frame == *o.Frame)
}

// Run is a sequence of pages in consecutive slots of one frame.
type Run struct {
	Page  int64 // first page
	Count int
	Frame *Frame
	Slot  int // slot of the first page
}

// Tree is the map of one image. It is immutable and safe for concurrent use.
type Tree struct {
	size   int64           // bytes of the image
	leaves map[int64]*leaf // by number; a missing leaf is zeros
}

// leaf is immutable once it is in a Tree.
type leaf struct {
	slots [LeafPages]Slot
}

// NewTree returns the map of an image of zeros.
func NewTree(size int64) *Tree {
	return &Tree{size: size, leaves: make(map[int64]*leaf)}
}

// Size returns the size of the image in bytes.
func (t *Tree) Size() int64 { return t.size }

// Pages returns the number of pages of the image; the last may extend beyond its end.
func (t *Tree) Pages() int64 { return (t.size + PageSize - 1) / PageSize }

// At returns where a page is.
func (t *Tree) At(page int64) Slot {
	l := t.leaves[page/LeafPages]
	if l == nil {
		return Slot{}
	}
	return l.slots[page%LeafPages]
}

// Runs yields everything that is not zeros, in order. A run does not cross the end of a leaf.
func (t *Tree) Runs() iter.Seq[Run] {
	return func(yield func(Run) bool) {
		for _, n := range slices.Sorted(maps.Keys(t.leaves)) {
			for r := range t.leaves[n].runs(n * LeafPages) {
				if !yield(r) {
					return
				}
			}
		}
	}
}

func (l *leaf) runs(first int64) iter.Seq[Run] {
	return func(yield func(Run) bool) {
		for i := 0; i < LeafPages; {
			s, n := l.slots[i], 1
			if s.Frame == nil {
				i++
				continue
			}
			for i+n < LeafPages && l.slots[i+n].same(Slot{s.Frame, s.Index + n}) {
				n++
			}
			if !yield(Run{first + int64(i), n, s.Frame, s.Index}) {
				return
			}
			i += n
		}
	}
}

// Changed yields the pages whose place in t differs from that in from, as runs of t; a run without a frame is zeros. If
// one map was edited from the other, the time depends on their difference and not on their size.
func (t *Tree) Changed(from *Tree) iter.Seq[Run] {
	return func(yield func(Run) bool) {
		numbers := slices.Collect(maps.Keys(t.leaves))
		for n := range from.leaves {
			if t.leaves[n] == nil {
				numbers = append(numbers, n)
			}
		}
		slices.Sort(numbers)
		var zeros leaf
		for _, n := range numbers {
			a, b := t.leaves[n], from.leaves[n]
			if a == b {
				continue
			}
			if a == nil {
				a = &zeros
			}
			if b == nil {
				b = &zeros
			}
			for i := 0; i < LeafPages; {
				if a.slots[i].same(b.slots[i]) {
					i++
					continue
				}
				s, count := a.slots[i], 1
				for i+count < LeafPages && !a.slots[i+count].same(b.slots[i+count]) && a.slots[i+count].same(s.plus(count)) {
					count++
				}
				if !yield(Run{n*LeafPages + int64(i), count, s.Frame, s.Index}) {
					return
				}
				i += count
			}
		}
	}
}

// plus returns the slot n places after s; a slot of zeros stays zeros.
func (s Slot) plus(n int) Slot {
	if s.Frame == nil {
		return s
	}
	return Slot{s.Frame, s.Index + n}
}

// Moved returns the same map with its frames in other places: to returns the new place of a frame, always the same for
// the same frame.
func (t *Tree) Moved(to func(*Frame) *Frame) *Tree {
	out := &Tree{size: t.size, leaves: make(map[int64]*leaf, len(t.leaves))}
	for n, old := range t.leaves {
		fresh := *old
		for i := range fresh.slots {
			if f := fresh.slots[i].Frame; f != nil {
				fresh.slots[i].Frame = to(f)
			}
		}
		out.leaves[n] = &fresh
	}
	return out
}

// Leaves returns how many leaves the map has. Each stands for 512 KiB that are not all zeros.
func (t *Tree) Leaves() int { return len(t.leaves) }

// Objects returns the keys of all objects with frames of the image, sorted.
func (t *Tree) Objects() []string {
	seen := make(map[string]bool)
	for _, l := range t.leaves {
		for i := range l.slots {
			if f := l.slots[i].Frame; f != nil {
				seen[f.Object] = true
			}
		}
	}
	return slices.Sorted(maps.Keys(seen))
}

// Frames returns the frames of a leaf's pages, with the number of its pages in each.
func (t *Tree) Frames(leafNumber int64) map[*Frame]int {
	l := t.leaves[leafNumber]
	if l == nil {
		return nil
	}
	seen := make(map[*Frame]int)
	for i := range l.slots {
		if f := l.slots[i].Frame; f != nil {
			seen[f]++
		}
	}
	return seen
}

// Editor makes a new map from another one, which stays unchanged. It is not safe for concurrent use.
type Editor struct {
	size   int64
	leaves map[int64]*leaf
	own    map[int64]bool // leaves that this editor has copied
}

// Edit begins with t, cut or extended to a size.
func (t *Tree) Edit(size int64) *Editor {
	e := &Editor{size: size, leaves: maps.Clone(t.leaves), own: make(map[int64]bool)}
	if size < t.size {
		pages := (size + PageSize - 1) / PageSize
		for n := range t.leaves {
			switch {
			case n*LeafPages >= pages:
				delete(e.leaves, n)
			case (n+1)*LeafPages > pages:
				l := e.leaf(n)
				clear(l.slots[pages-n*LeafPages:])
			}
		}
	}
	return e
}

func (e *Editor) leaf(n int64) *leaf {
	if e.own[n] {
		return e.leaves[n]
	}
	fresh := new(leaf)
	if old := e.leaves[n]; old != nil {
		*fresh = *old
	}
	e.leaves[n], e.own[n] = fresh, true
	return fresh
}

// At returns where a page is now.
func (e *Editor) At(page int64) Slot {
	if l := e.leaves[page/LeafPages]; l != nil {
		return l.slots[page%LeafPages]
	}
	return Slot{}
}

// Pages yields the pages that are not zeros now, with their frames, in no particular order.
func (e *Editor) Pages() iter.Seq2[int64, *Frame] {
	return func(yield func(int64, *Frame) bool) {
		for n, l := range e.leaves {
			for i := range l.slots {
				if f := l.slots[i].Frame; f != nil && !yield(n*LeafPages+int64(i), f) {
					return
				}
			}
		}
	}
}

// Set sets where a page is; the zero Slot makes it zeros.
func (e *Editor) Set(page int64, s Slot) {
	if e.At(page).same(s) {
		return
	}
	e.leaf(page / LeafPages).slots[page%LeafPages] = s
}

// Tree returns the edited map. The editor must not be used any more.
func (e *Editor) Tree() *Tree {
	for n := range e.own {
		if *e.leaves[n] == (leaf{}) {
			delete(e.leaves, n)
		}
	}
	return &Tree{size: e.size, leaves: e.leaves}
}

// checkSize refuses sizes that no image can have.
func checkSize(size int64) error {
	if size < 0 || size > MaxImageBytes {
		return invalid("an image cannot have %d bytes", size)
	}
	return nil
}

func invalid(format string, a ...any) error {
	return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the manifest is damaged: "+format, a...)
}
