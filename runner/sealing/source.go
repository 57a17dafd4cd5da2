package sealing

import (
	"errors"
	"fmt"
	"os"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// source has the files of a checkpoint and of the reference that it is compared with.
type source struct {
	now, before *checkpoints.Opened // before is nil without a reference
	files       []*os.File
}

func (src *source) close() error {
	var errs []error
	for _, f := range src.files {
		errs = append(errs, f.Close())
	}
	if src.before != nil {
		errs = append(errs, src.before.Close())
	}
	return errors.Join(errs...)
}

// sources returns the images of a checkpoint, and the ranges in which they may differ from the images of the reference.
func (s *Sealer) sources(src *source, reference *snapshotstore.Snapshot) ([]snapshotstore.Source, error) {
	mem, err := s.memorySource(src)
	if err != nil {
		return nil, err
	}
	disk, err := diskSource(src)
	if err != nil {
		return nil, err
	}
	state := bytesSource(runnerapi.ImageState, src.now.State)
	if src.before != nil {
		state.Reference = bytesSource("", src.before.State).Read
	}
	out := []snapshotstore.Source{mem, disk, state}
	said, err := os.ReadFile(s.cfg.Checkpoints.Path(src.now.ID, checkpoints.SurveyFile))
	if err == nil {
		out = append(out, bytesSource(runnerapi.ImageSurvey, said))
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	root, err := s.cfg.Roots.Open(src.now.RootKey())
	if err != nil {
		return nil, err
	}
	src.files = append(src.files, root)
	rootSource, err := fileSource(runnerapi.ImageRoot, root)
	if err != nil {
		return nil, err
	}
	switch {
	case reference == nil:
	case reference.Header().GuestImage != src.now.Image:
		return nil, core.Errorf(core.Internal, core.CodeInternal, "checkpoint %s and its ancestor %s are of different images", src.now.ID, src.before.ID)
	case src.now.RootKey() == src.before.RootKey():
		rootSource.Changed = nil
	default: // the ancestor was fetched again, and now has its root file system from another source
		if err := s.compareRoots(src, &rootSource); err != nil {
			return nil, err
		}
	}
	return append(out, rootSource), nil
}

// compareRoots compares the whole root file system with the one of the reference.
func (s *Sealer) compareRoots(src *source, root *snapshotstore.Source) error {
	f, err := s.cfg.Roots.Open(src.before.RootKey())
	if err != nil {
		return err
	}
	src.files = append(src.files, f)
	before, err := fileSource("", f)
	root.Changed, root.Reference = []snapshotstore.Range{{Offset: 0, Length: root.Size}}, before.Read
	return err
}

func (s *Sealer) memorySource(src *source) (snapshotstore.Source, error) {
	open := func(o *checkpoints.Opened) (memory.Image, error) {
		f, err := s.cfg.Bases.OpenFile(o.Base)
		if err == nil {
			src.files = append(src.files, f)
		}
		return memory.Image{Base: f, Delta: o.Delta}, err
	}
	now, err := open(src.now)
	if err != nil {
		return snapshotstore.Source{}, err
	}
	out := snapshotstore.Source{Name: runnerapi.ImageMemory, Size: src.now.Memory.Size, Read: memory.NewReader(now).ReadAt}
	var extents []memory.Extent
	if src.before == nil {
		extents, err = memory.MayBeData(now)
	} else {
		var before memory.Image
		if before, err = open(src.before); err != nil {
			return out, err
		}
		out.Reference = memory.NewReader(before).ReadAt
		extents, err = memory.MayDiffer(now, before)
	}
	for _, e := range extents {
		out.Changed = append(out.Changed, snapshotstore.Range{Offset: e.Offset, Length: e.Length})
	}
	if set := s.cfg.WorkingSets.Of(src.now.Base); set.Rehearsed && !src.now.HasDelta() {
		for _, p := range lazy.DecodeWorkingSet(set.Pages, out.Size/manifest.PageSize) {
			out.First = append(out.First, snapshotstore.Range{Offset: p.First * manifest.PageSize, Length: p.Count * manifest.PageSize})
		}
	}
	return out, err
}

func diskSource(src *source) (snapshotstore.Source, error) {
	out, err := fileSource(runnerapi.ImageDisk, src.now.Overlay)
	if err != nil || src.before == nil {
		return out, err
	}
	before, err := fileSource("", src.before.Overlay)
	if err != nil {
		return out, err
	}
	ranges, err := sparse.Unshared(src.now.Overlay, src.before.Overlay)
	out.Changed, out.Reference = nil, before.Read
	for _, x := range ranges {
		out.Changed = append(out.Changed, snapshotstore.Range{Offset: x.Offset, Length: x.Length})
	}
	return out, err
}

// fileSource is a whole file. Everything except its holes may be data.
func fileSource(name string, f *os.File) (snapshotstore.Source, error) {
	info, err := f.Stat()
	if err != nil {
		return snapshotstore.Source{}, err
	}
	ranges, err := sparse.Data(f)
	if err != nil {
		return snapshotstore.Source{}, err
	}
	out := snapshotstore.Source{Name: name, Size: info.Size(), Read: func(p []byte, off int64) error {
		n, err := f.ReadAt(p, off)
		clear(p[n:])
		if off+int64(n) < min(off+int64(len(p)), info.Size()) {
			return fmt.Errorf("read %s: %w", f.Name(), err)
		}
		return nil
	}}
	for _, x := range ranges {
		out.Changed = append(out.Changed, snapshotstore.Range{Offset: x.Offset, Length: x.Length})
	}
	return out, nil
}

func bytesSource(name string, b []byte) snapshotstore.Source {
	return snapshotstore.Source{
		Name: name, Size: int64(len(b)), Changed: []snapshotstore.Range{{Offset: 0, Length: int64(len(b))}},
		Read: func(p []byte, off int64) error {
			n := 0
			if off < int64(len(b)) {
				n = copy(p, b[off:])
			}
			clear(p[n:])
			return nil
		},
	}
}
