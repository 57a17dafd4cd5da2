package controller

import (
	"context"
	"errors"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// feed reads the events of all projects once for all streams of this process, and only while there are streams. It passes on an
// event when every lower id is settled: it is visible, or it never will be. The ids of an object's events are in the order of its
// changes, but transactions commit in another order. docs/adr/0015-event-order.md says how a reader misses no event.
type feed struct {
	wake chan struct{} // size 1: look now

	// mu guards the fields below.
	mu      sync.Mutex
	streams map[core.ProjectID]int
	total   int
	ready   bool          // horizon is known
	closed  bool          // the controller stops
	horizon int64         // everything up to it is settled
	first   int64         // ring has every event above it, up to horizon
	ring    []Event       // by id
	changed chan struct{} // closed and replaced whenever something above changes
	resets  int           // how often the database was set back; streams of before end
}

func newFeed() *feed {
	return &feed{wake: make(chan struct{}, 1), streams: map[core.ProjectID]int{}, changed: make(chan struct{})}
}

// hint says that there may be something new.
func (f *feed) hint() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// enter takes a place for a stream. It returns how often the feed was reset before.
func (f *feed) enter(project core.ProjectID) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.total >= maxStreams || f.streams[project] >= maxProjectStreams {
		return 0, core.Errorf(core.Exhausted, core.CodeCapacity, "too many event streams are open; one can carry the events of a whole project")
	}
	f.streams[project]++
	f.total++
	f.hint()
	return f.resets, nil
}

// reset ends all open streams. The events that they have passed on may be untrue, and the database
// may give the ids of these events to other events.
func (f *feed) reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resets++
	f.ready, f.ring = false, nil
	f.publish()
}

func (f *feed) wasReset(since int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.resets != since
}

func (f *feed) leave(project core.ProjectID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.total--
	if f.streams[project]--; f.streams[project] == 0 {
		delete(f.streams, project)
	}
}

// known waits until the horizon is known and returns it.
func (f *feed) known(ctx context.Context) (int64, error) {
	for {
		f.mu.Lock()
		ready, closed, horizon, changed := f.ready, f.closed, f.horizon, f.changed
		f.mu.Unlock()
		switch {
		case closed:
			return 0, core.Wrapf(errShutdown, core.Unavailable, core.CodeControllerStopping, "the controller is stopping; go on at another")
		case ready:
			return horizon, nil
		}
		select {
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		case <-changed:
		}
	}
}

// after returns a copy of the events in the ring above an id. It also returns whether the ring reaches back that far, and a channel
// that is closed when there are more events. The channel is nil if the controller is stopping.
func (f *feed) after(id int64) (list []Event, horizon int64, ok bool, changed <-chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.closed {
		return nil, 0, false, nil
	}
	if !f.ready || id < f.first {
		return nil, f.horizon, false, f.changed
	}
	at := sort.Search(len(f.ring), func(i int) bool { return f.ring[i].ID > id })
	return slices.Clone(f.ring[at:]), f.horizon, true, f.changed
}

// pass publishes settled events.
func (f *feed) pass(list []Event, horizon int64) {
	if len(list) == 0 && horizon == f.horizon {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ring = append(f.ring, list...)
	if extra := len(f.ring) - eventRing; extra > 0 {
		f.first = f.ring[extra-1].ID
		f.ring = slices.Clone(f.ring[extra:])
	}
	f.horizon = horizon
	f.publish()
}

// publish wakes all waiting streams. The caller holds mu.
func (f *feed) publish() {
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *feed) idle() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.total == 0 {
		f.ready, f.ring = false, nil // the next stream starts again
	}
	return f.total == 0
}

func (f *feed) begin(horizon int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ready, f.horizon, f.first, f.ring = true, horizon, horizon, nil
	f.publish()
}

func (f *feed) close() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.closed = true
	f.publish()
}

// tail is the state of the reader between two looks. Ids up to limit were handed out to transactions below bound. When all of these
// have ended, an id up to limit that is not visible never will be. bound is 0 if no such question is open.
type tail struct {
	begun   bool
	history int64 // of the server that answered last
	horizon int64
	limit   int64
	bound   uint64
	unclear time.Duration // how long it waits to look again; it grows
}

// feedLoop is the only reader of the table's end.
func (c *Controller) feedLoop(ctx context.Context) {
	defer c.feed.close()
	var t *tail
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-c.feed.wake:
		}
		if c.feed.idle() {
			t = nil
			timer.Stop() // until a stream is opened
			continue
		}
		wait, err := c.look(ctx, &t)
		if err != nil {
			wait = eventRetry
			if ctx.Err() == nil {
				c.log.WarnContext(ctx, "events were not read", "err", err)
			}
		}
		if pace.Pause(ctx, eventCoalesce) != nil { // many hints cause one look
			return
		}
		timer.Reset(max(wait-eventCoalesce, 0))
	}
}

// look begins or continues reading, and returns when to look again.
func (c *Controller) look(ctx context.Context, t **tail) (time.Duration, error) {
	if *t == nil {
		begin, err := c.beginTail(ctx)
		if err != nil {
			return 0, err
		}
		*t = begin
	}
	wait, err := c.advance(ctx, *t)
	if errors.Is(err, errSetBack) {
		c.log.ErrorContext(ctx, "the database was set back: open event streams end, and their clients read the present state", "horizon", (*t).horizon)
		c.feed.reset()
		*t = nil
		return 0, nil
	}
	return wait, err
}

// errSetBack says that the database has not handed out ids that were passed on, although its history is the same: it was replaced
// by an older copy of itself.
var errSetBack = errors.New("the database was set back")

// beginTail finds the id after which all events are passed on: the newest id, when all ids up to it are settled.
func (c *Controller) beginTail(ctx context.Context) (*tail, error) {
	marks, err := read(ctx, c, System(), func(tx Tx) (EventMarks, error) { return tx.EventMarks(ctx) })
	if err != nil {
		return nil, err
	}
	bound, err := c.bound(ctx)
	return &tail{horizon: marks.Newest, limit: marks.Newest, bound: bound}, err
}

// bound returns a transaction id above the ids of all present transactions.
func (c *Controller) bound(ctx context.Context) (uint64, error) {
	return read(ctx, c, System(), func(tx Tx) (uint64, error) { return tx.Transaction(ctx) })
}

// advance passes on the settled events above the horizon.
func (c *Controller) advance(ctx context.Context, t *tail) (time.Duration, error) {
	got, err := read(ctx, c, System(), func(tx Tx) (EventTail, error) { return tx.TailEvents(ctx, t.horizon, eventBatch) })
	switch {
	case err != nil:
		return 0, err
	case got.Newest < t.horizon:
		return 0, errSetBack
	case t.history != 0 && got.History != t.history:
		// Another server: ids of its transactions have nothing to do with the question that is open. What it hands out is above
		// the horizon, whatever it lacks, so the streams go on.
		c.log.WarnContext(ctx, "another database server answers: events go on in its history", "history", got.History, "horizon", t.horizon)
		t.limit, t.bound, t.unclear = 0, 0, 0
	}
	t.history = got.History
	list := got.Events
	answered := t.bound != 0 && got.Settled > t.bound
	if answered {
		t.bound, t.unclear = 0, 0
	}
	if !t.begun {
		switch {
		case answered:
		case t.bound == 0: // the server that was asked is gone
			t.limit = max(t.limit, got.Newest)
			t.bound, err = c.bound(ctx)
			return t.later(), err
		default:
			return t.later(), nil
		}
		t.begun = true
		c.feed.begin(t.horizon)
	}
	n := 0
	for n < len(list) && (list[n].ID == t.horizon+1 || answered && list[n].ID <= t.limit) {
		t.horizon = list[n].ID
		n++
	}
	c.feed.pass(list[:n], t.horizon)
	switch {
	case n < len(list):
		if t.bound == 0 {
			t.limit = list[len(list)-1].ID
			if t.bound, err = c.bound(ctx); err != nil {
				return 0, err
			}
		}
		return t.later(), nil
	case n == eventBatch:
		return 0, nil
	}
	return eventPoll, nil
}

func (t *tail) later() time.Duration {
	t.unclear = min(max(2*t.unclear, eventUnclear), eventPoll)
	return t.unclear
}
