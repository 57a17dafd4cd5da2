package host

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/proxy"
)

// The bounds of records of denied flows: a few have records of their own. Tallies count the others, each for one host and reason, until they
// end.
const (
	deniedSingly = 16          // of each sandbox within deniedEvery
	deniedEvery  = time.Minute // after which a tally ends
	deniedKinds  = 16          // tallies that a sandbox has at once; a last one counts all others
)

// severalKinds is the reason of that last one.
const severalKinds = "denied, to more hosts or for more reasons than are told apart within one minute"

// tally is a record of denied flows that are being counted. It is in the spool from its first flow on, and its count in a slot, so that both
// outlive this process.
type tally struct {
	flow core.Flow
	slot int
}

// kind has the common fields of the flows of a tally.
type kind struct {
	spoken core.Spoken
	host   string
	port   uint16
	reason string
}

func kindOf(f core.Flow) kind { return kind{f.Spoken, f.Host, f.Port, f.Reason} }

// denials is a journal that bounds what denied flows take: a sandbox makes as many as it likes, for nothing.
type denials struct {
	to    *spool
	every time.Duration

	mu sync.Mutex // guards of; held while flows are counted
	of map[core.SandboxID]*denied
}

var _ proxy.Journal = (*denials)(nil)

// denied is the state of one sandbox.
type denied struct {
	singly *rate.Limiter
	until  time.Time // the end of its tallies, or of what is known of it
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

// finish ends a sandbox's tallies.
func (d *denials) finish(x *denied) {
	for _, t := range x.kinds {
		d.to.endTally(*t)
	}
	clear(x.kinds)
}

// tidy ends the tallies that are due, and forgets sandboxes that had nothing denied since.
func (d *denials) tidy(now time.Time) {
	d.to.tidy()
	d.mu.Lock()
	defer d.mu.Unlock()
	for id, x := range d.of {
		if now.After(x.until) {
			d.finish(x)
			delete(d.of, id) // by now it may have as many singly as at first
		}
	}
}

// run tidies until ctx ends, and then ends all tallies.
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

// end ends the tallies of a sandbox that is served no more; of all, without an id.
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

// beginTally takes the first flow of a tally, if there is room for its end.
func (s *spool) beginTally(f core.Flow) (*tally, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	slot, err := s.slots.take()
	if err != nil {
		s.unsaid++
		return nil, err
	}
	f.Count, f.Last = 1, f.At
	if err = s.slots.write(slot, f.Count, f.Last); err == nil { // before it is in the spool: what was counted there before is another's
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

// count keeps a tally's count.
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
