package fetch

import (
	"errors"
	"iter"
	"os"
	"slices"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// fetchPlan lists the parts of a fetch and the bytes that each will write. It is complete before the first write.
type fetchPlan struct {
	near    bool           // the memory is compared with the memory of an ancestor on this host
	changed []manifest.Run // the result of this comparison
	differ  int64          // bytes of changed
	later   bool           // the memory is fetched later

	small, memory, disk, root int64
}

func (p fetchPlan) bytes() int64 { return p.small + p.memory + p.disk + p.root }

// plan decides how a checkpoint is fetched. It uses only the checkpoint's maps.
func (f *fetching) plan() error {
	for _, name := range []string{runnerapi.ImageState, runnerapi.ImageSurvey} {
		if tree := f.snapshot.Image(name); tree != nil {
			f.will.small += tree.Size()
		}
	}
	shares, err := sparse.CanReflink(f.cfg.DataDir)
	if err != nil {
		return err
	}
	tree := f.snapshot.Image(runnerapi.ImageMemory)
	whole := dataBytes(tree.Runs())
	f.will.memory = whole
	if f.will.near = f.near != nil && f.near.Delta == nil && f.near.Memory.Size == tree.Size(); f.will.near {
		f.will.changed = slices.Collect(tree.Changed(f.nearSnapshot.Image(runnerapi.ImageMemory)))
		for _, run := range f.will.changed {
			f.will.differ += int64(run.Count) * manifest.PageSize
		}
	}
	f.will.later = f.lazy && (!f.will.near || f.will.differ > eagerDelta)
	if f.will.near && (shares || !f.will.later) { // a delta, or a part that shares extents with the base
		f.will.memory = f.will.differ
	}
	disk := f.snapshot.Image(runnerapi.ImageDisk)
	f.will.disk = dataBytes(disk.Runs())
	if f.near != nil {
		f.will.disk = dataBytes(disk.Changed(f.nearSnapshot.Image(runnerapi.ImageDisk)))
		if !shares { // the ancestor's overlay is copied first
			n, err := sparse.Allocated(f.near.Overlay)
			if err != nil {
				return err
			}
			f.will.disk += n
		}
	}
	if _, err := os.Stat(f.cfg.Roots.Path(f.rec.RootKey())); f.own == nil && errors.Is(err, os.ErrNotExist) {
		f.will.root = dataBytes(f.snapshot.Image(runnerapi.ImageRoot).Runs())
	}
	return nil
}

// dataBytes is how many bytes of runs are not zeros.
func dataBytes(runs iter.Seq[manifest.Run]) (n int64) {
	for run := range runs {
		if run.Frame != nil {
			n += int64(run.Count) * manifest.PageSize
		}
	}
	return n
}
