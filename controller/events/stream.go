package events

import (
	"context"
	"slices"

	"github.com/coppice-dev/coppice/core"
)

// Stream yields the events of a project that match a filter, each once, in the order of their ids. Close it.
type Stream struct {
	feed   *Feed
	filter Filter
	cursor int64
	resets int // of the feed, when the stream began
}

// Stream begins after the event with the given id; 0 is before the oldest one that is kept, and a negative one means now.
// tree is any checkpoint of the wanted tree.
func (f *Feed) Stream(ctx context.Context, project core.ProjectID, tree core.CheckpointID, which Filter, after int64) (*Stream, error) {
	which.Project = project
	var marks Marks
	err := f.store.InProject(ctx, project, func(tx Tx) error {
		var err error
		if marks, err = tx.EventMarks(ctx); err != nil {
			return err
		}
		if tree != "" {
			cp, err := tx.Checkpoint(ctx, tree)
			if err != nil {
				return err
			}
			which.Root = cp.Root
		}
		if which.WorkspaceID != "" {
			_, err = tx.Workspace(ctx, which.WorkspaceID)
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
		return nil, expired(after, marks.Floor)
	}
	resets, err := f.enter(project)
	if err != nil {
		return nil, err
	}
	s := &Stream{feed: f, filter: which, cursor: after, resets: resets}
	horizon, err := f.known(ctx)
	if err != nil {
		s.Close()
		return nil, err
	}
	if after < 0 {
		s.cursor = horizon
	}
	return s, nil
}

// errStopping ends the streams of a controller that stops.
var errStopping = core.Errorf(core.Unavailable, core.CodeControllerStopping, "the controller is stopping; go on at another")

func expired(after, floor int64) error {
	return core.Errorf(core.FailedPrecondition, core.CodeEventsExpired, "events up to %d are not kept any more, and %d is asked for. Read the present state and begin without an id", floor, after)
}

// Close frees the stream's place.
func (s *Stream) Close() { s.feed.leave(s.filter.Project) }

// Cursor is the id up to which everything that matches has been returned.
func (s *Stream) Cursor() int64 { return s.cursor }

// Next returns the events after the cursor, at least one, and moves it. With follow it waits for them until the context ends;
// without it returns none when there are none. A reader that was so slow that events were dropped before it read them gets
// EVENTS_EXPIRED.
func (s *Stream) Next(ctx context.Context, follow bool) ([]Event, error) {
	for {
		list, horizon, ok, changed := s.feed.after(s.cursor)
		switch {
		case changed == nil:
			return nil, errStopping
		case s.feed.wasReset(s.resets):
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
func (s *Stream) read(ctx context.Context, horizon int64) ([]Event, error) {
	var list []Event
	err := s.feed.store.InProject(ctx, s.filter.Project, func(tx Tx) error {
		marks, err := tx.EventMarks(ctx)
		if err != nil {
			return err
		}
		if s.cursor < marks.Floor {
			return expired(s.cursor, marks.Floor)
		}
		list, err = tx.Events(ctx, s.filter, s.cursor, horizon, batchSize)
		return err
	})
	switch {
	case err != nil:
		return nil, err
	case len(list) == batchSize:
		s.cursor = list[len(list)-1].ID
	default:
		s.cursor = horizon
	}
	return list, nil
}
