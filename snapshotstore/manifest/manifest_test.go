package manifest

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/core"
)

var update = flag.Bool("update", false, "write the golden files again")

// sample is a manifest with at least one of every element.
func sample() (Header, map[string]*Tree) {
	frame := func(object string, off int64, pages int) *Frame {
		f := &Frame{Object: "v1/" + object, Offset: off, Length: int64(pages) * 1000, Pages: pages}
		f.Hash[0], f.Hash[31] = byte(off), byte(pages)
		return f
	}
	e := NewTree(1 << 30).Edit(1 << 30)
	a, b := frame("a/pack-0", 0, 16), frame("b/pack-0", 16000, 3)
	for i := range 16 {
		e.Set(int64(100+i), Slot{a, i})
	}
	e.Set(108, Slot{b, 2})
	e.Set(LeafPages*Fanout*5+7, Slot{b, 0})
	e.Set((1<<30)/PageSize-1, Slot{b, 1})
	trees := map[string]*Tree{"memory": e.Tree(), "device_state": NewTree(0)}
	h := Header{
		ProjectID: "prj_00000000000000000000000004", CheckpointID: "ckpt_00000000000000000000000008", Parent: "ckpt_00000000000000000000000004",
		CapturedAt: "2026-11-22T12:00:00Z", GuestImage: core.DigestOf([]byte("image")), Class: map[string]string{"vmm": "qemu", "arch": "amd64"},
		Resources: core.Resources{VCPUs: 1, MemoryMiB: 1024, DiskGiB: 1},
		Before:    &Ref{Key: "v1/a/manifest", Digest: core.DigestOf([]byte("a")), Bytes: 77},
		Objects:   []Object{{"v1/a/pack-0", 1 << 20}, {"v1/b/pack-0", 1 << 20}},
		Shared:    []Ref{{Key: "v1/a/manifest", Digest: core.DigestOf([]byte("a")), Bytes: 77}},
		Record:    []byte(`{"pause_ms":12.5}`),
	}
	return h, trees
}

func encode(t testing.TB, h Header, trees map[string]*Tree) []byte {
	t.Helper()
	all := make(Nodes)
	for _, name := range slices.Sorted(maps.Keys(trees)) {
		h.Images = append(h.Images, ImageRoot{Name: name, Bytes: trees[name].Size(), Root: trees[name].Encode(all).Digest()})
	}
	b, err := Encode(h, all)
	if err != nil {
		t.Fatal(err)
	}
	return b
}

func runsOf(t *Tree) []string {
	var out []string
	for r := range t.Runs() {
		out = append(out, fmt.Sprintf("%d+%d %s@%d[%d]", r.Page, r.Count, r.Frame.Object, r.Frame.Offset, r.Slot))
	}
	return out
}

// TestGolden protects the format: data that was written once must stay readable for ever, and is still written in the
// same way.
func TestGolden(t *testing.T) {
	t.Parallel()
	h, trees := sample()
	b := encode(t, h, trees)
	path := filepath.Join("testdata", "manifest-v1.bin")
	if *update {
		if err := os.WriteFile(path, b, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	golden, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(golden, b) {
		t.Error("the format has changed: if it must, it gets another version, and this file stays")
	}
	got, nodes, err := Decode(golden)
	if err != nil {
		t.Fatal(err)
	}
	back, err := got.Trees(nodes)
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"100+8 v1/a/pack-0@0[0]", "108+1 v1/b/pack-0@16000[2]", "109+7 v1/a/pack-0@0[9]", "20487+1 v1/b/pack-0@16000[0]", "262143+1 v1/b/pack-0@16000[1]",
	}
	if diff := cmp.Diff(want, runsOf(back["memory"])); diff != "" {
		t.Error(diff)
	}
	if len(runsOf(back["device_state"])) != 0 || got.CheckpointID != h.CheckpointID {
		t.Errorf("%+v", got)
	}
}

// TestTree: a map that is edited at random agrees with a Go map, and is the same after encoding and decoding.
func TestTree(t *testing.T) {
	t.Parallel()
	r := rand.New(rand.NewPCG(1, 2))
	for _, size := range []int64{1, PageSize * 3, PageSize * LeafPages * Fanout, 3 << 30} {
		pages := (size + PageSize - 1) / PageSize
		tree, want := NewTree(size), make(map[int64]Slot)
		var frames []*Frame
		for range 20 {
			before, old := tree, maps.Clone(want)
			e := tree.Edit(size)
			for range 50 {
				f := &Frame{Object: fmt.Sprintf("o/%d", r.IntN(5)), Offset: r.Int64N(1 << 30), Length: 1 + r.Int64N(60000), Pages: 1 + r.IntN(16)}
				if len(frames) > 0 && r.IntN(2) == 0 {
					f = frames[r.IntN(len(frames))]
				}
				frames = append(frames, f)
				at := r.Int64N(pages)
				s := Slot{f, r.IntN(f.Pages)}
				if r.IntN(5) == 0 {
					s = Slot{}
				}
				e.Set(at, s)
				want[at] = s
			}
			tree = e.Tree()
			for at, s := range old {
				if !before.At(at).same(s) {
					t.Fatal("a map changed when another was made of it")
				}
			}
			nodes := make(Nodes)
			root := tree.Encode(nodes)
			back, err := DecodeTree(size, root, nodes)
			if err != nil {
				t.Fatal(err)
			}
			for at, s := range want {
				if !tree.At(at).same(s) || !back.At(at).same(s) {
					t.Fatalf("page %d of %d: %+v, %+v, want %+v", at, pages, tree.At(at), back.At(at), s)
				}
			}
			again := make(Nodes)
			if back.Encode(again) != root || len(again) != len(nodes) {
				t.Fatal("another encoding of the same map")
			}
			changed := make(map[int64]Slot)
			for run := range tree.Changed(before) {
				for i := range run.Count {
					changed[run.Page+int64(i)] = Slot{run.Frame, run.Slot}.plus(i)
				}
			}
			for at, s := range want {
				got, there := changed[at]
				if there == old[at].same(s) || there && !got.same(s) {
					t.Fatalf("page %d: changed %v to %+v; it was %+v and is %+v", at, there, got, old[at], s)
				}
			}
		}
	}
}

// TestDecodeRefuses: malformed manifests are refused even if their digest is right.
func TestDecodeRefuses(t *testing.T) {
	t.Parallel()
	h, trees := sample()
	good := encode(t, h, trees)
	change := func(fn func(h *Header)) []byte {
		c := h
		fn(&c)
		return encode(t, c, trees)
	}
	for name, b := range map[string][]byte{
		"nothing":          nil,
		"cut off":          good[:len(good)-3],
		"more behind it":   append(bytes.Clone(good), 0),
		"another magic":    append([]byte("COPPMAN2"), good[8:]...),
		"white space":      append(append(bytes.Clone(good[:16]), ' '), good[16:]...),
		"no project":       change(func(h *Header) { h.ProjectID = "x" }),
		"a wrong parent":   change(func(h *Header) { h.Parent = "../x" }),
		"objects unsorted": change(func(h *Header) { h.Objects = []Object{h.Objects[1], h.Objects[0]} }),
		"object missing":   change(func(h *Header) { h.Objects = h.Objects[:1] }),
		"object too short": change(func(h *Header) { h.Objects = []Object{{"v1/a/pack-0", 10}, h.Objects[1]} }),
		"too many shared": change(func(h *Header) {
			h.Shared = nil
			for i := range MaxShared + 1 {
				h.Shared = append(h.Shared, Ref{fmt.Sprintf("k%d", i), h.Before.Digest, 1})
			}
		}),
		"shared too large": change(func(h *Header) { h.Shared = []Ref{{"k", h.Before.Digest, 1 << 40}} }),
	} {
		got, nodes, err := Decode(b)
		if err == nil {
			_, err = got.Trees(nodes)
		}
		if core.CodeOf(err) != core.CodeManifestInvalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	format := bytes.Replace(good, []byte(`{"format":1,`), []byte(`{"format":2,`), 1)
	if _, _, err := Decode(format); core.CodeOf(err) != core.CodeUnsupported || !strings.Contains(err.Error(), "format 2") {
		t.Errorf("a later format: %v", err)
	}
}

// FuzzDecode: nothing panics; an accepted manifest is within its bounds, and encodes to the same bytes.
func FuzzDecode(f *testing.F) {
	h, trees := sample()
	f.Add(encode(f, h, trees))
	f.Add(encode(f, Header{ProjectID: h.ProjectID, CheckpointID: h.CheckpointID}, nil))
	f.Fuzz(func(t *testing.T, b []byte) {
		h, nodes, err := Decode(b)
		if err != nil {
			return
		}
		trees, err := h.Trees(nodes)
		if err != nil {
			return
		}
		for _, image := range h.Images {
			all := make(Nodes)
			if got := trees[image.Name].Encode(all).Digest(); got != image.Root {
				t.Errorf("the map of %s is written as %s instead of %s", image.Name, got, image.Root)
			}
			for r := range trees[image.Name].Runs() {
				if r.Page+int64(r.Count) > trees[image.Name].Pages() || r.Slot+r.Count > r.Frame.Pages || r.Count < 1 {
					t.Errorf("a run beyond what there is: %+v", r)
				}
			}
		}
	})
}

// FuzzTree decodes a leaf or an inner node of arbitrary bytes.
func FuzzTree(f *testing.F) {
	_, trees := sample()
	all := make(Nodes)
	trees["memory"].Encode(all)
	for _, h := range all.sorted() {
		f.Add(int64(PageSize*LeafPages), all[h])
		f.Add(int64(1<<20), all[h])
	}
	f.Fuzz(func(t *testing.T, size int64, node []byte) {
		nodes := make(Nodes)
		root := nodes.add(node)
		tree, err := DecodeTree(size, root, nodes)
		if err != nil {
			return
		}
		again := make(Nodes)
		if tree.Encode(again) != root {
			t.Error("another encoding of the same map")
		}
	})
}
