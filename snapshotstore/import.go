package snapshotstore

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"

	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// Import is an exported file whose part before the frames was read and verified. It is not safe for concurrent use.
type Import struct {
	Export   ExportHeader
	Manifest manifest.Header // the file's own manifest, of the exported checkpoint
	Digest   core.Digest     // digest of the part before the frames; it contains every frame's hash, so it identifies the whole content

	file   *tally
	trees  map[string]*manifest.Tree
	frames []*manifest.Frame // frames in the order of the file
	size   int64
}

// ReadImport reads a file up to its first frame. IMPORT_INVALID says what is wrong with it and where; UNSUPPORTED means
// another version. Other errors come from r.
func ReadImport(r io.Reader) (*Import, error) {
	im := &Import{file: &tally{r: r, sum: sha256.New()}}
	fixed := make([]byte, exportFixed)
	if err := im.file.full(fixed, "its first bytes"); err != nil {
		return nil, err
	}
	if magic := string(fixed[:8]); magic != exportMagic {
		if strings.HasPrefix(magic, exportMagic[:7]) {
			return nil, otherFormat(magic[7:])
		}
		return nil, badFile("it does not begin as an exported checkpoint")
	}
	headerLen, manifestLen := int64(binary.LittleEndian.Uint32(fixed[8:])), int64(binary.LittleEndian.Uint32(fixed[12:]))
	if headerLen > maxExportHeader || manifestLen > manifest.MaxBytes {
		return nil, badFile("its header of %d bytes or its manifest of %d bytes is too large", headerLen, manifestLen)
	}
	header, err := im.file.grow(headerLen, "its header")
	if err != nil {
		return nil, err
	}
	body, err := im.file.grow(manifestLen, "its manifest")
	if err != nil {
		return nil, err
	}
	if err := im.file.check("the sum of its header and manifest"); err != nil {
		return nil, err
	}
	im.Digest = manifest.Hash(im.file.sum.Sum(nil)).Digest()
	if err := im.decodeHeader(header); err != nil {
		return nil, err
	}
	return im, im.decodeManifest(body)
}

func (im *Import) decodeHeader(b []byte) error {
	dec := json.NewDecoder(bytes.NewReader(b))
	dec.DisallowUnknownFields()
	if err := dec.Decode(&im.Export); err != nil {
		return badFile("its header cannot be read")
	}
	if im.Export.Format != ExportFormat {
		return otherFormat(fmt.Sprint(im.Export.Format))
	}
	if again, err := json.Marshal(im.Export); err != nil || !bytes.Equal(again, b) {
		return badFile("its header is not in canonical form")
	}
	return nil
}

// decodeManifest accepts only the canonical form: the file of a checkpoint has exactly one form.
func (im *Import) decodeManifest(b []byte) error {
	h, nodes, err := manifest.Decode(b)
	if core.CodeOf(err) == core.CodeUnsupported {
		return err
	}
	if err != nil {
		return badFile("%s", core.MessageOf(err))
	}
	if h.Parent != "" || h.Before != nil || len(h.Shared) > 0 {
		return badFile("its manifest refers to other manifests, which are not in the file")
	}
	if im.trees, err = h.TreesWithin(nodes, maxExportLeaves); err != nil {
		return badFile("%s", core.MessageOf(err))
	}
	place := layout(h, im.trees)
	for _, f := range place.frames {
		if *place.to(f) != *f {
			return badFile("its manifest has a frame at offset %d of %s, where no frame can be", f.Offset, core.Clip(f.Object))
		}
	}
	if !slices.Equal(place.packs, h.Objects) {
		return badFile("its manifest refers to packs that are not in the file")
	}
	all := make(manifest.Nodes)
	for _, image := range h.Images {
		im.trees[image.Name].Encode(all)
	}
	if len(all) != len(nodes) {
		return badFile("its manifest has nodes that belong to no map")
	}
	im.Manifest, im.frames = h, place.frames
	im.size = im.file.off + place.bytes + int64(hashBytes)
	return nil
}

// Size returns the size that the whole file must have, in bytes.
func (im *Import) Size() int64 { return im.size }

// Image returns the map of an image, with places in the file; nil if there is no image of that name.
func (im *Import) Image(name string) *manifest.Tree { return im.trees[name] }

// Content identifies the content of an image. It is the same for the same frames at the same places of the image,
// wherever they are stored, and never the same for other bytes.
func (im *Import) Content(name string) core.Digest { return Content(im.trees[name]) }

// Content identifies the content of a map, like Content of Import.
func Content(t *manifest.Tree) core.Digest {
	sum := sha256.New()
	fmt.Fprintf(sum, "coppice image %d\n", t.Size())
	for r := range t.Runs() {
		fmt.Fprintf(sum, "%d %d %d %x\n", r.Page, r.Count, r.Slot, r.Frame.Hash)
	}
	return manifest.Hash(sum.Sum(nil)).Digest()
}

// Store puts the checkpoint of the file into the store, under keys that begin with prefix: first the packs, then, when
// the rest of the file was verified to its end, the manifest. h describes the new checkpoint; Store fills in its map.
// Every frame is compared with its hash and decompressed before it is stored. With a key, everything is encrypted.
// After a failure, packs may remain under prefix, but no manifest.
func (im *Import) Store(ctx context.Context, blobs blob.Blobs, prefix string, key *envelope.Key, h manifest.Header) (*Written, error) {
	moved, err := im.place(prefix, key)
	if err != nil {
		return nil, err
	}
	packs, err := im.storePacks(ctx, blobs, prefix, key)
	if err != nil {
		return nil, err
	}
	if err := im.file.check("the sum of the file"); err != nil {
		return nil, err
	}
	if n, err := io.ReadFull(im.file.r, make([]byte, 1)); n > 0 {
		return nil, badFile("there are more bytes after its end at byte %d", im.file.off)
	} else if !errors.Is(err, io.EOF) {
		return nil, err
	}
	all := make(manifest.Nodes)
	h.Before, h.Shared, h.Images, h.Objects = nil, nil, bytesOnly(im.Manifest.Images), nil
	for i := range h.Images {
		tree := im.trees[h.Images[i].Name].Moved(func(f *manifest.Frame) *manifest.Frame { return moved[*f] })
		h.Images[i].Root = tree.Encode(all).Digest()
	}
	for _, p := range packs {
		h.Objects = append(h.Objects, manifest.Object(p))
	}
	sortObjects(h.Objects)
	body, err := manifest.Encode(h, all)
	if err != nil {
		return nil, err
	}
	ref, err := putManifest(ctx, blobs, prefix, key, body)
	if err != nil {
		return nil, fmt.Errorf("store the manifest of checkpoint %s: %w", h.CheckpointID, err)
	}
	out := &Written{}
	out.finish(ref, packs, h)
	return out, nil
}

// place computes where the frames of the file will be in the store.
func (im *Import) place(prefix string, key *envelope.Key) (map[manifest.Frame]*manifest.Frame, error) {
	moved := make(map[manifest.Frame]*manifest.Frame, len(im.frames))
	longer := int64(0) // by how much the earlier frames of the pack are longer than in the file
	for _, f := range im.frames {
		to := *f
		to.Object = prefix + key.Name(f.Object)
		if key != nil {
			if f.Offset == 0 {
				longer = 0
			}
			to.Offset += longer
			to.Length += envelope.Overhead
			longer += envelope.Overhead
			if to.Length > manifest.MaxFrameBytes {
				return nil, badFile("its manifest has a frame of %d bytes, which is too much for %d pages", f.Length, f.Pages)
			}
		}
		moved[*f] = &to
	}
	return moved, nil
}

// storePacks uploads a pack while it reads the next one.
func (im *Import) storePacks(ctx context.Context, blobs blob.Blobs, prefix string, key *envelope.Key) ([]Object, error) {
	group, run := errgroup.WithContext(ctx)
	group.SetLimit(1)
	sizes := make(map[string]int64, len(im.Manifest.Objects))
	for _, o := range im.Manifest.Objects {
		sizes[o.Key] = o.Bytes
	}
	var packs []Object
	var pack, raw []byte
	put := func() {
		name, body := packs[len(packs)-1].Key, pack
		packs[len(packs)-1].Bytes = int64(len(body))
		group.Go(func() error {
			if err := blobs.Put(run, name, bytes.NewReader(body), int64(len(body)), core.DigestOf(body)); err != nil {
				return fmt.Errorf("store %s: %w", name, err)
			}
			return nil
		})
	}
	var err error
	for i, f := range im.frames {
		if run.Err() != nil {
			break
		}
		if i > 0 && f.Object != im.frames[i-1].Object {
			put()
		}
		if f.Offset == 0 {
			packs = append(packs, Object{Key: prefix + key.Name(f.Object)})
			pack = make([]byte, 0, sizes[f.Object])
		}
		if pack, raw, err = im.frame(i, key, pack, raw); err != nil {
			break
		}
	}
	if err == nil && run.Err() == nil && len(packs) > 0 {
		put()
	}
	if uploadErr := group.Wait(); uploadErr != nil {
		return nil, uploadErr
	}
	if err == nil && ctx.Err() != nil {
		err = context.Cause(ctx)
	}
	return packs, err
}

// frame reads the next frame, verifies it and appends it to the pack, encrypted if there is a key. raw is a buffer that
// is reused.
func (im *Import) frame(i int, key *envelope.Key, pack, raw []byte) ([]byte, []byte, error) {
	f, begin := im.frames[i], len(pack)
	var stored []byte
	if key == nil {
		pack = pack[:begin+int(f.Length)]
		stored = pack[begin:]
	} else {
		box, _ := boxes.Get().(*[manifest.MaxFrameBytes]byte)
		defer boxes.Put(box)
		stored = box[:f.Length]
	}
	at := im.file.off
	if err := im.file.full(stored, fmt.Sprintf("frame %d of %d", i+1, len(im.frames))); err != nil {
		return pack, raw, err
	}
	raw, err := unpack(nil, f, stored, raw)
	switch {
	case errors.Is(err, errMismatch):
		return pack, raw, badFile("frame %d of %d, at byte %d, has another hash than its manifest says: the file was changed or damaged", i+1, len(im.frames), at)
	case err != nil:
		return pack, raw, badFile("frame %d of %d, at byte %d, does not contain the pages that its manifest says", i+1, len(im.frames), at)
	}
	if key != nil {
		pack = key.Encrypt(pack, stored, f.Hash[:])
	}
	return pack, raw, nil
}

func sortObjects(list []manifest.Object) {
	slices.SortFunc(list, func(a, b manifest.Object) int { return strings.Compare(a.Key, b.Key) })
}

func isEnd(err error) bool { return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) }

func otherFormat(version string) error {
	return core.Errorf(core.Invalid, core.CodeUnsupported, "the file has format %s and this program reads format %d; use a version that reads it", core.Clip(version), ExportFormat)
}

func badFile(format string, a ...any) error {
	return core.Errorf(core.Invalid, core.CodeImportInvalid, "this file cannot be imported: "+format, a...)
}
