package runner

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"path/filepath"
	"slices"
	"sync"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/sparse"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/trash"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

// fetchPlan lists the parts of a fetch with the bytes that each will write. It is made before anything is written.
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
	shares, err := sparse.CanReflink(f.r.cfg.DataDir)
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
	if _, err := os.Stat(f.r.roots.Path(f.rec.RootKey())); f.own == nil && errors.Is(err, os.ErrNotExist) {
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

// pageCount counts each page of data that one step of a fetch writes, once. It takes one bit a page, and nothing for large holes. It is
// safe for concurrent use.
type pageCount struct {
	mu   sync.Mutex // guards left
	left map[int64]*pageBits
}

// pageBits has a bit for each page of a part of an image.
type pageBits [512]uint64

// bitsPages is how many pages a part has: 128 MiB.
const bitsPages = int64(len(pageBits{}) * 64)

func newPageCount() *pageCount { return &pageCount{left: make(map[int64]*pageBits)} }

// data yields runs, and notes the pages of those that are not zeros.
func (c *pageCount) data(runs iter.Seq[manifest.Run]) iter.Seq[manifest.Run] {
	return func(yield func(manifest.Run) bool) {
		for run := range runs {
			if run.Frame != nil {
				c.note(run)
			}
			if !yield(run) {
				return
			}
		}
	}
}

func (c *pageCount) note(run manifest.Run) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range int64(run.Count) {
		page := run.Page + i
		bits := c.left[page/bitsPages]
		if bits == nil {
			bits = new(pageBits)
			c.left[page/bitsPages] = bits
		}
		bits[page%bitsPages/64] |= 1 << (page % 64)
	}
}

// count returns how many of n bytes from a page are data that was not counted before.
func (c *pageCount) count(page int64, n int) (bytes int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range int64((n + manifest.PageSize - 1) / manifest.PageSize) {
		at := page + i
		bits, mask := c.left[at/bitsPages], uint64(1)<<(at%64)
		if bits != nil && bits[at%bitsPages/64]&mask != 0 {
			bits[at%bitsPages/64] &^= mask
			bytes += manifest.PageSize
		}
	}
	return bytes
}

// makeRoom reserves disk space for a fetch. If there is too little, it removes unused copies, the least recently used first. If all of them
// together would not be enough, it removes none. The floor stays free for running machines.
func (r *Runner) makeRoom(ctx context.Context, id core.CheckpointID, bytes int64) (*room.Reservation, error) {
	var used []core.CheckpointID // copies that came into use after they were chosen
	for {
		v, err := r.room.Reserve(bytes)
		short, full := errors.AsType[*room.ShortError](err)
		if !full {
			return v, err
		}
		var copied core.CheckpointID
		if most, err := r.mostFreed(); err != nil || short.Need-short.Free <= most { // if the amount is not known, it is tried
			gone, err := r.checkpoints.DropOldest(ctx) // the trash goes first
			if err != nil {
				r.cfg.Log.WarnContext(ctx, "not everything in the trash could be removed for a fetch", "checkpoint_id", id, "err", err)
			}
			if gone {
				continue
			}
			copied, _ = r.leastUsed(0, used...)
		}
		if copied == "" {
			r.metrics.refused.Inc()
			return nil, core.Errorf(core.Exhausted, core.CodeDiskFull,
				"checkpoint %s was not fetched: %v; delete checkpoints, lower --copies-size, give the runner's data directory more room, or fork on another runner", id, short)
		}
		gone, err := r.checkpoints.GiveUp(copied)
		if err != nil {
			return nil, err
		}
		if !gone {
			used = append(used, copied)
			continue
		}
		r.metrics.evicted.Inc()
		r.cfg.Log.InfoContext(ctx, "copy of a checkpoint given up, because a fetch needs the disk space", "checkpoint_id", copied, "for", id)
		r.wake()
	}
}

// plenty is an amount of free disk at which nobody needs to know how much more could be freed.
const plenty = 32 << 30

// freeable is how many bytes of disk may be written, counting the copies that would make room. A runner whose disk is full of
// them has room for forks.
func (r *Runner) freeable() (int64, error) {
	free, err := r.room.Free()
	if err != nil || free >= plenty {
		return free, err
	}
	most, err := r.mostFreed()
	if err != nil {
		return 0, fmt.Errorf("find out what unused copies take of the disk: %w", err)
	}
	return min(free+min(most, plenty), plenty), nil
}

// mostFreed is an upper bound of how many bytes are freed when every unused copy is removed. It may
// be too high: files share extents, a base has several users, and images that still arrive have
// reserved bytes that they have not written. It does not count what machines use, or images that a
// fetch under way brings later; what that fetch has written already is counted.
func (r *Runner) mostFreed() (n int64, err error) {
	list := r.checkpoints.List()
	needed := r.neededCopies(list)
	bases, stay := make(map[core.BaseID]bool), make(map[roots.Key]bool)
	for _, rec := range list {
		if !rec.Fetched || needed[rec.ID] {
			bases[rec.Base], stay[rec.RootKey()] = true, true
			continue
		}
		entries, _ := os.ReadDir(r.checkpoints.Path(rec.ID, "")) // else it was removed meanwhile
		for _, e := range entries {
			n += allocated(r.checkpoints.Path(rec.ID, e.Name()))
		}
	}
	r.mu.Lock()
	for _, s := range r.sandboxes { // also those whose checkpoint is gone
		bases[s.shape.base], stay[s.shape.RootKey()] = true, true
	}
	r.mu.Unlock()
	for _, t := range r.checkpoints.ListTrash() {
		if trash.Kept(r.checkpoints.TrashDir(), t.Record.ID) {
			bases[t.Record.Base], stay[t.Record.RootKey()] = true, true
			continue
		}
		entries, _ := os.ReadDir(trash.Path(r.checkpoints.TrashDir(), t.Record.ID)) // else it was taken back meanwhile
		for _, e := range entries {
			n += allocated(filepath.Join(trash.Path(r.checkpoints.TrashDir(), t.Record.ID), e.Name()))
		}
	}
	all, err := r.bases.List()
	if err != nil {
		return 0, err
	}
	for _, id := range all {
		if !bases[id] {
			bytes, _ := r.bases.AllocatedBytes(id) // else it was removed meanwhile
			n += bytes
		}
	}
	files, err := r.roots.Freeable(stay)
	if err != nil {
		return 0, err
	}
	return n + files + r.lazy.Freeable(func(id string, from core.CheckpointID) bool {
		key, isRoot := lazy.RootKey(id)
		return isRoot && stay[roots.Key(key)] || !isRoot && bases[core.BaseID(id)] || r.fetching.reads(from)
	}), nil
}

// allocated is how many bytes a file takes on disk; 0 if there is no file.
func allocated(path string) int64 {
	var st unix.Stat_t
	if unix.Lstat(path, &st) != nil {
		return 0
	}
	return st.Blocks * 512
}
