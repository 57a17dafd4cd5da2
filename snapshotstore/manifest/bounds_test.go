package manifest

import (
	"fmt"
	"math/rand/v2"
	"strings"
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestNodesAndKeysAreBounded: a node of 96 KiB and an object key of 512 bytes are accepted. One more byte is refused
// wherever a manifest may contain it.
func TestNodesAndKeysAreBounded(t *testing.T) {
	t.Parallel()
	h, trees := sample()
	key := func(n int) string { return strings.Repeat("z", n) } // sorts after all other keys
	withNode := func(n int) []byte {
		all := make(Nodes)
		node := make([]byte, n)
		_, _ = rand.NewChaCha8([32]byte{}).Read(node) // random, so that it compresses no better than nodes
		all.add(node)
		b, err := Encode(h, all)
		if err != nil {
			t.Fatal(err)
		}
		return b
	}
	changed := func(change func(h *Header, n int)) func(n int) []byte {
		return func(n int) []byte {
			c := h
			change(&c, n)
			return encode(t, c, trees)
		}
	}
	for _, c := range []struct {
		name string
		most int
		make func(n int) []byte
	}{
		{"a node", maxNode, withNode},
		{"the key of an object", maxKey, changed(func(h *Header, n int) { h.Objects = append(h.Objects[:2:2], Object{key(n), 1}) })},
		{"the key of a manifest that it shares with", maxKey, changed(func(h *Header, n int) { h.Shared = append(h.Shared[:1:1], Ref{key(n), h.Before.Digest, 1}) })},
		{"the key of the manifest before it", maxKey, changed(func(h *Header, n int) { h.Before = &Ref{key(n), h.Before.Digest, 1} })},
	} {
		if _, _, err := Decode(c.make(c.most)); err != nil {
			t.Errorf("%s of %d bytes: %v", c.name, c.most, err)
		}
		if _, _, err := Decode(c.make(c.most + 1)); core.CodeOf(err) != core.CodeManifestInvalid {
			t.Errorf("%s of %d bytes: %v", c.name, c.most+1, err)
		}
	}
	for _, n := range []int{maxKey, maxKey + 1} {
		e := NewTree(1 << 20).Edit(1 << 20)
		e.Set(0, Slot{&Frame{Object: key(n), Length: 100, Pages: 1}, 0})
		all := make(Nodes)
		_, err := DecodeTree(1<<20, e.Tree().Encode(all), all)
		if n > maxKey && core.CodeOf(err) != core.CodeManifestInvalid || n <= maxKey && err != nil {
			t.Errorf("a leaf with a key of %d bytes: %v", n, err)
		}
	}
}

// TestLargestLeaf: the largest leaf that a writer can make, with a separate object for every page, fits in a node.
func TestLargestLeaf(t *testing.T) {
	t.Parallel()
	e := NewTree(LeafPages * PageSize).Edit(LeafPages * PageSize)
	for i := range int64(LeafPages) {
		object := fmt.Sprintf("%0*d", maxKey, i)
		e.Set(i, Slot{&Frame{Object: object, Offset: 1 << 62, Length: MaxFrameBytes, Pages: FramePages}, FramePages - 1})
	}
	all := make(Nodes)
	root := e.Tree().Encode(all)
	if _, err := DecodeTree(LeafPages*PageSize, root, all); err != nil {
		t.Fatal(err)
	}
	if n := len(all[root]); n > maxNode {
		t.Errorf("the largest leaf has %d bytes, and a node has at most %d", n, maxNode)
	}
}
