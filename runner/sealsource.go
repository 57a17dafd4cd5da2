package runner

import (
	"errors"
	"fmt"
	"os"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/snapshotstore"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// sealSource has the files of a checkpoint and of the reference that it is compared with.
type sealSource struct {
	now, before *checkpoints.Opened // before is nil without a reference
	files       []*os.File
}

func (s *sealSource) close() error {
	var errs []error
	for _, f := range s.files {
		errs = append(errs, f.Close())
	}
	if s.before != nil {
		errs = append(errs, s.before.Close())
	}
	return errors.Join(errs...)
}

// sources returns the images of a checkpoint, and the ranges in which they may differ from the images of the reference.
func (r *Runner) sources(s *sealSource, reference *snapshotstore.Snapshot) ([]snapshotstore.Source, error) {
	mem, err := r.memorySource(s)
	if err != nil {
		return nil, err
	}
	disk, err := diskSource(s)
	if err != nil {
		return nil, err
	}
	state := bytesSource(imageState, s.now.State)
	if s.before != nil {
		state.Reference = bytesSource("", s.before.State).Read
	}
	out := []snapshotstore.Source{mem, disk, state}
	said, err := os.ReadFile(r.checkpoints.Path(s.now.ID, checkpoints.SurveyFile))
	if err == nil {
		out = append(out, bytesSource(imageSurvey, said))
	} else if !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	root, err := r.roots.Open(s.now.RootKey())
	if err != nil {
		return nil, err
	}
	s.files = append(s.files, root)
	rootSource, err := fileSource(imageRoot, root)
	if err != nil {
		return nil, err
	}
	switch {
	case reference == nil:
	case reference.Header().GuestImage != s.now.Image:
		return nil, core.Errorf(core.Internal, core.CodeInternal, "checkpoint %s and its ancestor %s are of different images", s.now.ID, s.before.ID)
	case s.now.RootKey() == s.before.RootKey():
		rootSource.Changed = nil
	default: // the ancestor was fetched again, and now has its root file system from another source
		if err := s.compareRoots(r, &rootSource); err != nil {
			return nil, err
		}
	}
	return append(out, rootSource), nil
}

// compareRoots compares the whole root file system with the one of the reference.
func (s *sealSource) compareRoots(r *Runner, root *snapshotstore.Source) error {
	f, err := r.roots.Open(s.before.RootKey())
	if err != nil {
		return err
	}
	s.files = append(s.files, f)
	before, err := fileSource("", f)
	root.Changed, root.Reference = []snapshotstore.Range{{Offset: 0, Length: root.Size}}, before.Read
	return err
}

func (r *Runner) memorySource(s *sealSource) (snapshotstore.Source, error) {
	open := func(o *checkpoints.Opened) (memory.Image, error) {
		f, err := r.bases.OpenFile(o.Base)
		if err == nil {
			s.files = append(s.files, f)
		}
		return memory.Image{Base: f, Delta: o.Delta}, err
	}
	now, err := open(s.now)
	if err != nil {
		return snapshotstore.Source{}, err
	}
	out := snapshotstore.Source{Name: imageMemory, Size: s.now.Memory.Size, Read: memory.NewReader(now).ReadAt}
	var extents []memory.Extent
	if s.before == nil {
		extents, err = memory.MayBeData(now)
	} else {
		var before memory.Image
		if before, err = open(s.before); err != nil {
			return out, err
		}
		out.Reference = memory.NewReader(before).ReadAt
		extents, err = memory.MayDiffer(now, before)
	}
	for _, e := range extents {
		out.Changed = append(out.Changed, snapshotstore.Range{Offset: e.Offset, Length: e.Length})
	}
	if set := r.lazy.WorkingSets.Of(s.now.Base); set.Rehearsed && !s.now.HasDelta() {
		for _, p := range lazy.DecodeWorkingSet(set.Pages, out.Size/manifest.PageSize) {
			out.First = append(out.First, snapshotstore.Range{Offset: p.First * manifest.PageSize, Length: p.Count * manifest.PageSize})
		}
	}
	return out, err
}

func diskSource(s *sealSource) (snapshotstore.Source, error) {
	out, err := fileSource(imageDisk, s.now.Overlay)
	if err != nil || s.before == nil {
		return out, err
	}
	before, err := fileSource("", s.before.Overlay)
	if err != nil {
		return out, err
	}
	ranges, err := sparse.Unshared(s.now.Overlay, s.before.Overlay)
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
