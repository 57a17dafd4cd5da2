package snapshotstore

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"hash"
	"io"
	"os"
	"sync"

	"github.com/klauspost/compress/zstd"
	"golang.org/x/sync/errgroup"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/envelope"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// maxPack is the size at which the next pack begins. It bounds the size of a spool file and the amount of data that a
// retry repeats.
const maxPack = 128 << 20

// frameJob is a frame on its way into a pack.
type frameJob struct {
	image string
	pages []int64
	raw   []byte
	done  chan struct{} // closed when stored is set
	out   []byte        // the frame as it is stored
	hash  manifest.Hash // hash of the compressed frame
	frame *manifest.Frame
}

// packer compresses frames in parallel, appends them to packs in order, and uploads each pack when it is full.
type packer struct {
	blobs    blob.Blobs
	prefix   string
	dir      string
	throttle func(context.Context, int) error
	key      *envelope.Key // nil: nothing is encrypted

	group   *errgroup.Group
	ctx     context.Context // context of the group; lives as long as this upload
	queue   chan *frameJob  // frames to append, in order
	workers chan struct{}
	uploads chan struct{}
	pool    sync.Pool // encoders

	mu      sync.Mutex // guards the fields below
	objects []Object
	frames  []*frameJob
}

// newPacker returns a packer. Its goroutines end with finish.
func newPacker(ctx context.Context, blobs blob.Blobs, prefix string, o Options) *packer {
	group, ctx := errgroup.WithContext(ctx)
	p := &packer{
		blobs: blobs, prefix: prefix, dir: o.Dir, throttle: o.Throttle, key: o.Key, group: group, ctx: ctx,
		queue: make(chan *frameJob, 4*o.Workers), workers: make(chan struct{}, o.Workers), uploads: make(chan struct{}, 1),
	}
	p.pool.New = func() any {
		e, err := zstd.NewWriter(nil, zstd.WithEncoderConcurrency(1), zstd.WithEncoderLevel(o.Level), zstd.WithEncoderCRC(false), zstd.WithSingleSegment(true))
		if err != nil {
			panic(err) // the options are constants
		}
		return e
	}
	group.Go(p.append)
	return p
}

// add takes a frame of up to FramePages pages. It keeps both slices.
func (p *packer) add(image string, pages []int64, raw []byte) error {
	j := &frameJob{image: image, pages: pages, raw: raw, done: make(chan struct{})}
	select {
	case p.workers <- struct{}{}:
	case <-p.ctx.Done():
		return context.Cause(p.ctx)
	}
	p.group.Go(func() error {
		defer func() { <-p.workers }()
		defer close(j.done)
		e, _ := p.pool.Get().(*zstd.Encoder)
		defer p.pool.Put(e)
		j.out = e.EncodeAll(j.raw, make([]byte, 0, len(j.raw)/2))
		j.hash = sha256.Sum256(j.out)
		j.raw = nil
		if p.key != nil {
			j.out = p.key.Encrypt(make([]byte, 0, len(j.out)+envelope.Overhead), j.out, j.hash[:])
		}
		return nil
	})
	select {
	case p.queue <- j:
		return nil
	case <-p.ctx.Done():
		return context.Cause(p.ctx)
	}
}

// finish waits until everything is durable and returns the packs and the frames. With a cause, it aborts instead.
func (p *packer) finish(cause error) ([]Object, []*frameJob, error) {
	if cause != nil {
		p.group.Go(func() error { return cause })
	}
	close(p.queue)
	if err := p.group.Wait(); err != nil {
		return nil, nil, err
	}
	return p.objects, p.frames, nil
}

// append writes frames to packs in the order in which add got them.
func (p *packer) append() (err error) {
	var cur *pack
	defer func() {
		if cur != nil {
			err = errors.Join(err, cur.file.Close())
		}
	}()
	for {
		var j *frameJob
		select {
		case <-p.ctx.Done():
			return context.Cause(p.ctx)
		case j = <-p.queue:
		}
		if j == nil {
			break
		}
		<-j.done
		if cur != nil && cur.size+int64(len(j.out)) > maxPack {
			if err := p.upload(cur); err != nil {
				return err
			}
			cur = nil
		}
		if cur == nil {
			if cur, err = p.begin(); err != nil {
				return err
			}
		}
		j.frame = &manifest.Frame{Object: cur.key, Offset: cur.size, Length: int64(len(j.out)), Pages: len(j.pages), Hash: j.hash}
		if err := cur.write(j.out); err != nil {
			return err
		}
		j.out = nil
		p.frames = append(p.frames, j)
	}
	if cur == nil {
		return nil
	}
	full := cur
	cur = nil
	return p.upload(full)
}

// pack is one object being written to a spool file.
type pack struct {
	key  string
	file *os.File
	size int64
	sum  hash.Hash
}

func (p *packer) begin() (*pack, error) {
	f, err := os.CreateTemp(p.dir, "pack-*.part")
	if err != nil {
		return nil, fmt.Errorf("make a spool file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil { // the file disappears when the process ends, however it ends
		return nil, errors.Join(err, f.Close())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	c := &pack{key: p.prefix + p.key.Name(fmt.Sprintf("pack-%d", len(p.objects))), file: f, sum: sha256.New()}
	p.objects = append(p.objects, Object{Key: c.key})
	return c, nil
}

func (c *pack) write(b []byte) error {
	if _, err := c.file.WriteAt(b, c.size); err != nil {
		return fmt.Errorf("write the spool file of a pack: %w", err)
	}
	c.sum.Write(b)
	c.size += int64(len(b))
	return nil
}

// upload puts a full pack into the store, one at a time, while the next pack is being made.
func (p *packer) upload(c *pack) error {
	select {
	case p.uploads <- struct{}{}:
	case <-p.ctx.Done():
		return errors.Join(context.Cause(p.ctx), c.file.Close())
	}
	p.group.Go(func() (err error) {
		defer func() {
			<-p.uploads
			err = errors.Join(err, c.file.Close())
		}()
		digest := manifest.Hash(c.sum.Sum(nil)).Digest()
		if err := p.blobs.Put(p.ctx, c.key, &throttled{p.ctx, c.file, p.throttle}, c.size, digest); err != nil {
			return fmt.Errorf("store %s: %w", c.key, err)
		}
		p.mu.Lock()
		defer p.mu.Unlock()
		for i := range p.objects {
			if p.objects[i].Key == c.key {
				p.objects[i].Bytes = c.size
			}
		}
		return nil
	})
	return nil
}

// throttled asks the throttle before every read.
type throttled struct {
	ctx  context.Context // context of the upload that reads
	r    io.ReaderAt
	wait func(context.Context, int) error
}

func (t *throttled) ReadAt(b []byte, off int64) (int, error) {
	if t.wait != nil {
		if err := t.wait(t.ctx, len(b)); err != nil {
			return 0, err
		}
	}
	return t.r.ReadAt(b, off)
}

// unpacker decompresses frames.
var unpacker = sync.OnceValue(func() *zstd.Decoder {
	d, err := zstd.NewReader(nil, zstd.WithDecoderConcurrency(0), zstd.WithDecoderMaxMemory(manifest.FramePages*manifest.PageSize), zstd.WithDecodeAllCapLimit(true))
	if err != nil {
		panic(err) // the options are constants
	}
	return d
})

// boxes has buffers for encrypted frames.
var boxes = sync.Pool{New: func() any { return new([manifest.MaxFrameBytes]byte) }}

// openFrame verifies the stored bytes of a frame and appends it, decrypted if necessary, to buf.
func openFrame(key *envelope.Key, f *manifest.Frame, stored, buf []byte) ([]byte, error) {
	if int64(len(stored)) != f.Length {
		return nil, errMismatch
	}
	if key != nil {
		opened, err := key.Decrypt(buf, stored, f.Hash[:])
		if err != nil {
			return nil, errMismatch
		}
		stored = opened
	}
	if manifest.Hash(sha256.Sum256(stored)) != f.Hash {
		return nil, errMismatch
	}
	return stored, nil
}

// unpack verifies the stored bytes of a frame and returns its pages. key is nil for an unencrypted frame; buf is used
// if it is large enough.
func unpack(key *envelope.Key, f *manifest.Frame, stored, buf []byte) ([]byte, error) {
	var opened []byte
	if key != nil {
		box, _ := boxes.Get().(*[manifest.MaxFrameBytes]byte)
		defer boxes.Put(box)
		opened = box[:0]
	}
	frame, err := openFrame(key, f, stored, opened)
	if err != nil {
		return nil, err
	}
	want := f.Pages * manifest.PageSize
	if cap(buf) < want {
		buf = make([]byte, 0, want)
	}
	raw, err := unpacker().DecodeAll(frame, buf[:0:want])
	if err != nil || len(raw) != want {
		return nil, core.Wrapf(err, core.DataLoss, core.CodeManifestInvalid, "the frame at offset %d of %s does not contain the pages that the manifest says", f.Offset, f.Object)
	}
	return raw, nil
}
