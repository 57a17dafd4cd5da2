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

// WorkingSets has, for each base, the pages that machines on it use first. When the base must be fetched, the pager fetches these pages
// first. They are encoded as in runnerapi.StoredRecord. The zero value is ready for use, and its methods are safe for concurrent use.
type WorkingSets struct {
	mu   sync.Mutex // guards sets
	sets map[core.BaseID]WorkingSet
}

// WorkingSet is the known working set of one base.
type WorkingSet struct {
	Pages     []byte // nil while they are not known yet
	Rehearsed bool   // the pages are exactly those that were used; otherwise they are all mapped pages, including neighbours of used ones
}

// maxWorkingSets bounds how many working sets are kept. Each takes some kilobytes. For a further one, another is forgotten.
const maxWorkingSets = 256

// Claim reports whether the caller is the first one to ask for a base. The first caller observes a machine on the base.
func (w *WorkingSets) Claim(base core.BaseID) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	if _, there := w.sets[base]; there || base == "" {
		return false
	}
	w.keep(base, WorkingSet{})
	return true
}

// keep remembers a working set. The caller holds mu.
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

// observed records the pages that a machine was seen to use. It does not replace the result of a rehearsal, which is more exact.
func (w *WorkingSets) observed(base core.BaseID, b []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if !w.sets[base].Rehearsed {
		w.keep(base, WorkingSet{Pages: b})
	}
}

// SetRehearsed records the pages that a machine used in a rehearsal. nil means that the rehearsal failed: the known working set stays, and
// there is no other rehearsal.
func (w *WorkingSets) SetRehearsed(base core.BaseID, b []byte) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if b == nil {
		b = w.sets[base].Pages
	}
	w.keep(base, WorkingSet{b, true})
}

// Of returns the known working set of a base.
func (w *WorkingSets) Of(base core.BaseID) WorkingSet {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.sets[base]
}

// settleTime is how long a machine is observed. It is short because agents run a command as soon as the machine is ready.
const settleTime = time.Second

// runaway bounds the growth of a machine's pages in that time. If they grow more, they do not count: a machine that reads all of its memory
// says nothing about other machines.
const runaway = 3

// Observe looks twice at the pages that a machine uses: when it is ready, and a moment later. The machine has no private pages of its
// checkpoint. Observe ends early if the machine or ctx ends.
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

// maxWorkingRanges bounds the ranges of a working set. So many fit in a message to the pager.
const maxWorkingRanges = 4096

// EncodeWorkingSet encodes a working set for the store. It joins ranges if there are too many.
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
