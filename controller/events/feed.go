package events

import (
	"context"
	"errors"
	"log/slog"
	"slices"
	"sort"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

const (
	batchSize    = 512
	ringSize     = 8192
	pollInterval = 250 * time.Millisecond // in case nothing wakes the reader
	firstPause   = 5 * time.Millisecond   // at first, while a transaction that began earlier has not ended
	retryPause   = time.Second

	lookPause = 5 * time.Millisecond // the shortest time between two looks

	maxStreams        = 1024
	maxProjectStreams = 128
)

// Config says how a feed works.
type Config struct {
	Kept time.Duration // how long events can be asked for; by whole days
	Log  *slog.Logger
}

// Feed reads the events of all projects once for all streams of this process, and only while there are streams. It passes on an
// event when every lower id is settled: it is visible, or it never will be. The ids of an object's events are in the order of its
// changes, but transactions commit in another order. docs/adr/0015-event-order.md says how a reader misses no event.
// A Feed is safe for concurrent use. Streams go on only while Run does.
type Feed struct {
	cfg   Config
	store Store
	wake  chan struct{} // size 1: look now

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
	resets  int           // how often the database was set back; earlier streams end then
}

// New makes a feed. It starts nothing.
func New(cfg Config, store Store) *Feed {
	return &Feed{cfg: cfg, store: store, wake: make(chan struct{}, 1), streams: map[core.ProjectID]int{}, changed: make(chan struct{})}
}

// Streams is the number of open streams.
func (f *Feed) Streams() int {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.total
}

// Tidy makes the next partitions of the table and drops those that are no longer kept.
func (f *Feed) Tidy(ctx context.Context) error {
	return f.store.InSystem(ctx, func(tx Tx) error { return tx.TidyEvents(ctx, f.cfg.Kept) })
}

// Hint says that there may be something new.
func (f *Feed) Hint() {
	select {
	case f.wake <- struct{}{}:
	default:
	}
}

// enter takes a place for a stream. It returns how often the feed was reset before.
func (f *Feed) enter(project core.ProjectID) (int, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.total >= maxStreams || f.streams[project] >= maxProjectStreams {
		return 0, core.Errorf(core.Exhausted, core.CodeCapacity, "too many event streams are open; one can carry the events of a whole project")
	}
	f.streams[project]++
	f.total++
	f.Hint()
	return f.resets, nil
}

// reset ends all open streams. The events that they have passed on may be untrue, and the database
// may give the ids of these events to other events.
func (f *Feed) reset() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.resets++
	f.ready, f.ring = false, nil
	f.publish()
}

func (f *Feed) wasReset(since int) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.resets != since
}

func (f *Feed) leave(project core.ProjectID) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.total--
	if f.streams[project]--; f.streams[project] == 0 {
		delete(f.streams, project)
	}
}

// known waits until the horizon is known and returns it.
func (f *Feed) known(ctx context.Context) (int64, error) {
	for {
		f.mu.Lock()
		ready, closed, horizon, changed := f.ready, f.closed, f.horizon, f.changed
		f.mu.Unlock()
		switch {
		case closed:
			return 0, errStopping
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
func (f *Feed) after(id int64) (list []Event, horizon int64, ok bool, changed <-chan struct{}) {
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
func (f *Feed) pass(list []Event, horizon int64) {
	if len(list) == 0 && horizon == f.horizon {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ring = append(f.ring, list...)
	if extra := len(f.ring) - ringSize; extra > 0 {
		f.first = f.ring[extra-1].ID
		f.ring = slices.Clone(f.ring[extra:])
	}
	f.horizon = horizon
	f.publish()
}

// publish wakes all waiting streams. The caller holds mu.
func (f *Feed) publish() {
	close(f.changed)
	f.changed = make(chan struct{})
}

func (f *Feed) idle() bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.total == 0 {
		f.ready, f.ring = false, nil // the next stream starts again
	}
	return f.total == 0
}

func (f *Feed) begin(horizon int64) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ready, f.horizon, f.first, f.ring = true, horizon, horizon, nil
	f.publish()
}

func (f *Feed) close() {
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

// Run is the only reader of the table's end. It returns when the context ends, and so do all streams then.
func (f *Feed) Run(ctx context.Context) {
	defer f.close()
	var t *tail
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-f.wake:
		}
		if f.idle() {
			t = nil
			timer.Stop() // until a stream is opened
			continue
		}
		wait, err := f.look(ctx, &t)
		if err != nil {
			wait = retryPause
			if ctx.Err() == nil {
				f.cfg.Log.WarnContext(ctx, "events were not read", "err", err)
			}
		}
		if pace.Pause(ctx, lookPause) != nil { // many hints cause one look
			return
		}
		timer.Reset(max(wait-lookPause, 0))
	}
}

// look begins or continues reading, and returns when to look again.
func (f *Feed) look(ctx context.Context, t **tail) (time.Duration, error) {
	if *t == nil {
		begin, err := f.beginTail(ctx)
		if err != nil {
			return 0, err
		}
		*t = begin
	}
	wait, err := f.advance(ctx, *t)
	if errors.Is(err, errSetBack) {
		f.cfg.Log.ErrorContext(ctx, "the database was set back: open event streams end, and their clients read the present state", "horizon", (*t).horizon)
		f.reset()
		*t = nil
		return 0, nil
	}
	return wait, err
}

// errSetBack says that the database has not handed out ids that were passed on, although its history is the same: it was replaced
// by an older copy of itself.
var errSetBack = errors.New("the database was set back")

// beginTail finds the id after which all events are passed on: the newest id, when all ids up to it are settled.
func (f *Feed) beginTail(ctx context.Context) (*tail, error) {
	marks, err := read(ctx, f, func(tx Tx) (Marks, error) { return tx.EventMarks(ctx) })
	if err != nil {
		return nil, err
	}
	bound, err := f.bound(ctx)
	return &tail{horizon: marks.Newest, limit: marks.Newest, bound: bound}, err
}

// read runs a query that sees all projects.
func read[T any](ctx context.Context, f *Feed, query func(Tx) (T, error)) (out T, err error) {
	err = f.store.InSystem(ctx, func(tx Tx) (err error) {
		out, err = query(tx)
		return err
	})
	return out, err
}

// bound returns a transaction id above the ids of all present transactions.
func (f *Feed) bound(ctx context.Context) (uint64, error) {
	return read(ctx, f, func(tx Tx) (uint64, error) { return tx.Transaction(ctx) })
}

// advance passes on the settled events above the horizon.
func (f *Feed) advance(ctx context.Context, t *tail) (time.Duration, error) {
	got, err := read(ctx, f, func(tx Tx) (Tail, error) { return tx.TailEvents(ctx, t.horizon, batchSize) })
	switch {
	case err != nil:
		return 0, err
	case got.Newest < t.horizon:
		return 0, errSetBack
	case t.history != 0 && got.History != t.history:
		// Another server: ids of its transactions have nothing to do with the question that is open. What it hands out is above
		// the horizon, whatever it lacks, so the streams go on.
		f.cfg.Log.WarnContext(ctx, "another database server answers: events go on in its history", "history", got.History, "horizon", t.horizon)
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
			t.bound, err = f.bound(ctx)
			return t.later(), err
		default:
			return t.later(), nil
		}
		t.begun = true
		f.begin(t.horizon)
	}
	n := 0
	for n < len(list) && (list[n].ID == t.horizon+1 || answered && list[n].ID <= t.limit) {
		t.horizon = list[n].ID
		n++
	}
	f.pass(list[:n], t.horizon)
	switch {
	case n < len(list):
		if t.bound == 0 {
			t.limit = list[len(list)-1].ID
			if t.bound, err = f.bound(ctx); err != nil {
				return 0, err
			}
		}
		return t.later(), nil
	case n == batchSize:
		return 0, nil
	}
	return pollInterval, nil
}

func (t *tail) later() time.Duration {
	t.unclear = min(max(2*t.unclear, firstPause), pollInterval)
	return t.unclear
}
