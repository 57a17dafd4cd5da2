// Package beats makes the heartbeats of a runner: it numbers them, and leaves out what a controller knows already.
// docs/adr/0044-heartbeats.md
package beats

import (
	"reflect"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// usageEvery is how often a heartbeat with differences has the usage of a sandbox that lives. Controllers record it less often.
const usageEvery = 20 * time.Second

// Sender makes the heartbeats of one runner. Its zero value has no lease. It is not safe for concurrent use.
type Sender struct {
	epoch    int64
	number   int64 // of the last heartbeat that was begun in this epoch
	answered int64 // of the last one that was answered
	// What the controllers have recorded of the last answered heartbeat; nil: that is not known, and the next heartbeat has all of it.
	sandboxes   map[core.SandboxID]runnerapi.Sandbox // living ones
	checkpoints map[core.CheckpointID]int64          // with the checksum of each
	usage       map[core.SandboxID]time.Time         // when an answered heartbeat last had the usage of a sandbox
}

// Message is one heartbeat.
type Message struct {
	Whole runnerapi.Heartbeat // with everything that the runner holds
	// Differences is what to send instead, by PathBeats; nil: send Whole, by PathHeartbeat.
	Differences *runnerapi.Beat
}

// Registered begins a lease epoch.
func (s *Sender) Registered(epoch int64) { *s = Sender{epoch: epoch} }

// Begin returns a heartbeat without contents. The caller collects these afterwards, so that they are newer than the last answer.
func (s *Sender) Begin() runnerapi.Heartbeat {
	s.number++
	return runnerapi.Heartbeat{LeaseEpoch: s.epoch, Number: s.number, Answered: s.answered}
}

// Make makes the message of a heartbeat that Begin has returned. No list in it names an id twice.
func (s *Sender) Make(whole runnerapi.Heartbeat) Message {
	m := Message{Whole: whole}
	if s.sandboxes == nil && s.checkpoints == nil {
		return m
	}
	d := runnerapi.Beat{Heartbeat: whole, AllSandboxes: s.sandboxes == nil, AllCheckpoints: s.checkpoints == nil}
	d.Sandboxes, d.Checkpoints = nil, nil
	for _, sb := range whole.Sandboxes {
		if sb.State != runnerapi.SandboxDead {
			d.SandboxSum ^= Sum(sb.ID)
		}
		if was, there := s.sandboxes[sb.ID]; !there || !reflect.DeepEqual(was, sb) {
			d.Sandboxes = append(d.Sandboxes, sb)
		}
	}
	same := 0
	for _, id := range whole.Checkpoints {
		if sum, there := s.checkpoints[id]; there {
			d.CheckpointSum ^= sum
			same++
		} else {
			d.Checkpoints = append(d.Checkpoints, id)
		}
	}
	if same < len(s.checkpoints) {
		d.GoneCheckpoints = missing(s.checkpoints, whole.Checkpoints)
	}
	d.Usage = s.dueUsage(whole.Usage)
	m.Differences = &d
	return m
}

// dueUsage returns the usage that controllers may want to record: of ended sandboxes, and of those that were not in an answered heartbeat for a while.
func (s *Sender) dueUsage(list []runnerapi.Usage) (due []runnerapi.Usage) {
	for _, u := range list {
		if u.Ended || time.Since(s.usage[u.SandboxID]) >= usageEvery {
			due = append(due, u)
		}
	}
	return due
}

// noteUsage notes what was in an answered message. It forgets sandboxes that the runner no longer lists.
func (s *Sender) noteUsage(m Message) {
	was := s.usage
	s.usage = make(map[core.SandboxID]time.Time, len(m.Whole.Usage))
	for _, u := range m.Whole.Usage {
		if at, there := was[u.SandboxID]; there && !u.Ended {
			s.usage[u.SandboxID] = at
		}
	}
	sent := m.Whole.Usage
	if m.Differences != nil {
		sent = m.Differences.Usage
	}
	for _, u := range sent {
		if !u.Ended {
			s.usage[u.SandboxID] = time.Now()
		}
	}
}

// missing returns the recorded checkpoints that are not in a list.
func missing(known map[core.CheckpointID]int64, list []core.CheckpointID) (gone []core.CheckpointID) {
	held := make(map[core.CheckpointID]bool, len(list))
	for _, id := range list {
		held[id] = true
	}
	for id := range known {
		if !held[id] {
			gone = append(gone, id)
		}
	}
	return gone
}

// Unanswered says that the last message has no answer, or one without effect: the next is whole.
func (s *Sender) Unanswered() { s.sandboxes, s.checkpoints = nil, nil }

// Answered takes the answer to the last message. Again says that the controller wants a list at once that the message did not have.
func (s *Sender) Answered(m Message, out runnerapi.Heartbeated) (again bool) {
	d, checkpoints := m.Differences, s.checkpoints
	s.Unanswered()
	if out.Number != m.Whole.Number { // a controller of an older version does not say it
		return false
	}
	s.answered = out.Number
	s.noteUsage(m)
	if !out.AllSandboxes {
		s.sandboxes = make(map[core.SandboxID]runnerapi.Sandbox, len(m.Whole.Sandboxes))
		for _, sb := range m.Whole.Sandboxes {
			if sb.State != runnerapi.SandboxDead {
				s.sandboxes[sb.ID] = sb
			}
		}
	}
	if !out.AllCheckpoints {
		s.checkpoints = recordCheckpoints(checkpoints, m)
	}
	for _, list := range [][]core.CheckpointID{out.Unsettled, out.DropCheckpoints, out.StrayCheckpoints} {
		for _, id := range list {
			delete(s.checkpoints, id)
		}
	}
	return d != nil && (out.AllSandboxes && !d.AllSandboxes || out.AllCheckpoints && !d.AllCheckpoints)
}

// recordCheckpoints returns the checkpoints of a message. A message with their differences was made from known, which is changed then.
func recordCheckpoints(known map[core.CheckpointID]int64, m Message) map[core.CheckpointID]int64 {
	list := m.Whole.Checkpoints
	if d := m.Differences; d != nil && !d.AllCheckpoints && known != nil {
		for _, id := range d.GoneCheckpoints {
			delete(known, id)
		}
		list = d.Checkpoints
	} else {
		known = make(map[core.CheckpointID]int64, len(list))
	}
	for _, id := range list {
		known[id] = Sum(id)
	}
	return known
}
