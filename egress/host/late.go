package host

import (
	"time"

	"github.com/coppice-dev/coppice/core"
)

// late is the end of a flow that could not be written, for example because the disk is full. The
// flow still counts as open, or as a tally, and the room for its end stays reserved. This bounds
// how many late ends there are. See spool.retry.
type late struct {
	flow core.Flow
	slot int // slot of a tally; 0: the flow is not a tally
}

// finish appends the record of a flow's end and releases the room that was reserved for it. If the write fails, the end
// is kept and written later; a record that cannot be encoded is only counted. The caller holds mu, or nobody else knows
// the spool.
func (s *spool) finish(l late) {
	b, err := s.encode(line{N: s.last + 1, Flow: &l.flow})
	if err != nil { // it cannot be encoded later either
		s.lose(l, err)
		s.done(l)
		return
	}
	if err = s.append(l.flow.SandboxID, b); err == nil {
		s.done(l)
		return
	}
	if !s.under(l.flow.ID) { // it did not begin in this spool: no room is reserved for it
		s.lose(l, err)
		return
	}
	s.late[l.flow.ID] = l
	s.complain(l, err)
}

// under reports whether a flow is under way.
func (s *spool) under(flow string) bool {
	_, open := s.open[flow]
	_, tallied := s.tallies[flow]
	return open || tallied
}

// done forgets a flow whose end is recorded.
func (s *spool) done(l late) {
	id := l.flow.ID
	s.reserved -= s.room[id]
	s.charge(l.flow.SandboxID, -s.room[id])
	delete(s.room, id)
	delete(s.late, id)
	s.note(l.flow)
	if l.slot > 0 {
		s.slots.give(l.slot)
	}
}

func (s *spool) lose(l late, err error) {
	s.unsaid++
	s.complain(l, err)
}

// complain logs at most once a second: on a failing disk, a guest can end any number of flows.
func (s *spool) complain(l late, err error) {
	if now := time.Now().Unix(); now != s.said {
		s.said = now
		s.log.Error("the end of a flow was not recorded", "sandbox_id", l.flow.SandboxID, "flow", l.flow.ID, "late", len(s.late), "err", err)
	}
}

// retry writes the ends that could not be written before, and stops at the first that fails again. The caller holds mu.
func (s *spool) retry() {
	for id, l := range s.late {
		if s.finish(l); s.late[id] == l {
			return
		}
	}
}

// tidy takes mu and calls retry.
func (s *spool) tidy() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retry()
}
