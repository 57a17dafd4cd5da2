package fetch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/room"
	"github.com/coppice-dev/coppice/runner/roots"
	"github.com/coppice-dev/coppice/runner/trash"
)

// Reserve reserves disk space for a fetch. If there is too little, it removes unused copies, the least recently used first. If all of them
// together would not be enough, it removes none. The floor stays free for running machines.
func (f *Fetcher) Reserve(ctx context.Context, id core.CheckpointID, bytes int64) (*room.Reservation, error) {
	var used []core.CheckpointID // copies that came into use after they were chosen
	for {
		v, err := f.cfg.Room.Reserve(bytes)
		short, full := errors.AsType[*room.ShortError](err)
		if !full {
			return v, err
		}
		var copied core.CheckpointID
		if most, err := f.MostFreed(); err != nil || short.Need-short.Free <= most { // if the amount is not known, it is tried
			gone, err := f.cfg.Checkpoints.DropOldest(ctx) // the trash goes first
			if err != nil {
				f.cfg.Log.WarnContext(ctx, "not everything in the trash could be removed for a fetch", "checkpoint_id", id, "err", err)
			}
			if gone {
				continue
			}
			copied, _ = f.LeastUsed(0, used...)
		}
		if copied == "" {
			f.metrics.refused.Inc()
			return nil, core.Errorf(core.Exhausted, core.CodeDiskFull,
				"checkpoint %s was not fetched: %v; delete checkpoints, lower --copies-size, give the runner's data directory more room, or fork on another runner", id, short)
		}
		gone, err := f.cfg.Checkpoints.GiveUp(copied)
		if err != nil {
			return nil, err
		}
		if !gone {
			used = append(used, copied)
			continue
		}
		f.metrics.evicted.Inc()
		f.cfg.Log.InfoContext(ctx, "copy of a checkpoint given up, because a fetch needs the disk space", "checkpoint_id", copied, "for", id)
		f.cfg.Wake()
	}
}

// plenty is so much free disk that it does not matter how much more could be freed.
const plenty = 32 << 30

// Freeable returns the number of bytes that may be written to the disk, counting the copies that can be removed. A
// runner whose disk is full of such copies has room for forks.
func (f *Fetcher) Freeable() (int64, error) {
	free, err := f.cfg.Room.Free()
	if err != nil || free >= plenty {
		return free, err
	}
	most, err := f.MostFreed()
	if err != nil {
		return 0, fmt.Errorf("measure how much disk unused copies take: %w", err)
	}
	return min(free+min(most, plenty), plenty), nil
}

// MostFreed is an upper bound of how many bytes are freed when every unused copy is removed. It may
// be too high: files share extents, a base has several users, and images that still arrive have
// reserved bytes that they have not written. It does not count what machines use, or images that a
// fetch under way brings later; what that fetch has written already is counted.
func (f *Fetcher) MostFreed() (n int64, err error) {
	list := f.cfg.Checkpoints.List()
	needed := f.neededCopies(list)
	bases, stay := make(map[core.BaseID]bool), make(map[roots.Key]bool)
	for _, rec := range list {
		if !rec.Fetched || needed[rec.ID] {
			bases[rec.Base], stay[rec.RootKey()] = true, true
			continue
		}
		entries, _ := os.ReadDir(f.cfg.Checkpoints.Path(rec.ID, "")) // else it was removed meanwhile
		for _, e := range entries {
			n += allocated(f.cfg.Checkpoints.Path(rec.ID, e.Name()))
		}
	}
	for _, s := range f.cfg.Sandboxes() { // also those whose checkpoint is gone
		bases[s.Base], stay[s.Root] = true, true
	}
	for _, t := range f.cfg.Checkpoints.ListTrash() {
		if trash.Kept(f.cfg.Checkpoints.TrashDir(), t.Record.ID) {
			bases[t.Record.Base], stay[t.Record.RootKey()] = true, true
			continue
		}
		entries, _ := os.ReadDir(trash.Path(f.cfg.Checkpoints.TrashDir(), t.Record.ID)) // else it was taken back meanwhile
		for _, e := range entries {
			n += allocated(filepath.Join(trash.Path(f.cfg.Checkpoints.TrashDir(), t.Record.ID), e.Name()))
		}
	}
	all, err := f.cfg.Bases.List()
	if err != nil {
		return 0, err
	}
	for _, id := range all {
		if !bases[id] {
			bytes, _ := f.cfg.Bases.AllocatedBytes(id) // else it was removed meanwhile
			n += bytes
		}
	}
	files, err := f.cfg.Roots.Freeable(stay)
	if err != nil {
		return 0, err
	}
	return n + files + f.cfg.Lazy.Freeable(func(id string, from core.CheckpointID) bool {
		key, isRoot := lazy.RootKey(id)
		return isRoot && stay[roots.Key(key)] || !isRoot && bases[core.BaseID(id)] || f.readings.reads(from)
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
