package runner

import (
	"cmp"
	"context"
	"errors"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// bring opens a checkpoint. If the checkpoint is not on this host, bring fetches it first. From then on the checkpoint is not given up. If it
// is being given up at this moment, bring fetches it again. A caller gets the checkpoint only if it is what this caller expects.
func (r *Runner) bring(ctx context.Context, id core.CheckpointID, sources []runnerapi.Stored, want *runnerapi.Expected) (*opened, error) {
	r.checkpoints.hold(id)
	defer r.checkpoints.release(id)
	for again := len(sources) > 0; ; again = false {
		if err := r.fetch(ctx, id, sources, want); err != nil {
			return nil, err
		}
		o, err := r.checkpoints.open(id)
		if core.CodeOf(err) == core.CodeCheckpointNotFound && again {
			continue
		}
		if err != nil {
			return nil, err
		}
		bad := r.expect(ctx, o.checkpointRecord, sources, want)
		if bad == nil {
			return o, nil
		}
		if err := o.close(); err != nil {
			return nil, errors.Join(bad, err)
		}
		if !again || !errors.Is(bad, errUnfit) {
			return nil, bad
		}
		// Nothing may use the copy any more. It is given up, unless something that grew from it still runs.
		if gone, err := r.replaceCopy(ctx, id, bad); !gone || err != nil {
			return nil, errors.Join(bad, err)
		}
	}
}

// replaceCopy gives up a copy that the caller holds, unless anything else uses it.
func (r *Runner) replaceCopy(ctx context.Context, id core.CheckpointID, bad error) (gone bool, err error) {
	r.checkpoints.release(id)
	defer r.checkpoints.hold(id)
	if r.neededCopies(r.checkpoints.list())[id] {
		return false, nil
	}
	if gone, err = r.giveUp(id); gone {
		r.cfg.Log.WarnContext(ctx, "copy of a checkpoint given up, because it is not what the controller names", "checkpoint_id", id, "err", bad)
		r.wake()
	}
	return gone, err
}

// trimCopies gives up fetched checkpoints, the least recently used first, until the others fit into their budget. Checkpoints that were
// captured here stay, and so do checkpoints in use: by a fork, by a comparison, by a sandbox that grew from them, by a checkpoint that will be
// stored as a difference to them, or by others whose base they are. The controller learns of it from the next report.
func (r *Runner) trimCopies(ctx context.Context) error {
	budget := r.cfg.Store.Copies
	if budget == 0 {
		return nil
	}
	var errs []error
	for {
		id, over := r.leastUsed(budget)
		if !over || id == "" {
			return errors.Join(errs...)
		}
		gone, err := r.giveUp(id)
		errs = append(errs, err)
		if !gone || err != nil { // it is used again; later
			return errors.Join(errs...)
		}
		r.metrics.evicted.Inc()
		r.cfg.Log.InfoContext(ctx, "copy of a checkpoint given up to free disk space", "checkpoint_id", id)
		r.wake()
	}
}

// leastUsed says whether the fetched checkpoints take more than the budget. It also returns the least recently used one that can be given up,
// if there is one, ignoring some.
func (r *Runner) leastUsed(budget int64, but ...core.CheckpointID) (_ core.CheckpointID, over bool) {
	list := r.checkpoints.list()
	if !slices.ContainsFunc(list, func(rec *checkpointRecord) bool { return rec.Fetched }) {
		return "", false
	}
	users, captured := make(map[core.BaseID]int), make(map[core.BaseID]bool)
	for _, rec := range list {
		users[rec.Base]++
		captured[rec.Base] = captured[rec.Base] || !rec.Fetched
	}
	needed := r.neededCopies(list)
	total := r.roots.StoredBytes()
	var free []*checkpointRecord
	for _, rec := range list {
		if !rec.Fetched {
			continue
		}
		total += rec.DeviceStateBytes + rec.DeltaBytes + rec.DiskBytes
		if !needed[rec.ID] && !slices.Contains(but, rec.ID) && (rec.hasDelta() || users[rec.Base] == 1) {
			free = append(free, rec)
		}
	}
	for base := range users {
		if bytes, err := r.bases.AllocatedBytes(base); err == nil && !captured[base] {
			total += bytes
		}
	}
	if total <= budget || len(free) == 0 {
		return "", total > budget
	}
	return slices.MinFunc(free, func(a, b *checkpointRecord) int {
		return cmp.Or(r.checkpoints.lastUse(a.ID).Compare(r.checkpoints.lastUse(b.ID)), strings.Compare(string(a.ID), string(b.ID)))
	}).ID, true
}

// neededCopies are the checkpoints that are useful for something on this host.
func (r *Runner) neededCopies(list []*checkpointRecord) map[core.CheckpointID]bool {
	needed := make(map[core.CheckpointID]bool)
	for _, s := range r.Sandboxes() {
		if s.State != runnerapi.SandboxDead {
			needed[s.Checkpoint] = true
		}
	}
	for _, rec := range list {
		if r.checkpoints.isHeld(rec.ID) {
			needed[rec.ID] = true
		}
		if r.seals.isSealed(rec.ID) {
			continue
		}
		for _, id := range r.ancestors(rec) {
			needed[id] = true
		}
	}
	return needed
}

// giveUp removes a checkpoint from this host, unless it is in use or being fetched. A caller that wants the checkpoint meanwhile waits, and
// fetches it again.
func (r *Runner) giveUp(id core.CheckpointID) (gone bool, err error) {
	f := &flight{done: make(chan struct{})}
	r.mu.Lock()
	_, busy := r.captures[id]
	if busy = busy || r.checkpoints.isHeld(id); !busy {
		r.captures[id] = f
	}
	r.mu.Unlock()
	if busy {
		return false, nil
	}
	defer func() {
		r.mu.Lock()
		delete(r.captures, id)
		r.mu.Unlock()
		close(f.done)
	}()
	if gone, err = r.checkpoints.removeUnheld(id); !gone {
		return false, err
	}
	r.forgetForks(id)
	r.seals.forget(id)
	return true, errors.Join(err, r.roots.Collect())
}

// hold notes that a checkpoint is in use until release.
func (s *checkpointStore) hold(id core.CheckpointID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[id]++
	s.used[id] = time.Now()
}

func (s *checkpointStore) release(id core.CheckpointID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[id]--; s.held[id] == 0 {
		delete(s.held, id)
		if s.freed != nil {
			close(s.freed)
			s.freed = nil
		}
	}
	if _, there := s.records[id]; !there {
		delete(s.used, id)
	}
}

func (s *checkpointStore) isHeld(id core.CheckpointID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[id] > 0
}

// unheld returns a channel that is closed when a checkpoint may no longer be in use.
func (s *checkpointStore) unheld(id core.CheckpointID) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[id] == 0 {
		return alreadyClosed
	}
	if s.freed == nil {
		s.freed = make(chan struct{})
	}
	return s.freed
}

// lastUse is when a checkpoint was opened last. If this process has not opened it, it is when the checkpoint arrived on this host.
func (s *checkpointStore) lastUse(id core.CheckpointID) time.Time {
	s.mu.Lock()
	at, known := s.used[id]
	s.mu.Unlock()
	if known {
		return at
	}
	info, err := os.Stat(s.path(id, recordFile))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// removeUnheld removes a checkpoint unless it is in use.
func (s *checkpointStore) removeUnheld(id core.CheckpointID) (gone bool, err error) {
	s.mu.Lock()
	_, there := s.records[id]
	if !there || s.held[id] > 0 {
		s.mu.Unlock()
		return false, nil
	}
	delete(s.records, id)
	delete(s.used, id)
	s.mu.Unlock()
	return true, s.removeFiles(id)
}
