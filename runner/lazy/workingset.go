package lazy

import (
	"context"
	"encoding/binary"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/memory"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/vmm"
)

// WorkingSets are, by base, the pages that machines on it use first. Where the base must be fetched, those come first. They are encoded
// as in runnerapi.StoredRecord. The zero value is ready for use, and its methods are safe for concurrent use.
type WorkingSets struct {
	mu   sync.Mutex // guards sets
	sets map[core.BaseID]WorkingSet
}

// WorkingSet is what is known of one base.
type WorkingSet struct {
	Pages     []byte // nil while they are not known yet
	Rehearsed bool   // they are exactly the pages that were used; otherwise all that were mapped, with those around them
}

// maxWorkingSets bounds how many are known, by some kilobytes each: another is forgotten for the next.
const maxWorkingSets = 256

// Claim reports whether the caller is the first to ask. The first observes a machine on the base.
func (w *WorkingSets) Claim(base core.BaseID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, there := w.sets[base]; there || base == "" {
		return false
	}
	w.keep(base, WorkingSet{})
	return true
}

// keep remembers one. The caller holds mu.
func (w *WorkingSets) keep(base core.BaseID, set WorkingSet) {
	if w.sets == nil {
		w.sets = make(map[core.BaseID]WorkingSet)
	}
	for other := range w.sets {
		if len(w.sets) < maxWorkingSets {
			break
		}
		delete(w.sets, other)
	}
	w.sets[base] = set
}

// observed records what a machine was seen to use. A rehearsal says more, so it is not replaced.
func (w *WorkingSets) observed(base core.BaseID, b []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.sets[base].Rehearsed {
		w.keep(base, WorkingSet{Pages: b})
	}
}

// SetRehearsed records what a machine used in a rehearsal. With nil the rehearsal failed: what is known stays, and there is no other
// rehearsal.
func (w *WorkingSets) SetRehearsed(base core.BaseID, b []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b == nil {
		b = w.sets[base].Pages
	}
	w.keep(base, WorkingSet{b, true})
}

// Of is what is known of a base.
func (w *WorkingSets) Of(base core.BaseID) WorkingSet {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sets[base]
}

// settleTime is how long a machine is observed: agents run a command as soon as it is ready.
const settleTime = time.Second

// runaway is by how much the pages of a machine may have grown in that time for them to count: one that reads all of its memory says
// nothing about others.
const runaway = 3

// Observe looks twice at what a machine without private pages of its checkpoint uses: when it is ready, and a moment later. It ends
// early when the machine is gone or ctx ends.
func (w *WorkingSets) Observe(ctx context.Context, base core.BaseID, machine vmm.Machine, gone <-chan struct{}) {
	var first int64
	for _, after := range []time.Duration{0, settleTime} {
		pause := time.NewTimer(after)
		select {
		case <-pause.C:
		case <-gone:
		case <-ctx.Done():
		}
		pause.Stop()
		region, err := machine.Memory()
		var touched []memory.Extent
		if err == nil {
			touched, err = memory.Touched(region)
		}
		if err != nil { // it has ended
			return
		}
		if n := memory.TotalBytes(touched); first == 0 || n <= runaway*first {
			first = n
			w.observed(base, EncodeWorkingSet(touched))
		}
	}
}

// maxWorkingRanges is how many ranges a working set has: what a message to the pager takes.
const maxWorkingRanges = 4096

// EncodeWorkingSet writes a working set as it is stored. It joins ranges if there are too many.
func EncodeWorkingSet(extents []memory.Extent) []byte {
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

// DecodeWorkingSet reads the working set of an image that has this many pages. It stops at the first range that is not within the
// image, because a working set comes from the store.
func DecodeWorkingSet(b []byte, pages int64) (out []pager.Range) {
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
