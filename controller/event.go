package controller

import (
	"context"
	"encoding/json"
	"slices"
	"strings"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Event is a change of state of a workspace or a checkpoint, or the end of an operation.
type Event struct {
	ID           int64
	ProjectID    core.ProjectID
	Type         string // object.state: workspace.ready, checkpoint.captured, operation.failed
	WorkspaceID  core.WorkspaceID
	CheckpointID core.CheckpointID
	Root         core.CheckpointID // of the tree in which it happened
	OperationID  core.OperationID
	Data         json.RawMessage // the data of this type
	CreatedAt    time.Time
}

// EventFilter selects events; zero fields do not filter. A type is a whole type, or its part before the dot.
type EventFilter struct {
	Project     core.ProjectID
	Root        core.CheckpointID
	WorkspaceID core.WorkspaceID
	Types       []string
}

// Match reports whether an event matches. Events of EventTx does the same with rows.
func (f EventFilter) Match(e Event) bool {
	switch {
	case f.Project != "" && f.Project != e.ProjectID, f.Root != "" && f.Root != e.Root, f.WorkspaceID != "" && f.WorkspaceID != e.WorkspaceID:
		return false
	case len(f.Types) == 0:
		return true
	}
	object, _, _ := strings.Cut(e.Type, ".")
	return slices.Contains(f.Types, e.Type) || slices.Contains(f.Types, object)
}

// EventMarks bound the events that can be read.
type EventMarks struct {
	Floor  int64 // the highest id that is no longer kept
	Newest int64 // the highest id that was handed out
}

// EventTail has the events that are visible at the end of the table, and the server that answered.
type EventTail struct {
	Events  []Event // of all projects, by id
	Settled uint64  // the lowest id of a transaction that had not ended: what all earlier ones wrote is visible in Events
	Newest  int64   // the highest id that was handed out
	// History changes when another server takes over, which may lack the last transactions of the one before. Ids of a later
	// history are above all ids of the earlier ones.
	History int64
}

// EventTx reads events. Triggers write them.
type EventTx interface {
	// Events returns at most limit events with ids above after and up to until, by id.
	Events(ctx context.Context, f EventFilter, after, until int64, limit int) ([]Event, error)
	// TailEvents returns the visible events of all projects above after.
	TailEvents(ctx context.Context, after int64, limit int) (EventTail, error)
	EventMarks(ctx context.Context) (EventMarks, error)
	// Transaction gives this transaction an id and returns it: every id handed out before is lower.
	Transaction(ctx context.Context) (uint64, error)
	// TidyEvents makes the next partitions and drops those that are older than keep.
	TidyEvents(ctx context.Context, keep time.Duration) error
}

const (
	eventBatch   = 512
	eventRing    = 8192
	eventPoll    = 250 * time.Millisecond // in case nothing wakes the reader
	eventUnclear = 5 * time.Millisecond   // at first, while a transaction that began earlier has not ended
	eventRetry   = time.Second

	eventCoalesce = 5 * time.Millisecond // the shortest time between two looks

	maxStreams        = 1024
	maxProjectStreams = 128
)

// EventStream yields the events of a project that match a filter, each once, in the order of their ids. Close it.
type EventStream struct {
	c      *Controller
	filter EventFilter
	cursor int64
	resets int // of the feed, when the stream began
}

// StreamEvents begins after the event with the given id; 0 is before the oldest one that is kept, and a negative one means now.
// tree is any checkpoint of the wanted tree.
func (c *Controller) StreamEvents(ctx context.Context, project core.ProjectID, tree core.CheckpointID, f EventFilter, after int64) (*EventStream, error) {
	f.Project = project
	var marks EventMarks
	err := c.store.InTx(ctx, InProject(project), func(tx Tx) error {
		var err error
		if marks, err = tx.EventMarks(ctx); err != nil {
			return err
		}
		if tree != "" {
			cp, err := tx.Checkpoint(ctx, tree)
			if err != nil {
				return err
			}
			f.Root = cp.Root
		}
		if f.WorkspaceID != "" {
			_, err = tx.Workspace(ctx, f.WorkspaceID)
		}
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case after > marks.Newest:
		return nil, core.Errorf(core.FailedPrecondition, core.CodeEventsExpired, "there was no event %d yet; the newest is %d. Read the present state and begin without an id", after, marks.Newest)
	case after == 0:
		after = marks.Floor
	case after > 0 && after < marks.Floor:
		return nil, eventsExpired(after, marks.Floor)
	}
	resets, err := c.feed.enter(project)
	if err != nil {
		return nil, err
	}
	s := &EventStream{c: c, filter: f, cursor: after, resets: resets}
	horizon, err := c.feed.known(ctx)
	if err != nil {
		s.Close()
		return nil, err
	}
	if after < 0 {
		s.cursor = horizon
	}
	return s, nil
}

func eventsExpired(after, floor int64) error {
	return core.Errorf(core.FailedPrecondition, core.CodeEventsExpired, "events up to %d are not kept any more, and %d is asked for. Read the present state and begin without an id", floor, after)
}

// Close frees the stream's place.
func (s *EventStream) Close() { s.c.feed.leave(s.filter.Project) }

// Cursor is the id up to which everything that matches has been returned.
func (s *EventStream) Cursor() int64 { return s.cursor }

// Next returns the events after the cursor, at least one, and moves it. With follow it waits for them until the context ends;
// without it returns none when there are none. A reader that was so slow that events were dropped before it read them gets
// EVENTS_EXPIRED.
func (s *EventStream) Next(ctx context.Context, follow bool) ([]Event, error) {
	for {
		list, horizon, ok, changed := s.c.feed.after(s.cursor)
		switch {
		case changed == nil:
			return nil, core.Wrapf(errShutdown, core.Unavailable, core.CodeControllerStopping, "the controller is stopping; go on at another")
		case s.c.feed.wasReset(s.resets):
			return nil, core.Errorf(core.FailedPrecondition, core.CodeEventsExpired, "the database was set back to an earlier state, and ids of events may be used again. Read the present state and begin without an id")
		case ok:
			list = slices.DeleteFunc(list, func(e Event) bool { return !s.filter.Match(e) })
			s.cursor = max(s.cursor, horizon)
		case horizon > s.cursor:
			var err error
			if list, err = s.read(ctx, horizon); err != nil {
				return nil, err
			}
		}
		if len(list) > 0 || !follow && s.cursor >= horizon {
			return list, nil
		}
		if s.cursor < horizon {
			continue
		}
		select {
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		case <-changed:
		}
	}
}

// read catches up from the database.
func (s *EventStream) read(ctx context.Context, horizon int64) ([]Event, error) {
	var list []Event
	err := s.c.store.InTx(ctx, InProject(s.filter.Project), func(tx Tx) error {
		marks, err := tx.EventMarks(ctx)
		if err != nil {
			return err
		}
		if s.cursor < marks.Floor {
			return eventsExpired(s.cursor, marks.Floor)
		}
		list, err = tx.Events(ctx, s.filter, s.cursor, horizon, eventBatch)
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case len(list) == eventBatch:
		s.cursor = list[len(list)-1].ID
	default:
		s.cursor = horizon
	}
	return list, nil
}

// tidyEvents is the chore that keeps the table's partitions.
func (c *Controller) tidyEvents(ctx context.Context) error {
	return c.store.InTx(ctx, System(), func(tx Tx) error { return tx.TidyEvents(ctx, c.cfg.EventsKept) })
}
