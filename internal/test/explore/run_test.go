package explore

import (
	"fmt"
	"strconv"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// schedule is one run: the first controller is asked for an operation, somebody stops at a place of it, another thing happens, and
// whoever stopped goes on.
type schedule struct {
	kind string
	// place is "step N": the first controller stops before its N-th transaction or call; or a failpoint, of it or of the runner; or
	// "call N FAULT" or "report N FAULT": something goes wrong with the N-th message to or from the runner.
	place string
	other string // what happens meanwhile
}

func (s schedule) String() string {
	return fmt.Sprintf("%s; stopped at %s; meanwhile %s", s.kind, s.place, s.other)
}

// What may happen while somebody is stopped, besides an operation by the second controller.
const (
	nothing  = "nothing"
	takeover = "takeover" // the lease of the first controller ends, and the second one carries on what it did
	beats    = "heartbeat"
	fencing  = "fence" // the runner is not heard beyond its lease, and is given up
)

// grace is how long the explorer waits for what happens meanwhile, which may have to wait itself for whoever is stopped. It chooses among
// interleavings; nothing is asserted of it.
const grace = 300 * time.Millisecond

// holder is who stopped, and how it goes on.
type holder struct {
	reached <-chan struct{}
	goOn    func()
}

// hold arms a place.
func (w *world) hold(place string) (holder, error) {
	first := w.sides[0]
	if n, ok := strings.CutPrefix(place, "step "); ok {
		i, err := strconv.Atoi(n)
		return holder{first.arm(i), first.goOn}, err
	}
	for prefix, m := range map[string]*mail{"call ": &w.calls, "report ": &w.reports} {
		if text, ok := strings.CutPrefix(place, prefix); ok {
			reached, err := m.armText(text)
			return holder{reached, m.release}, err
		}
	}
	armed, err := failpoint.Arm(place, failpoint.Action{Kind: failpoint.Hang, Times: 1})
	if err != nil {
		return holder{}, err
	}
	return holder{armed.Reached(), func() {
		armed.Disarm()
		first.goOn()
	}}, nil
}

// granting reports whether a schedule needs a world with an egress process.
func (s schedule) granting() bool { return s.has("grant", "revoke") }

// needsOwnWorld reports whether no other schedule may be played in its world: it needs a new one, or leaves one that others cannot use.
func (s schedule) needsOwnWorld() bool { return s.kind == "seal" || s.kind == fencing }

// group says which schedules share worlds.
func (s schedule) group() int {
	switch {
	case s.needsOwnWorld():
		return 0
	case s.granting():
		return 1
	}
	return 2
}

// clear ends what a schedule has left, so that another one can be played in the same world. Its checkpoints stay.
func (w *world) clear(s schedule) {
	w.calls.release()
	w.reports.release()
	w.noneLost(s)
	for _, id := range w.strings(`SELECT id FROM workspaces WHERE ended_at IS NULL AND state <> 'lost'`) {
		if _, err := w.second.Terminate(w.t.Context(), w.project, core.WorkspaceID(id), patience); err != nil {
			w.log.fail("the world was not cleared: %v", err)
		}
	}
	if w.disarm != nil {
		w.disarm()
		w.disarm = nil
	}
	if _, err := w.second.Fleet().Drain(w.t.Context(), w.runner.ID(), false); err != nil {
		w.log.fail("the world was not cleared: %v", err)
	}
	w.settle()
	w.unseal()
	w.whole()
}

// play runs a schedule, in a project of its own. It reports whether the place was reached.
func (w *world) play(s schedule) bool {
	k, ok := kindOf(s.kind)
	if !ok {
		w.log.fail("there is no kind %s", s.kind)
		return false
	}
	set, err := w.set(k)
	if err != nil {
		w.log.fail("the scene was not set: %v", err)
		return false
	}
	if w.log.broken() {
		return false
	}
	h, err := w.hold(s.place)
	if err != nil {
		w.log.fail("%v", err)
		return false
	}
	ended := make(chan struct{})
	defer close(ended)
	defer h.goOn()
	w.log.note("begins: %s", s)
	asked := w.ask(w.first, k, set)
	if strings.HasPrefix(s.place, "report ") {
		go w.talk(h.reached, ended)
	}
	var replies []reply
	reached := false
	select {
	case <-h.reached:
		reached = true
	case r := <-asked:
		replies, asked = append(replies, r), nil
		reached = w.within(patience, func() bool { return isClosed(h.reached) || w.atRest() }) && w.within(grace, func() bool { return isClosed(h.reached) })
	case <-time.After(patience):
		w.log.fail("neither was %s reached nor %s answered", s.place, s.kind)
	}
	var others <-chan reply
	if reached {
		if !strings.HasPrefix(s.place, "step ") && strings.HasPrefix(s.place, "controller.") {
			w.sides[0].stop()
		}
		w.log.note("stopped at %s", s.place)
		if k.name == fencing {
			w.heard()
		}
		others = w.meanwhile(s.other, set)
	}
	w.log.note("goes on")
	h.goOn()
	for _, c := range []<-chan reply{asked, others} {
		if c == nil {
			continue
		}
		select {
		case r := <-c:
			replies = append(replies, r)
		case <-time.After(patience):
			w.log.fail("a request was not answered")
		}
	}
	w.settle()
	w.check(s, set, replies)
	w.log.note("is checked")
	return reached
}

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// talk has the runner report again and again until a report goes wrong.
func (w *world) talk(reached, ended <-chan struct{}) {
	w.within(patience, func() bool {
		w.runner.Hurry()
		return isClosed(reached) || isClosed(ended)
	})
}

// meanwhile does what happens while somebody is stopped. A reply that comes later is to be waited for.
func (w *world) meanwhile(what string, set scene) <-chan reply {
	what, then, _ := strings.Cut(what, ", then ")
	if then != "" {
		later := w.meanwhile(what, set)
		w.meanwhile(then, set)
		return later
	}
	switch what {
	case nothing:
		return nil
	case takeover:
		w.expire()
		w.within(grace, func() bool {
			return w.number(`SELECT count(*) FROM operations WHERE state IN ('pending', 'running')`) == 0
		})
		return nil
	case beats:
		w.beat()
		return nil
	case fencing:
		w.fence()
		return nil
	}
	k, ok := kindOf(what)
	if !ok {
		w.log.fail("there is no kind %s", what)
		return nil
	}
	out := make(chan reply, 1)
	w.sides[1].arm(0)
	answer := w.ask(w.second, k, set)
	for steps := -1; steps != w.sides[1].steps(); { // while it gets on
		steps = w.sides[1].steps()
		select {
		case r := <-answer:
			out <- r
			return out
		case <-time.After(grace):
		}
	}
	w.log.note("%s is not answered yet", what)
	return answer
}

// expire ends the leases of the first controller, on both sides: its clock has gone on.
func (w *world) expire() {
	w.sides[0].slept.Add(int64(leaseTime + time.Second))
	w.sql(`UPDATE operations SET lease_expires_at = now() - interval '1 s' WHERE state IN ('pending', 'running') AND lease_owner = $1`, w.owner)
}

// beat has the runner heard. It returns when a heartbeat was answered that began after the call.
func (w *world) beat() {
	const last = `SELECT lease_epoch * 1000000000 + CASE WHEN beat_epoch = lease_epoch THEN beat ELSE 0 END FROM runners`
	before := w.number(last)
	w.eventually("a heartbeat is recorded", func() bool {
		w.runner.Hurry()
		return w.number(last) > before+1
	})
}

// fence has the runner given up although its machines run: nobody hears it any more.
func (w *world) fence() {
	w.silent.Store(true)
	defer w.silent.Store(false)
	w.eventually("the runner is given up", func() bool {
		w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 day' WHERE fenced_at IS NULL`) // again, after a heartbeat that was under way
		return w.number(`SELECT count(*) FROM runners WHERE fenced_at IS NULL`) == 0
	})
}
