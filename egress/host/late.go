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
	slot int // of a tally; 0: the flow is none
}

// finish appends the record of a flow's end, and gives back what was reserved for it. What the disk refuses is kept, and written
// later; a record that cannot be encoded is only counted. mu is held, or nobody else knows the spool.
func (s *spool) finish(l late) {
	b, err := s.encode(line{N: s.last + 1, Flow: &l.flow})
	if err != nil { // no process can ever write it
		s.lose(l, err)
		s.done(l)
		return
	}
	if err = s.append(l.flow.SandboxID, b); err == nil {
		s.done(l)
		return
	}
	if !s.under(l.flow.ID) { // it was not begun here: nothing is reserved for it
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

// complain logs once a second: where a disk fails, flows end as often as they like.
func (s *spool) complain(l late, err error) {
	if now := time.Now().Unix(); now != s.said {
		s.said = now
		s.log.Error("the end of a flow was not recorded", "sandbox_id", l.flow.SandboxID, "flow", l.flow.ID, "late", len(s.late), "err", err)
	}
}

// retry writes the ends that could not be written, until one cannot again. mu is held.
func (s *spool) retry() {
	for id, l := range s.late {
		if s.finish(l); s.late[id] == l {
			return
		}
	}
}

// tidy is retry.
func (s *spool) tidy() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.retry()
}
