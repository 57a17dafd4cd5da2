package fetch

import (
	"cmp"
	"context"
	"errors"
	"slices"
	"strings"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
)

// EnsureLocal opens a checkpoint. If the checkpoint is not on this host, EnsureLocal fetches it first. From then on the checkpoint is not given up. If it
// is being given up at this moment, EnsureLocal fetches it again. A caller gets the checkpoint only if it is what this caller expects.
func (f *Fetcher) EnsureLocal(ctx context.Context, id core.CheckpointID, sources []runnerapi.Stored, want *runnerapi.Expected) (*checkpoints.Opened, error) {
	f.cfg.Checkpoints.Hold(id)
	defer f.cfg.Checkpoints.Release(id)
	for again := len(sources) > 0; ; again = false {
		if err := f.fetch(ctx, id, sources, want); err != nil {
			return nil, err
		}
		o, err := f.cfg.Checkpoints.Open(id)
		if core.CodeOf(err) == core.CodeCheckpointNotFound && again {
			continue
		}
		if err != nil {
			return nil, err
		}
		bad := f.expect(ctx, o.Record, sources, want)
		if bad == nil {
			return o, nil
		}
		if err := o.Close(); err != nil {
			return nil, errors.Join(bad, err)
		}
		if !again || !errors.Is(bad, errUnfit) {
			return nil, bad
		}
		// Nothing may use the copy any more. It is given up, unless something that descends from it still runs.
		if gone, err := f.replaceCopy(ctx, id, bad); !gone || err != nil {
			return nil, errors.Join(bad, err)
		}
	}
}

// replaceCopy gives up a copy that the caller holds, unless anything else uses it.
func (f *Fetcher) replaceCopy(ctx context.Context, id core.CheckpointID, bad error) (gone bool, err error) {
	f.cfg.Checkpoints.Release(id)
	defer f.cfg.Checkpoints.Hold(id)
	if f.neededCopies(f.cfg.Checkpoints.List())[id] {
		return false, nil
	}
	if gone, err = f.cfg.Checkpoints.GiveUp(id); gone {
		f.cfg.Log.WarnContext(ctx, "copy of a checkpoint given up, because it is not what the controller names", "checkpoint_id", id, "err", bad)
		f.cfg.Wake()
	}
	return gone, err
}

// Trim gives up fetched checkpoints, the least recently used first, until the others fit into their budget. Checkpoints that were
// captured here stay, and so do checkpoints in use: by a fork, by a comparison, by a sandbox that was forked from them, by a checkpoint that will be
// stored as a difference to them, or by others whose base they are. The controller learns of it from the next report.
func (f *Fetcher) Trim(ctx context.Context) error {
	budget := f.cfg.Copies
	if budget == 0 {
		return nil
	}
	var errs []error
	for {
		id, over := f.LeastUsed(budget)
		if !over || id == "" {
			return errors.Join(errs...)
		}
		gone, err := f.cfg.Checkpoints.GiveUp(id)
		errs = append(errs, err)
		if !gone || err != nil { // it is used again; later
			return errors.Join(errs...)
		}
		f.metrics.evicted.Inc()
		f.cfg.Log.InfoContext(ctx, "copy of a checkpoint given up to free disk space", "checkpoint_id", id)
		f.cfg.Wake()
	}
}

// LeastUsed says whether the fetched checkpoints take more than the budget. It also returns the least recently used one that can be given up,
// if there is one, ignoring some.
func (f *Fetcher) LeastUsed(budget int64, but ...core.CheckpointID) (_ core.CheckpointID, over bool) {
	list := f.cfg.Checkpoints.List()
	if !slices.ContainsFunc(list, func(rec *checkpoints.Record) bool { return rec.Fetched }) {
		return "", false
	}
	users, captured := make(map[core.BaseID]int), make(map[core.BaseID]bool)
	for _, rec := range list {
		users[rec.Base]++
		captured[rec.Base] = captured[rec.Base] || !rec.Fetched
	}
	needed := f.neededCopies(list)
	total := f.cfg.Roots.StoredBytes()
	var free []*checkpoints.Record
	for _, rec := range list {
		if !rec.Fetched {
			continue
		}
		total += rec.DeviceStateBytes + rec.DeltaBytes + rec.DiskBytes
		if !needed[rec.ID] && !slices.Contains(but, rec.ID) && (rec.HasDelta() || users[rec.Base] == 1) {
			free = append(free, rec)
		}
	}
	for base := range users {
		if bytes, err := f.cfg.Bases.AllocatedBytes(base); err == nil && !captured[base] {
			total += bytes
		}
	}
	if total <= budget || len(free) == 0 {
		return "", total > budget
	}
	return slices.MinFunc(free, func(a, b *checkpoints.Record) int {
		return cmp.Or(f.cfg.Checkpoints.LastUse(a.ID).Compare(f.cfg.Checkpoints.LastUse(b.ID)), strings.Compare(string(a.ID), string(b.ID)))
	}).ID, true
}

// neededCopies are the checkpoints that something on this host needs.
func (f *Fetcher) neededCopies(list []*checkpoints.Record) map[core.CheckpointID]bool {
	needed := make(map[core.CheckpointID]bool)
	for _, s := range f.cfg.Sandboxes() {
		needed[s.Checkpoint] = true
	}
	for _, rec := range list {
		if f.cfg.Checkpoints.IsHeld(rec.ID) {
			needed[rec.ID] = true
		}
		if f.cfg.Uploads.IsSealed(rec.ID) {
			continue
		}
		for _, id := range f.cfg.Uploads.Ancestors(rec) {
			needed[id] = true
		}
	}
	return needed
}
