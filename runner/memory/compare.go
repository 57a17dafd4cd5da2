package memory

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"sort"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
)

// Image is the memory of a checkpoint, for reading: a base's file and what differs from it, nil for nothing.
type Image struct {
	Base  *os.File
	Delta *Delta
}

// OpenFile opens the file of a base for reading, without making it ready for VMMs.
func (s *BaseStore) OpenFile(id core.BaseID) (*os.File, error) {
	f, err := os.Open(s.path(id))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, core.Errorf(core.DataLoss, core.CodeCheckpointCorrupt, "the memory base %s is missing on this host", id)
	}
	return f, err
}

// Changed returns the number of bytes in pages that differ between two images of machines of the same size. It reads only pages that
// may differ: those of either delta, and those of the bases that do not share their blocks on disk.
func Changed(ctx context.Context, a, b Image) (int64, error) {
	infoA, errA := a.Base.Stat()
	infoB, errB := b.Base.Stat()
	if err := errors.Join(errA, errB); err != nil {
		return 0, err
	}
	if infoA.Size() != infoB.Size() {
		return 0, core.Errorf(core.Invalid, core.CodeInvalidField, "the machines have %d and %d bytes of memory", infoA.Size(), infoB.Size())
	}
	extents, err := MayDiffer(a, b)
	if err != nil {
		return 0, err
	}
	x, y := newView(a), newView(b)
	var changed int64
	for _, e := range extents {
		n, err := compare(ctx, x, y, e.Offset, e.End())
		if err != nil {
			return 0, err
		}
		changed += n
	}
	return changed, nil
}

// MayDiffer returns the pages in which two images may differ: those of either delta, and those of the bases that do not share their
// blocks on disk.
func MayDiffer(a, b Image) ([]Extent, error) {
	ranges, err := sparse.Unshared(a.Base, b.Base)
	if err != nil {
		return nil, err
	}
	return withDeltas(ranges, a, b), nil
}

// MayBeData returns the pages of an image that may have bytes other than zero.
func MayBeData(i Image) ([]Extent, error) {
	ranges, err := sparse.Data(i.Base)
	if err != nil {
		return nil, err
	}
	return withDeltas(ranges, i), nil
}

func withDeltas(ranges sparse.Ranges, images ...Image) []Extent {
	var all []Extent
	for _, r := range ranges {
		from, to := r.Offset/PageSize*PageSize, (r.End()+PageSize-1)/PageSize*PageSize
		all = append(all, Extent{from, to - from})
	}
	for _, i := range images {
		if i.Delta != nil {
			all = append(all, i.Delta.Extents...)
		}
	}
	return merge(all)
}

const compareChunk = 256 << 10

func compare(ctx context.Context, a, b *view, from, to int64) (changed int64, err error) {
	for ; from < to && err == nil; from += compareChunk {
		if ctx.Err() != nil {
			return changed, context.Cause(ctx)
		}
		n := min(compareChunk, to-from)
		err = guardFaults(func() error {
			x, errA := a.read(from, n)
			y, errB := b.read(from, n)
			if err := errors.Join(errA, errB); err != nil {
				return err
			}
			for ; len(x) > 0; x, y = x[PageSize:], y[PageSize:] {
				if !bytes.Equal(x[:PageSize], y[:PageSize]) {
					changed += PageSize
				}
			}
			return nil
		})
	}
	return changed, err
}

// view reads an image.
type view struct {
	Image
	at  []int64 // where the bytes of each extent of the delta begin in its data
	buf []byte
}

func newView(i Image) *view {
	v := &view{Image: i, buf: make([]byte, compareChunk)}
	if i.Delta == nil {
		return v
	}
	var at int64
	for _, e := range i.Delta.Extents {
		v.at = append(v.at, at)
		at += e.Length
	}
	return v
}

// read returns n bytes of memory, valid until the next call.
func (v *view) read(off, n int64) ([]byte, error) {
	b := v.buf[:n]
	var extents []Extent
	first := 0
	if v.Delta != nil {
		extents = v.Delta.Extents
		first = sort.Search(len(extents), func(i int) bool { return extents[i].End() > off })
	}
	if first == len(extents) || extents[first].Offset > off || extents[first].End() < off+n {
		if m, err := v.Base.ReadAt(b, off); m < len(b) {
			return nil, fmt.Errorf("read memory base %s: %w", v.Base.Name(), errors.Join(err, io.ErrUnexpectedEOF))
		}
	}
	for i := first; i < len(extents) && extents[i].Offset < off+n; i++ {
		e := extents[i]
		from, to := max(e.Offset, off), min(e.End(), off+n)
		copy(b[from-off:to-off], v.Delta.data[v.at[i]+from-e.Offset:])
	}
	return b, nil
}

// Reader reads an image. It is not safe for concurrent use.
type Reader struct{ view *view }

// NewReader reads an image. The caller still owns its files.
func NewReader(i Image) *Reader { return &Reader{newView(i)} }

// ReadAt fills p with the image's bytes from off on.
func (r *Reader) ReadAt(p []byte, off int64) error {
	return guardFaults(func() error {
		for len(p) > 0 {
			n := min(compareChunk, int64(len(p)))
			b, err := r.view.read(off, n)
			if err != nil {
				return err
			}
			copy(p, b)
			p, off = p[n:], off+n
		}
		return nil
	})
}
