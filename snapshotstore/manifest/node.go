package manifest

import (
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"maps"
	"math"
	"slices"
)

// The first byte of a node.
const (
	kindLeaf  = 'L'
	kindInner = 'I'
)

// maxNode bounds the bytes of a node. The largest node is a leaf with a separate frame in a separate object for every
// page.
const maxNode = 96 << 10

// minNode is the size of an inner node with one child. The smallest leaf is larger.
const minNode = 1 + 4 + 32

// Nodes maps hashes to encoded nodes.
type Nodes map[Hash][]byte

// height returns the number of levels of inner nodes above the leaves, for an image of a size.
func height(size int64) int {
	leaves := (size + PageSize*LeafPages - 1) / (PageSize * LeafPages)
	h := 0
	for span := int64(1); span < leaves; span *= Fanout {
		h++
	}
	return h
}

// Encode adds every node of the map to all and returns the hash of the root, zero for an image of zeros.
func (t *Tree) Encode(all Nodes) Hash {
	level := make(map[int64]Hash, len(t.leaves))
	for n, l := range t.leaves {
		level[n] = all.add(l.encode())
	}
	for range height(t.size) {
		level = all.raise(level)
	}
	return level[0]
}

// raise encodes the inner nodes above a level.
func (all Nodes) raise(below map[int64]Hash) map[int64]Hash {
	parents := make(map[int64][]int64)
	for n := range below {
		parents[n/Fanout] = append(parents[n/Fanout], n)
	}
	above := make(map[int64]Hash, len(parents))
	for p, children := range parents {
		slices.Sort(children)
		b := []byte{kindInner}
		var bitmap uint32
		for _, n := range children {
			bitmap |= 1 << (n % Fanout)
		}
		b = binary.LittleEndian.AppendUint32(b, bitmap)
		for _, n := range children {
			h := below[n]
			b = append(b, h[:]...)
		}
		above[p] = all.add(b)
	}
	return above
}

func (all Nodes) add(b []byte) Hash {
	h := Hash(sha256.Sum256(b))
	all[h] = b
	return h
}

// encode returns the canonical encoding of a leaf: objects and frames in the order of their first use.
func (l *leaf) encode() []byte {
	var objects []string
	var frames []*Frame
	number := make(map[Frame]int)
	index := make(map[string]int)
	for r := range l.runs(0) {
		if _, there := number[*r.Frame]; there {
			continue
		}
		number[*r.Frame] = len(frames)
		frames = append(frames, r.Frame)
		if _, there := index[r.Frame.Object]; !there {
			index[r.Frame.Object] = len(objects)
			objects = append(objects, r.Frame.Object)
		}
	}
	b := []byte{kindLeaf}
	uv := func(v int64) { b = binary.AppendUvarint(b, uint64(v)) } //nolint:gosec // G115: never negative
	uv(int64(len(objects)))
	for _, o := range objects {
		uv(int64(len(o)))
		b = append(b, o...)
	}
	uv(int64(len(frames)))
	for _, f := range frames {
		uv(int64(index[f.Object]))
		uv(f.Offset)
		uv(f.Length)
		uv(int64(f.Pages))
		b = append(b, f.Hash[:]...)
	}
	end := int64(0)
	for r := range l.runs(0) {
		uv(r.Page - end)
		uv(int64(r.Count))
		uv(int64(number[*r.Frame]))
		uv(int64(r.Slot))
		end = r.Page + int64(r.Count)
	}
	return b
}

// DecodeTree builds the map of an image of a size from its root. It looks up every node by its hash, which the caller
// has verified. An encoding that is not canonical is refused.
func DecodeTree(size int64, root Hash, all Nodes) (*Tree, error) {
	return decodeTree(size, root, all, math.MaxInt, &frameStock{frames: make(map[Frame]*Frame)})
}

// decodeTree refuses a map with more than a number of leaves. A few nodes can be repeated as many leaves, so their
// bytes do not bound the leaves.
func decodeTree(size int64, root Hash, all Nodes, leaves int, stock *frameStock) (*Tree, error) {
	if err := checkSize(size); err != nil {
		return nil, err
	}
	t := NewTree(size)
	if root == (Hash{}) {
		return t, nil
	}
	d := decoder{tree: t, all: all, stock: stock, leaves: make(map[Hash]*leaf), most: leaves}
	return t, d.descend(root, height(size), 0)
}

type decoder struct {
	tree   *Tree
	all    Nodes
	stock  *frameStock
	leaves map[Hash]*leaf // decoded leaves; the last leaf of the image may be short, so it is not reused
	most   int            // maximum number of leaves
}

func (d *decoder) descend(h Hash, level int, number int64) error {
	b, there := d.all[h]
	if !there {
		return invalid("the node %x is missing", h[:6])
	}
	if level == 0 {
		if len(d.tree.leaves) >= d.most {
			return invalid("it maps more than can be read here")
		}
		if l := d.leaves[h]; l != nil && (number+1)*LeafPages <= d.tree.Pages() {
			d.tree.leaves[number] = l
			return d.stock.use(l)
		}
		l, err := d.leaf(b, number)
		if err != nil {
			return err
		}
		d.tree.leaves[number], d.leaves[h] = l, l
		return d.stock.use(l)
	}
	if len(b) < 5 || b[0] != kindInner {
		return invalid("the node %x is not an inner node", h[:6])
	}
	bitmap, children := binary.LittleEndian.Uint32(b[1:]), b[5:]
	span := int64(1) // leaves of each child
	for range level - 1 {
		span *= Fanout
	}
	for i := range int64(Fanout) {
		if bitmap&(1<<i) == 0 {
			continue
		}
		if len(children) < len(h) {
			return invalid("the node %x is cut off", h[:6])
		}
		child := number*Fanout + i
		if child*span*LeafPages >= d.tree.Pages() {
			return invalid("the node %x reaches beyond the image", h[:6])
		}
		if err := d.descend(Hash(children[:len(h)]), level-1, child); err != nil {
			return err
		}
		children = children[len(h):]
	}
	if len(children) > 0 || bitmap == 0 {
		return invalid("the node %x has a wrong number of children", h[:6])
	}
	return nil
}

func (d *decoder) leaf(b []byte, number int64) (*leaf, error) {
	r := reader{b: b}
	if r.byte() != kindLeaf {
		return nil, invalid("leaf %d is not a leaf", number)
	}
	objects := make([]string, r.count(LeafPages))
	for i := range objects {
		objects[i] = string(r.bytes(r.count(maxKey)))
	}
	frames := make([]*Frame, r.count(LeafPages))
	for i := range frames {
		o := r.count(len(objects) - 1)
		f := Frame{Offset: r.int(), Length: r.int(), Pages: r.count(FramePages)}
		copy(f.Hash[:], r.bytes(len(f.Hash)))
		if r.bad || f.Length < 1 || f.Length > MaxFrameBytes || f.Pages < 1 {
			return nil, invalid("leaf %d has an impossible frame", number)
		}
		f.Object = objects[o]
		one := d.stock.frames[f]
		if one == nil {
			one = &f
			d.stock.frames[f] = one
		}
		frames[i] = one
	}
	l := new(leaf)
	last := min(LeafPages, d.tree.Pages()-number*LeafPages)
	at := int64(0)
	for len(r.b) > 0 && !r.bad {
		at += r.int()
		count, f, slot := r.int(), r.count(len(frames)-1), r.int()
		if r.bad || count < 1 || at > last || count > last-at || slot > FramePages || slot+count > int64(frames[f].Pages) {
			return nil, invalid("leaf %d has an impossible run", number)
		}
		for range count {
			l.slots[at] = Slot{frames[f], int(slot)}
			at, slot = at+1, slot+1
		}
	}
	if r.bad || !bytes.Equal(l.encode(), b) {
		return nil, invalid("leaf %d is not in canonical form", number)
	}
	return l, nil
}

// reader decodes the parts of a node. After the first error, it returns zeros and bad is set.
type reader struct {
	b   []byte
	bad bool
}

func (r *reader) int() int64 {
	v, n := binary.Uvarint(r.b)
	if n <= 0 || v > 1<<62 {
		r.b, r.bad = nil, true
		return 0
	}
	r.b = r.b[n:]
	return int64(v)
}

// count reads a number of at most limit.
func (r *reader) count(limit int) int {
	v := r.int()
	if v > int64(limit) {
		r.b, r.bad = nil, true
		return 0
	}
	return int(v)
}

func (r *reader) byte() byte {
	b := r.bytes(1)
	return b[0]
}

// bytes never returns fewer than n bytes.
func (r *reader) bytes(n int) []byte {
	if n > len(r.b) {
		r.b, r.bad = nil, true
		return make([]byte, n)
	}
	b := r.b[:n]
	r.b = r.b[n:]
	return b
}

// sorted returns the hashes of the nodes in order.
func (all Nodes) sorted() []Hash {
	return slices.SortedFunc(maps.Keys(all), func(a, b Hash) int { return bytes.Compare(a[:], b[:]) })
}
