package snapshotstore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"fmt"
	"hash"
	"io"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// ExportFormat is the version of exported files. A reader accepts only this version.
const ExportFormat = 1

// The parts and bounds of an exported file. All of them belong to the format.
const (
	exportMagic     = "COPPEXP1"
	exportFixed     = 16        // bytes before the header
	exportPack      = 16 << 20  // maximum bytes of frames in one pack; a reader keeps two packs in memory
	maxExportHeader = 64 << 10  // bytes
	maxExportLeaves = 192 << 10 // maximum leaves of all maps: 96 GiB in use, and about 400 MiB of memory for a reader
	exportWindow    = 4 << 20   // bytes of frames that are fetched at once; a writer keeps three windows in memory
	packName        = "pack-%d" // name of a pack in the file's own manifest
	exportParallel  = 8         // requests to the store at once
	hashBytes       = len(manifest.Hash{})
)

// ExportHeader is the information in an exported file besides the manifest. It is encoded as JSON in the order of its
// fields.
type ExportHeader struct {
	Format    int    `json:"format"`
	ImageName string `json:"image_name"` // the guest image's name for people
}

// Export is a checkpoint that is about to be written as one file, with all frames that it needs, including those that
// ancestors stored.
type Export struct {
	head   []byte            // the file up to the first frame
	frames []*manifest.Frame // frames as they are in the store, in the order of the file
	size   int64
}

// NewExport lays out a file. It reads nothing from the store. The same checkpoint always gives the same bytes.
func NewExport(s *Snapshot, imageName string) (*Export, error) {
	h := s.header
	place := layout(h, s.trees)
	h.Parent, h.Before, h.Shared, h.Objects = "", nil, nil, place.packs
	h.Images = bytesOnly(h.Images)
	all := make(manifest.Nodes)
	for i := range h.Images {
		h.Images[i].Root = s.trees[h.Images[i].Name].Moved(place.to).Encode(all).Digest()
	}
	body, err := manifest.Encode(h, all)
	if err != nil {
		return nil, err
	}
	head, err := encodeExportHead(ExportHeader{ExportFormat, imageName}, body)
	if err != nil {
		return nil, err
	}
	return &Export{head: head, frames: place.frames, size: int64(len(head)) + place.bytes + int64(hashBytes)}, nil
}

func bytesOnly(images []manifest.ImageRoot) []manifest.ImageRoot {
	out := make([]manifest.ImageRoot, len(images))
	for i, image := range images {
		out[i] = manifest.ImageRoot{Name: image.Name, Bytes: image.Bytes}
	}
	return out
}

func encodeExportHead(h ExportHeader, body []byte) ([]byte, error) {
	header, err := json.Marshal(h)
	if err != nil {
		return nil, err
	}
	if len(header) > maxExportHeader {
		return nil, core.Errorf(core.Internal, core.CodeInternal, "the header of an exported file would have %d bytes", len(header))
	}
	b := []byte(exportMagic)
	b = binary.LittleEndian.AppendUint32(b, uint32(len(header))) //nolint:gosec // G115: bounded above
	b = binary.LittleEndian.AppendUint32(b, uint32(len(body)))   //nolint:gosec // G115: manifest.Encode bounds it
	b = append(append(b, header...), body...)
	sum := sha256.Sum256(b)
	return append(b, sum[:]...), nil
}

// Size returns the size of the file in bytes.
func (e *Export) Size() int64 { return e.size }

// placement says where the frames of a checkpoint are in a file.
type placement struct {
	frames []*manifest.Frame // frames as the maps have them, in the order of the file
	moved  map[manifest.Frame]*manifest.Frame
	packs  []manifest.Object
	bytes  int64
}

func (p *placement) to(f *manifest.Frame) *manifest.Frame { return p.moved[*f] }

// layout computes the only valid order of a file's frames: the order in which the pages of the images first need them,
// with the images sorted by name. A pack ends where the next frame would make it too large.
func layout(h manifest.Header, trees map[string]*manifest.Tree) *placement {
	p := &placement{moved: make(map[manifest.Frame]*manifest.Frame)}
	for _, image := range h.Images {
		for r := range trees[image.Name].Runs() {
			if p.moved[*r.Frame] != nil {
				continue
			}
			length := fileLength(r.Frame)
			if n := len(p.packs); n == 0 || p.packs[n-1].Bytes+length > exportPack {
				p.packs = append(p.packs, manifest.Object{Key: fmt.Sprintf(packName, n)})
			}
			pack := &p.packs[len(p.packs)-1]
			moved := *r.Frame
			moved.Object, moved.Offset, moved.Length = pack.Key, pack.Bytes, length
			pack.Bytes += moved.Length
			p.bytes += moved.Length
			p.moved[*r.Frame] = &moved
			p.frames = append(p.frames, r.Frame)
		}
	}
	sortObjects(p.packs)
	return p
}

// fileLength is the length of a frame in a file, where nothing is encrypted.
func fileLength(f *manifest.Frame) int64 {
	if envelope.Encrypted(f.Object) {
		return f.Length - envelope.Overhead
	}
	return f.Length
}

// Write writes the file. It compares every frame with its hash before it writes the frame; CHECKPOINT_CORRUPT and
// CHECKPOINT_INCOMPLETE as in any read. After a failure, the end of the file is missing, so a reader notices.
func (e *Export) Write(ctx context.Context, blobs blob.Blobs, w io.Writer) error {
	sum := sha256.New()
	to := io.MultiWriter(w, sum)
	if _, err := to.Write(e.head); err != nil {
		return err
	}
	group, ctx := errgroup.WithContext(ctx)
	ready := make(chan [][]byte)
	group.Go(func() error {
		defer close(ready)
		for frames := range windows(e.frames) {
			got, err := fetchFrames(ctx, blobs, frames)
			if err != nil {
				return err
			}
			select {
			case ready <- got:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
		}
		return nil
	})
	group.Go(func() error {
		for got := range ready {
			for _, b := range got {
				if _, err := to.Write(b); err != nil {
					return err
				}
			}
		}
		return nil
	})
	if err := group.Wait(); err != nil {
		return err
	}
	_, err := w.Write(sum.Sum(nil))
	return err
}

// windows yields frames in order, in groups that are fetched together.
func windows(frames []*manifest.Frame) func(yield func([]*manifest.Frame) bool) {
	return func(yield func([]*manifest.Frame) bool) {
		for len(frames) > 0 {
			n, size := 0, int64(0)
			for n < len(frames) && (n == 0 || size+frames[n].Length <= exportWindow) {
				size += frames[n].Length
				n++
			}
			if !yield(frames[:n]) {
				return
			}
			frames = frames[n:]
		}
	}
}

// fetchFrames reads frames and returns them as they are in a file, verified.
func fetchFrames(ctx context.Context, blobs blob.Blobs, frames []*manifest.Frame) ([][]byte, error) {
	wanted := make(map[*manifest.Frame][]manifest.Run, len(frames))
	at := make(map[*manifest.Frame]int, len(frames))
	for i, f := range frames {
		wanted[f], at[f] = nil, i
	}
	out := make([][]byte, len(frames))
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(exportParallel)
	for _, req := range plan(wanted) {
		group.Go(func() error {
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
					if out[at[f]], err = openFrame(key, f, b[f.Offset-req.offset:f.Offset-req.offset+f.Length], nil); err != nil {
						return err
					}
				}
				return nil
			})
		})
	}
	return out, group.Wait()
}

// tally reads a file, counts and hashes its bytes, and reports where it ends too early.
type tally struct {
	r   io.Reader
	off int64
	sum hash.Hash
}

// full fills b; what names the part of the file for the error.
func (t *tally) full(b []byte, what string) error {
	n, err := io.ReadFull(t.r, b)
	t.sum.Write(b[:n])
	t.off += int64(n)
	if isEnd(err) {
		return badFile("it ends after %d bytes, within %s", t.off, what)
	}
	return err
}

// grow reads n bytes. It takes only as much memory as bytes arrive.
func (t *tally) grow(n int64, what string) ([]byte, error) {
	var b bytes.Buffer
	got, err := io.CopyN(io.MultiWriter(&b, t.sum), t.r, n)
	t.off += got
	if isEnd(err) {
		return nil, badFile("it ends after %d bytes, within %s", t.off, what)
	}
	return b.Bytes(), err
}

// check reads a hash and compares it with that of everything before it.
func (t *tally) check(what string) error {
	want := t.sum.Sum(nil)
	got := make([]byte, hashBytes)
	if err := t.full(got, what); err != nil {
		return err
	}
	if !bytes.Equal(got, want) {
		return badFile("%s at byte %d does not match the bytes before it: the file was changed or damaged", what, t.off-int64(hashBytes))
	}
	return nil
}
