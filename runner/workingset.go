package runner

import (
	"encoding/binary"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/pager"
)

// workingSets are, by base, the pages that machines on it use first: where the base must be fetched, those come first. They are encoded as in
// runnerapi.StoredRecord. The zero value is ready for use.
type workingSets struct {
	mu   sync.Mutex // guards sets
	sets map[core.BaseID]workingSet
}

type workingSet struct {
	pages     []byte // nil while they are not known yet
	rehearsed bool   // they are exactly the pages; otherwise all that were mapped, with those around them
}

// maxWorkingSets bounds how many are known, by some kilobytes each: another is forgotten for the next.
const maxWorkingSets = 256

// claim reports whether whoever asks is the first, who is to observe a machine.
func (w *workingSets) claim(base core.BaseID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, there := w.sets[base]; there || base == "" {
		return false
	}
	w.keep(base, workingSet{})
	return true
}

// keep remembers one. The caller holds mu.
func (w *workingSets) keep(base core.BaseID, set workingSet) {
	if w.sets == nil {
		w.sets = make(map[core.BaseID]workingSet)
	}
	for other := range w.sets {
		if len(w.sets) < maxWorkingSets {
			break
		}
		delete(w.sets, other)
	}
	w.sets[base] = set
}

// observed is what a machine was seen to use; a rehearsal says more.
func (w *workingSets) observed(base core.BaseID, b []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.sets[base].rehearsed {
		w.keep(base, workingSet{pages: b})
	}
}

// rehearsed is what a machine has used in a rehearsal; nil when there was none that succeeded, and there will be no other.
func (w *workingSets) rehearsed(base core.BaseID, b []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b == nil {
		b = w.sets[base].pages
	}
	w.keep(base, workingSet{b, true})
}

func (w *workingSets) of(base core.BaseID) workingSet {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sets[base]
}

// settleTime is how long a machine is observed: agents run a command as soon as it is ready.
const settleTime = time.Second

// runaway is by how much the pages of a machine may have grown in that time for them to count: one that reads all of its memory says nothing about
// others.
const runaway = 3

// observe looks twice at what a machine without private pages of its checkpoint uses: when it is ready, and a moment later.
func (r *Runner) observe(s *sandbox) {
	var first int64
	for _, after := range []time.Duration{0, settleTime} {
		pause := time.NewTimer(after)
		select {
		case <-pause.C:
		case <-s.gone:
		case <-r.runCtx.Done():
		}
		pause.Stop()
		region, err := s.machine.Memory()
		var touched []memory.Extent
		if err == nil {
			touched, err = memory.Touched(region)
		}
		if err != nil { // it has ended
			return
		}
		if n := memory.TotalBytes(touched); first == 0 || n <= runaway*first {
			first = n
			r.working.observed(s.base.ID, encodeWorkingSet(touched))
		}
	}
}

// workingSetOn is that of a checkpoint whose machine is on a base, and was grown from another.
func (r *Runner) workingSetOn(base core.BaseID, parent core.CheckpointID) []byte {
	if b := r.working.of(base).pages; b != nil {
		return b
	}
	if rec, err := r.checkpoints.get(parent); err == nil {
		return rec.WorkingSet
	}
	return nil
}

// workingSet is that of a checkpoint. Of a template, whose capture comes before every fork, it may be known only now.
func (r *Runner) workingSet(rec *checkpointRecord) []byte {
	if rec.WorkingSet != nil || rec.hasDelta() {
		return rec.WorkingSet
	}
	return r.working.of(rec.Base).pages
}

// maxWorkingRanges is how many ranges a working set has: what a message to the pager takes.
const maxWorkingRanges = 4096

func encodeWorkingSet(extents []memory.Extent) []byte {
	for gap := int64(1); len(extents) > maxWorkingRanges; gap *= 2 {
		extents = bridge(extents, gap*memory.PageSize)
	}
	var out []byte
	var at int64
	for _, e := range extents {
		out = binary.AppendUvarint(out, uint64((e.Offset-at)/memory.PageSize))
		out = binary.AppendUvarint(out, uint64(e.Length/memory.PageSize))
		at = e.End()
	}
	return out
}

// bridge joins extents with no more than gap bytes between them.
func bridge(extents []memory.Extent, gap int64) (out []memory.Extent) {
	for _, e := range extents {
		if n := len(out); n > 0 && e.Offset-out[n-1].End() <= gap {
			out[n-1].Length = e.End() - out[n-1].Offset
		} else {
			out = append(out, e)
		}
	}
	return out
}

// decodeWorkingSet reads one of an image of some pages, as far as it makes sense: it comes from the store.
func decodeWorkingSet(b []byte, pages int64) (out []pager.Range) {
	var at int64
	for len(out) < maxWorkingRanges {
		gap, n := binary.Uvarint(b)
		if n <= 0 {
			break
		}
		count, m := binary.Uvarint(b[n:])
		if m <= 0 || gap > uint64(pages-at) || count > uint64(pages-at)-gap {
			break
		}
		at += int64(gap)
		out = append(out, pager.Range{First: at, Count: int64(count)})
		at += int64(count)
		b = b[n+m:]
	}
	return out
}
