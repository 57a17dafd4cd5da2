package host

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/proxy"
)

// The bounds of records of denied flows. A few denied flows have a record each. Tallies count the others, one for each
// host and reason, until the tallies end.
const (
	deniedSingly = 16          // records of single flows for each sandbox within deniedEvery
	deniedEvery  = time.Minute // after which a tally ends
	deniedKinds  = 16          // tallies of a sandbox at once; one more counts everything else
)

// severalKinds is the reason in the tally that counts everything else.
const severalKinds = "denied; too many different hosts or reasons to count them separately within one minute"

// tally is a record of denied flows that are still being counted. It is in the spool from its first flow on, and its
// count is in a slot, so both outlive this process.
type tally struct {
	flow core.Flow
	slot int
}

// kind contains the fields that all flows of a tally have in common.
type kind struct {
	spoken core.Spoken
	host   string
	port   uint16
	reason string
}

func kindOf(f core.Flow) kind { return kind{f.Spoken, f.Host, f.Port, f.Reason} }

// denials is a journal that bounds the records of denied flows: they cost a sandbox nothing, so it can make any number
// of them.
type denials struct {
	to    *spool
	every time.Duration

	mu sync.Mutex // guards the field of; held while flows are counted
	of map[core.SandboxID]*denied
}

var _ proxy.Journal = (*denials)(nil)

// denied is the state of one sandbox.
type denied struct {
	singly *rate.Limiter
	until  time.Time // the end of its tallies; then this state is forgotten
	kinds  map[kind]*tally
}

func newDenials(s *spool, every time.Duration) *denials {
	return &denials{to: s, every: every, of: map[core.SandboxID]*denied{}}
}

// Begin implements proxy.Journal.
func (d *denials) Begin(f core.Flow) error {
	if f.Outcome != core.FlowDenied {
		return d.to.Begin(f)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	now := time.Now()
	x := d.of[f.SandboxID]
	if x == nil {
		x = &denied{singly: rate.NewLimiter(rate.Every(d.every/deniedSingly), deniedSingly), kinds: map[kind]*tally{}}
		d.of[f.SandboxID] = x
	}
	if now.After(x.until) {
		d.finish(x)
	}
	if len(x.kinds) == 0 {
		x.until = now.Add(d.every)
	}
	k := kindOf(f)
	if x.kinds[k] == nil && x.singly.Allow() {
		return d.to.Begin(f)
	}
	if x.kinds[k] == nil && len(x.kinds) >= deniedKinds {
		f.Host, f.Port, f.Method, f.Path, f.Reason = "", 0, "", "", severalKinds
		f.Spoken = core.SpokenTCP
		k = kindOf(f)
	}
	t := x.kinds[k]
	if t == nil {
		var err error
		if t, err = d.to.beginTally(f); err != nil {
			return err
		}
		x.kinds[k] = t
		return nil
	}
	next := *t
	next.flow.Count, next.flow.Last = t.flow.Count+1, f.At
	if err := d.to.count(next); err != nil {
		return err
	}
	*t = next
	return nil
}

// End implements proxy.Journal.
func (d *denials) End(f core.Flow) { d.to.End(f) }

// finish ends the tallies of a sandbox.
func (d *denials) finish(x *denied) {
	for _, t := range x.kinds {
		d.to.endTally(*t)
	}
	clear(x.kinds)
}

// tidy ends the tallies whose time is over, and forgets their sandboxes.
func (d *denials) tidy(now time.Time) {
	d.to.tidy()
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, x := range d.of {
		if now.After(x.until) {
			d.finish(x)
			delete(d.of, id) // its limiter is full again by now, like a new one
		}
	}
}

// run calls tidy regularly until ctx ends.
func (d *denials) run(ctx context.Context) {
	tick := time.NewTicker(max(d.every/8, time.Millisecond))
	defer tick.Stop()
	for {
		select {
		case now := <-tick.C:
			d.tidy(now)
		case <-ctx.Done():
			return
		}
	}
}

// end ends the tallies of a sandbox that is no longer served; without an id, the tallies of all sandboxes.
func (d *denials) end(id core.SandboxID) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for of, x := range d.of {
		if id == "" || of == id {
			d.finish(x)
			delete(d.of, of)
		}
	}
}

// beginTally writes the first flow of a tally to the spool, if there is room for the end of the tally as well.
func (s *spool) beginTally(f core.Flow) (*tally, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot, err := s.slots.take()
	if err != nil {
		s.unsaid++
		return nil, err
	}
	f.Count, f.Last = 1, f.At
	if err = s.slots.write(slot, f.Count, f.Last); err == nil { // before the tally is in the spool: the slot still has the count of an earlier tally
		err = s.take(f.ID, f.SandboxID, line{Tally: &f, Slot: slot}, true)
	} else {
		s.unsaid++
	}
	if err != nil {
		s.slots.give(slot)
		return nil, err
	}
	t := tally{f, slot}
	s.tallies[f.ID] = t
	return &t, nil
}

// count writes a tally's count to its slot.
func (s *spool) count(t tally) error {
	err := s.slots.write(t.slot, t.flow.Count, t.flow.Last)
	if err != nil {
		s.mu.Lock()
		s.unsaid++
		s.mu.Unlock()
	}
	return err
}

// endTally records a tally with its count.
func (s *spool) endTally(t tally) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if t.flow.Ended = t.flow.Last; t.flow.Ended.IsZero() {
		t.flow.Ended = t.flow.At
	}
	s.finish(late(t))
}
