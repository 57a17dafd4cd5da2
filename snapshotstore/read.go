package snapshotstore

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"iter"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

var errMismatch = errors.New("the sha256 of the bytes differs from that of the stored bytes")

// Snapshot is a checkpoint's manifest with its maps, read and verified. It is immutable and safe for concurrent use.
type Snapshot struct {
	ref    manifest.Ref
	header manifest.Header
	trees  map[string]*manifest.Tree
	nodes  map[manifest.Hash]node
}

// node is a node of the maps with the manifest that contains it.
type node struct {
	in manifest.Ref
	b  []byte
}

// own sets the manifest of nodes that have none yet.
func (s *Snapshot) own(ref manifest.Ref) {
	for h, n := range s.nodes {
		if n.in.Key == "" {
			s.nodes[h] = node{ref, n.b}
		}
	}
}

// Header returns the header of the manifest.
func (s *Snapshot) Header() manifest.Header { return s.header }

// Ref returns the reference to the manifest.
func (s *Snapshot) Ref() manifest.Ref { return s.ref }

// Image returns the map of an image; nil if there is no image of that name.
func (s *Snapshot) Image(name string) *manifest.Tree { return s.trees[name] }

// maxNodeBytes bounds the nodes of a manifest together with those of all manifests that it shares with. openParallel
// bounds how many of them are read at once: meanwhile, each takes up to three times manifest.MaxBytes.
const (
	maxNodeBytes = 4 * manifest.MaxBytes
	openParallel = 2
)

// Open reads the manifest of a checkpoint and the manifests that it shares nodes with. It trusts only ref.Digest, which
// comes from the row. CHECKPOINT_CORRUPT names a changed object, CHECKPOINT_INCOMPLETE a missing one.
func Open(ctx context.Context, blobs blob.Blobs, ref manifest.Ref) (*Snapshot, error) {
	return OpenChecked(ctx, blobs, ref, func(manifest.Header) error { return nil })
}

// OpenChecked is Open for a reader that already knows something about the checkpoint: check gets the header before any
// map is built from it.
func OpenChecked(ctx context.Context, blobs blob.Blobs, ref manifest.Ref, check func(manifest.Header) error) (*Snapshot, error) {
	h, nodes, err := readManifest(ctx, blobs, ref)
	if err != nil {
		return nil, err
	}
	if err := check(h); err != nil {
		return nil, err
	}
	s := &Snapshot{ref: ref, header: h, nodes: make(map[manifest.Hash]node)}
	all := make(manifest.Nodes, len(nodes))
	var bytes, count atomic.Int64
	account := func(nodes manifest.Nodes) error {
		for _, b := range nodes {
			bytes.Add(int64(len(b)))
		}
		if count.Add(int64(len(nodes))) > manifest.MaxNodes || bytes.Load() > maxNodeBytes {
			return core.Errorf(core.DataLoss, core.CodeManifestInvalid, "the maps of checkpoint %s have too many nodes to be read", h.CheckpointID)
		}
		return nil
	}
	take := func(ref manifest.Ref, nodes manifest.Nodes) {
		for hash, b := range nodes {
			all[hash] = b
			s.nodes[hash] = node{ref, b}
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(openParallel)
	shared := make([]manifest.Nodes, len(h.Shared))
	for i, other := range h.Shared {
		group.Go(func() (err error) {
			if _, shared[i], err = readManifest(ctx, blobs, other); err != nil {
				return err
			}
			return account(shared[i])
		})
	}
	if err := errors.Join(group.Wait(), account(nodes)); err != nil {
		return nil, fmt.Errorf("open checkpoint %s: %w", h.CheckpointID, err)
	}
	for i, other := range h.Shared {
		take(other, shared[i])
	}
	take(ref, nodes)
	if s.trees, err = h.Trees(all); err != nil {
		return nil, err
	}
	return s, nil
}

// ReadHeader reads and verifies the header of a manifest, and builds no map.
func ReadHeader(ctx context.Context, blobs blob.Blobs, ref manifest.Ref) (manifest.Header, error) {
	b, err := readBody(ctx, blobs, ref)
	if err != nil {
		return manifest.Header{}, err
	}
	h, err := manifest.DecodeHeader(b)
	if err != nil {
		err = &objectError{ref.Key, err}
	}
	return h, err
}

func readManifest(ctx context.Context, blobs blob.Blobs, ref manifest.Ref) (manifest.Header, manifest.Nodes, error) {
	b, err := readBody(ctx, blobs, ref)
	if err != nil {
		return manifest.Header{}, nil, err
	}
	h, nodes, err := manifest.Decode(b)
	if err != nil {
		err = &objectError{ref.Key, err}
	}
	return h, nodes, err
}

// readBody reads and verifies a manifest, and decrypts it if necessary.
func readBody(ctx context.Context, blobs blob.Blobs, ref manifest.Ref) ([]byte, error) {
	if ref.Bytes < 1 || ref.Bytes > manifest.MaxBytes+envelope.Overhead {
		return nil, core.Errorf(core.DataLoss, core.CodeManifestInvalid, "a manifest cannot have %d bytes", ref.Bytes)
	}
	key, err := envelope.KeyOf(blobs, ref.Key)
	if err != nil {
		return nil, err
	}
	var b []byte
	err = verified(ctx, blobs, ref.Key, 0, ref.Bytes, func() (err error) {
		if b, err = readRange(ctx, blobs, ref.Key, 0, ref.Bytes); err != nil {
			return err
		}
		if core.DigestOf(b) != ref.Digest {
			return errMismatch
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	if key != nil {
		// The stored bytes are unchanged, so the key must be the wrong one.
		if b, err = key.Decrypt(nil, b, []byte(ref.Key)); err != nil {
			return nil, core.Wrapf(err, core.FailedPrecondition, core.CodeKeyUnavailable, "object %s was encrypted with another key than the one that this process has", ref.Key)
		}
	}
	return b, nil
}

// objectError says to which object an error belongs.
type objectError struct {
	object string
	err    error
}

// Error implements error.
func (e *objectError) Error() string { return e.err.Error() }

// Unwrap returns the error itself.
func (e *objectError) Unwrap() error { return e.err }

// verified reads a range of an object, and reads it again if its bytes are wrong: they may have been changed on the
// way, or in a cache.
func verified(ctx context.Context, blobs blob.Blobs, object string, off, n int64, read func() error) error {
	err := read()
	if errors.Is(err, errMismatch) {
		blob.Forget(ctx, blobs, object, off, n)
		err = read()
	}
	switch {
	case errors.Is(err, errMismatch):
		return core.Wrapf(&objectError{object, err}, core.DataLoss, core.CodeCheckpointCorrupt, "the object %s of the store has changed since it was stored", object)
	case errors.Is(err, blob.ErrNotFound):
		return core.Wrapf(&objectError{object, err}, core.DataLoss, core.CodeCheckpointIncomplete, "the object %s is missing from the store", object)
	}
	return err
}

// readRange reads exactly n bytes; fewer count as a mismatch.
func readRange(ctx context.Context, blobs blob.Blobs, key string, off, n int64) ([]byte, error) {
	r, err := blobs.Get(ctx, key, off, n)
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", key, err)
	}
	b := make([]byte, n)
	_, err = io.ReadFull(r, b)
	if errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) {
		err = errMismatch
	}
	if err := errors.Join(err, r.Close()); err != nil {
		return nil, fmt.Errorf("read %s: %w", key, err)
	}
	return b, nil
}

// FetchOptions say how pages are fetched. The zero value works.
type FetchOptions struct {
	Parallel int // requests at once; 0: 8
}

// Fetched is the amount of data that a Fetch has read.
type Fetched struct {
	Requests int64
	Bytes    int64 // from the store
	Pages    int64
}

// Neighbouring frames are read with one request. The bounds are its length, and the length of a gap that nobody asked
// for. If at least half of an object, between the first and the last frame, is wanted, it is read without gaps.
const (
	maxRequest = 2 << 20
	maxGap     = 32 << 10
	denseGap   = 512 << 10
)

// Fetch reads the pages of runs and passes each run of pages, verified, to emit: in no order, from several goroutines
// at once, and twice if a read had to be repeated. What emit gets is valid until it returns. A run without a frame is
// passed as zeros. The first error ends Fetch.
func Fetch(ctx context.Context, blobs blob.Blobs, runs iter.Seq[manifest.Run], o FetchOptions, emit func(page int64, data []byte) error) (Fetched, error) {
	if o.Parallel <= 0 {
		o.Parallel = 8
	}
	var got Fetched
	var asked, read atomic.Int64
	group, run := errgroup.WithContext(ctx)
	group.SetLimit(o.Parallel)
	wanted := make(map[*manifest.Frame][]manifest.Run)
	for r := range runs {
		got.Pages += int64(r.Count)
		if r.Frame == nil {
			if err := emit(r.Page, make([]byte, r.Count*manifest.PageSize)); err != nil {
				return got, errors.Join(err, group.Wait())
			}
			continue
		}
		wanted[r.Frame] = append(wanted[r.Frame], r)
	}
	var buffers sync.Pool
	requests := plan(wanted)
	slices.SortStableFunc(requests, func(a, b request) int { return cmp.Compare(b.length, a.length) }) // the longest first, so that the last ones are short
	for _, req := range requests {
		if run.Err() != nil {
			break
		}
		group.Go(func() error {
			asked.Add(1)
			read.Add(req.length)
			buf, _ := buffers.Get().([]byte)
			defer func() { buffers.Put(buf) }() //nolint:staticcheck // SA6002: one allocation of three words for 64 KiB
			return req.read(run, blobs, &buf, func(f *manifest.Frame, raw []byte) error {
				for _, r := range wanted[f] {
					if err := emit(r.Page, raw[r.Slot*manifest.PageSize:(r.Slot+r.Count)*manifest.PageSize]); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	err := group.Wait()
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	got.Requests, got.Bytes = asked.Load(), read.Load()
	return got, err
}

// request is one read of the store.
type request struct {
	object         string
	offset, length int64
	frames         []*manifest.Frame
}

// read verifies the pages of each frame and passes them to each, which may get them twice. They are in buf, which grows
// if necessary.
func (req request) read(ctx context.Context, blobs blob.Blobs, buf *[]byte, each func(f *manifest.Frame, raw []byte) error) error {
	key, err := envelope.KeyOf(blobs, req.object)
	if err != nil {
		return err
	}
	return verified(ctx, blobs, req.object, req.offset, req.length, func() error {
		b, err := readRange(ctx, blobs, req.object, req.offset, req.length)
		if err != nil {
			return err
		}
		for _, f := range req.frames {
			if *buf, err = unpack(key, f, b[f.Offset-req.offset:f.Offset-req.offset+f.Length], *buf); err != nil {
				return err
			}
			if err := each(f, *buf); err != nil {
				return err
			}
		}
		return nil
	})
}

// plan combines frames that are close to each other into one request.
func plan(wanted map[*manifest.Frame][]manifest.Run) []request {
	frames := make([]*manifest.Frame, 0, len(wanted))
	for f := range wanted {
		frames = append(frames, f)
	}
	slices.SortFunc(frames, func(a, b *manifest.Frame) int {
		return cmp.Or(strings.Compare(a.Object, b.Object), cmp.Compare(a.Offset, b.Offset))
	})
	var out []request
	gaps := gapsOf(frames)
	for _, f := range frames {
		if n := len(out) - 1; n >= 0 {
			last := &out[n]
			end := last.offset + last.length
			if last.object == f.Object && f.Offset-end <= gaps[f.Object] && f.Offset+f.Length-last.offset <= maxRequest {
				last.length = max(end, f.Offset+f.Length) - last.offset
				last.frames = append(last.frames, f)
				continue
			}
		}
		out = append(out, request{f.Object, f.Offset, f.Length, []*manifest.Frame{f}})
	}
	return out
}

// gapsOf returns, for each object, the maximum gap that may be read between two of the sorted frames.
func gapsOf(frames []*manifest.Frame) map[string]int64 {
	type extent struct{ first, end, wanted int64 }
	extents := make(map[string]extent)
	for _, f := range frames {
		e, ok := extents[f.Object]
		if !ok {
			e.first = f.Offset
		}
		e.end, e.wanted = max(e.end, f.Offset+f.Length), e.wanted+f.Length
		extents[f.Object] = e
	}
	gaps := make(map[string]int64, len(extents))
	for object, e := range extents {
		gaps[object] = maxGap
		if 2*e.wanted >= e.end-e.first {
			gaps[object] = denseGap
		}
	}
	return gaps
}
