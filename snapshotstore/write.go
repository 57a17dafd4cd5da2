package snapshotstore

import (
	"bytes"
	"cmp"
	"context"
	"fmt"
	"maps"
	"runtime"
	"slices"
	"strings"

	"github.com/klauspost/compress/zstd"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Options say how a checkpoint is written. The zero value works.
type Options struct {
	Dir      string // directory of the spool files, at most two packs; empty: the system's
	Workers  int    // goroutines that compress; 0: half the CPUs
	Level    zstd.EncoderLevel
	Throttle func(ctx context.Context, n int) error // called before n bytes are sent; nil: not called
	Key      *envelope.Key                          // key of this attempt, which encrypts everything; nil: no encryption
}

func (o Options) withDefaults() Options {
	if o.Workers <= 0 {
		o.Workers = max(1, runtime.NumCPU()/2)
	}
	if o.Level == 0 {
		o.Level = zstd.SpeedFastest
	}
	return o
}

// Source is one image to store.
type Source struct {
	Name string
	Size int64
	// Changed are the ranges in which the image may differ from the reference's image of the same name, or from zeros
	// if there is none, sorted. Elsewhere the two must be equal. The ranges are widened to whole pages.
	Changed []Range
	// Read fills p with the image from off on, with zeros after its end. Both are multiples of a page.
	Read func(p []byte, off int64) error
	// Reference reads the reference's image in the same way. If its bytes are not available, Reference is nil: then
	// every page of Changed that is not zeros is stored.
	Reference func(p []byte, off int64) error
	// First are the pages that readers ask for first, sorted. Those that this write stores come first, in frames
	// without any other page, so that reading them reads little else. It is only a hint.
	First []Range
}

// Range is a part of an image, in bytes.
type Range struct{ Offset, Length int64 }

// Object is an object in the store.
type Object struct {
	Key   string
	Bytes int64
}

// Written is the result of a Write.
type Written struct {
	Manifest manifest.Ref
	Objects  []Object // objects of this write, including the manifest
	Needs    []string // keys of all objects that a reader may need, sorted
	Snapshot *Snapshot

	Compared int64 // bytes of Changed
	Dirty    int64 // bytes of pages that were stored because they differ
	Moved    int64 // bytes of unchanged pages that were stored again, because they were scattered over many frames or packs
	Stored   int64 // bytes of Objects
}

// Write puts a checkpoint into the store, under keys that begin with prefix: packs, then the manifest. Data that is in
// the reference, which may be nil, is not stored again. h needs ProjectID, CheckpointID and the fields that describe
// the checkpoint; Write fills in the map. After a failure, objects may remain under prefix.
func Write(ctx context.Context, blobs blob.Blobs, prefix string, h manifest.Header, reference *Snapshot, images []Source, o Options) (*Written, error) {
	o = o.withDefaults()
	if !strings.HasSuffix(prefix, "/") || !blob.ValidKey(prefix+"x") {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "%q is not a valid prefix of keys", core.Clip(prefix))
	}
	w := &writer{out: &Written{}, reference: reference, editors: make(map[string]*manifest.Editor)}
	w.packer = newPacker(ctx, blobs, prefix, o)
	err := w.images(images)
	packs, frames, packErr := w.packer.finish(err)
	if packErr != nil { // the packer's error also stopped the reading
		err = packErr
	}
	if err != nil {
		return nil, fmt.Errorf("store checkpoint %s: %w", h.CheckpointID, err)
	}
	w.place(frames)
	body, err := w.describe(&h, images, packs)
	if err != nil {
		return nil, err
	}
	ref, err := putManifest(ctx, blobs, prefix, o.Key, body)
	if err != nil {
		return nil, fmt.Errorf("store the manifest of checkpoint %s: %w", h.CheckpointID, err)
	}
	w.out.finish(ref, packs, h)
	w.snapshot.ref = ref
	w.snapshot.own(ref)
	w.out.Snapshot = w.snapshot
	return w.out, nil
}

// putManifest stores a manifest, encrypted if there is a key. Its digest is that of the stored bytes.
func putManifest(ctx context.Context, blobs blob.Blobs, prefix string, key *envelope.Key, body []byte) (manifest.Ref, error) {
	name := prefix + key.Name("manifest")
	if key != nil {
		body = key.Encrypt(make([]byte, 0, len(body)+envelope.Overhead), body, []byte(name))
	}
	ref := manifest.Ref{Key: name, Digest: core.DigestOf(body), Bytes: int64(len(body))}
	return ref, blobs.Put(ctx, ref.Key, bytes.NewReader(body), ref.Bytes, ref.Digest)
}

func (out *Written) finish(ref manifest.Ref, packs []Object, h manifest.Header) {
	out.Manifest = ref
	out.Objects = append(slices.Clone(packs), Object{ref.Key, ref.Bytes})
	for _, o := range out.Objects {
		out.Stored += o.Bytes
	}
	needs := map[string]bool{ref.Key: true}
	for _, o := range h.Objects {
		needs[o.Key] = true
	}
	for _, s := range h.Shared {
		needs[s.Key] = true
	}
	out.Needs = slices.Sorted(maps.Keys(needs))
}

// writer is one Write.
type writer struct {
	out       *Written
	packer    *packer
	reference *Snapshot
	editors   map[string]*manifest.Editor
	snapshot  *Snapshot
}

func (w *writer) images(images []Source) error {
	for _, src := range images {
		tree := manifest.NewTree(src.Size)
		if w.reference != nil && w.reference.trees[src.Name] != nil {
			tree = w.reference.trees[src.Name]
		} else {
			src.Reference = nil
		}
		edit := tree.Edit(src.Size)
		if w.editors[src.Name] != nil {
			return core.Errorf(core.Internal, core.CodeInternal, "image %s is given twice", src.Name)
		}
		w.editors[src.Name] = edit
		if err := w.changes(src, tree, edit); err != nil {
			return fmt.Errorf("%s: %w", src.Name, err)
		}
	}
	return nil
}

const readChunk = 64 * manifest.PageSize

var zeros [manifest.PageSize]byte

// changes stores the pages of an image that differ.
func (w *writer) changes(src Source, tree *manifest.Tree, edit *manifest.Editor) error {
	frames := frameBuilder{w: w, image: src.Name}
	stored := make(pageSet)
	done := make(pageSet)
	if len(src.First) > 0 {
		first := common(src.Changed, src.First)
		if err := w.compare(src, edit, first, nil, stored, &frames); err != nil {
			return err
		}
		if err := frames.flush(); err != nil {
			return err
		}
		done = pagesOf(first, src.Size)
	}
	if err := w.compare(src, edit, src.Changed, done, stored, &frames); err != nil {
		return err
	}
	if err := w.compact(src, tree, edit, stored, &frames); err != nil {
		return err
	}
	return frames.flush()
}

// compare stores the pages of ranges that differ, except those in done.
func (w *writer) compare(src Source, edit *manifest.Editor, ranges []Range, done, stored pageSet, frames *frameBuilder) error {
	now, before := make([]byte, readChunk), make([]byte, readChunk)
	for from, n := range chunks(ranges, src.Size) {
		b, old := now[:n], before[:n]
		if err := src.Read(b, from); err != nil {
			return err
		}
		if src.Reference != nil {
			if err := src.Reference(old, from); err != nil {
				return err
			}
		}
		for at := int64(0); at < n; at += manifest.PageSize {
			page, number := b[at:at+manifest.PageSize], (from+at)/manifest.PageSize
			if done[number] {
				continue
			}
			w.out.Compared += manifest.PageSize
			switch {
			case bytes.Equal(page, zeros[:]):
				edit.Set(number, manifest.Slot{})
			case src.Reference != nil && edit.At(number).Frame != nil && bytes.Equal(page, old[at:at+manifest.PageSize]):
			default:
				w.out.Dirty += manifest.PageSize
				stored[number] = true
				if err := frames.add(number, page); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// chunks yields the ranges as offsets and lengths of whole pages, without overlaps, at most readChunk each.
func chunks(ranges []Range, size int64) func(yield func(int64, int64) bool) {
	const page = manifest.PageSize
	end := (size + page - 1) / page * page
	return func(yield func(int64, int64) bool) {
		at := int64(0)
		for _, r := range ranges {
			from, to := max(at, r.Offset/page*page), min(end, (r.Offset+r.Length+page-1)/page*page)
			for at = max(at, to); from < to; from += readChunk {
				if !yield(from, min(readChunk, to-from)) {
					return
				}
			}
		}
	}
}

// frameBuilder collects pages of one image.
type frameBuilder struct {
	w     *writer
	image string
	pages []int64
	raw   []byte
}

func (f *frameBuilder) add(number int64, page []byte) error {
	if f.raw == nil {
		f.raw = make([]byte, 0, manifest.FramePages*manifest.PageSize)
	}
	f.pages, f.raw = append(f.pages, number), append(f.raw, page...)
	if len(f.pages) < manifest.FramePages {
		return nil
	}
	return f.flush()
}

func (f *frameBuilder) flush() error {
	if len(f.pages) == 0 {
		return nil
	}
	pages, raw := f.pages, f.raw
	f.pages, f.raw = nil, nil
	return f.w.packer.add(f.image, pages, raw)
}

// place enters the frames into the maps.
func (w *writer) place(frames []*frameJob) {
	for _, j := range frames {
		for i, page := range j.pages {
			w.editors[j.image].Set(page, manifest.Slot{Frame: j.frame, Index: i})
		}
	}
}

// describe fills in the header and encodes the manifest.
func (w *writer) describe(h *manifest.Header, images []Source, packs []Object) ([]byte, error) {
	s := &Snapshot{trees: make(map[string]*manifest.Tree), nodes: make(map[manifest.Hash]node)}
	all := make(manifest.Nodes)
	sizes := make(map[string]int64)
	if w.reference != nil {
		h.Before = &w.reference.ref
		for _, o := range w.reference.header.Objects {
			sizes[o.Key] = o.Bytes
		}
	}
	for _, p := range packs {
		sizes[p.Key] = p.Bytes
	}
	h.Images, h.Objects, h.Shared = nil, nil, nil
	needed := make(map[string]bool)
	for _, src := range images {
		t := w.editors[src.Name].Tree()
		s.trees[src.Name] = t
		h.Images = append(h.Images, manifest.ImageRoot{Name: src.Name, Bytes: src.Size, Root: t.Encode(all).Digest()})
		for _, key := range t.Objects() {
			needed[key] = true
		}
	}
	slices.SortFunc(h.Images, func(a, b manifest.ImageRoot) int { return strings.Compare(a.Name, b.Name) })
	for _, key := range slices.Sorted(maps.Keys(needed)) {
		h.Objects = append(h.Objects, manifest.Object{Key: key, Bytes: sizes[key]})
	}
	own, shared := w.share(all, s)
	for _, key := range slices.Sorted(maps.Keys(shared)) {
		h.Shared = append(h.Shared, shared[key])
	}
	for hash, b := range own {
		s.nodes[hash] = node{b: b} // its manifest has no key yet
	}
	body, err := manifest.Encode(*h, own)
	h.Format = manifest.Format
	s.header = *h
	w.snapshot = s
	return body, err
}

// Reading a map takes one request for each manifest with nodes of it. If there are more than fewShared, up to
// nodesAgain bytes of nodes are written again: those of the manifests that have the fewest bytes of them.
const (
	fewShared  = 3
	nodesAgain = 32 << 10 // before they are compressed
)

// share divides the nodes of the maps into those that this manifest contains and those that other manifests contain. It
// records the latter in s.
func (w *writer) share(all manifest.Nodes, s *Snapshot) (own manifest.Nodes, shared map[string]manifest.Ref) {
	own, shared = make(manifest.Nodes), make(map[string]manifest.Ref)
	theirs, size := make(map[string][]manifest.Hash), make(map[string]int)
	for hash, b := range all {
		n, there := node{}, false
		if w.reference != nil {
			n, there = w.reference.nodes[hash]
		}
		if !there {
			own[hash] = b
			continue
		}
		shared[n.in.Key] = n.in
		theirs[n.in.Key] = append(theirs[n.in.Key], hash)
		size[n.in.Key] += len(b)
	}
	budget := nodesAgain
	keys := slices.SortedFunc(maps.Keys(shared), func(a, b string) int { return cmp.Or(cmp.Compare(size[a], size[b]), cmp.Compare(a, b)) })
	for _, key := range keys {
		if budget -= size[key]; len(shared) <= fewShared || budget < 0 && len(shared) <= manifest.MaxShared {
			break
		}
		for _, hash := range theirs[key] {
			own[hash] = all[hash]
		}
		delete(shared, key)
		delete(theirs, key)
	}
	for key, hashes := range theirs {
		for _, hash := range hashes {
			s.nodes[hash] = node{in: shared[key], b: all[hash]}
		}
	}
	return own, shared
}
