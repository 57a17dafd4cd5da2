package checkpoints

import (
	"context"
	"errors"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// flight is a capture, a fetch or a removal that is under way: a repeated request waits for it instead of starting another.
type flight struct {
	done chan struct{}
	out  runnerapi.Checkpoint
	err  error
}

// Once runs produce for a checkpoint id, unless the checkpoint exists or is being made.
func (s *Store) Once(ctx context.Context, id core.CheckpointID, produce func() (*Record, error)) (runnerapi.Checkpoint, error) {
	s.flightMu.Lock()
	if f, ok := s.flights[id]; ok {
		s.flightMu.Unlock()
		select {
		case <-f.done:
			return f.out, f.err
		case <-ctx.Done():
			return runnerapi.Checkpoint{}, context.Cause(ctx)
		}
	}
	if rec, err := s.Find(id); err == nil {
		s.flightMu.Unlock()
		return rec.Checkpoint, nil
	}
	f := &flight{done: make(chan struct{})}
	s.flights[id] = f
	s.flightMu.Unlock()
	defer s.land(id, f)
	leave, err := s.cfg.Enter()
	if err == nil {
		var rec *Record
		if rec, err = produce(); err == nil {
			f.out = rec.Checkpoint
		}
		leave()
	}
	f.err = err
	return f.out, f.err
}

// land ends a flight.
func (s *Store) land(id core.CheckpointID, f *flight) {
	s.flightMu.Lock()
	delete(s.flights, id)
	s.flightMu.Unlock()
	close(f.done)
}

// GiveUp removes a checkpoint from this host, unless it is in use or being fetched. A caller that wants the checkpoint meanwhile waits, and
// fetches it again.
func (s *Store) GiveUp(id core.CheckpointID) (gone bool, err error) {
	f := &flight{done: make(chan struct{})}
	s.flightMu.Lock()
	_, busy := s.flights[id]
	if busy = busy || s.IsHeld(id); !busy {
		s.flights[id] = f
	}
	s.flightMu.Unlock()
	if busy {
		return false, nil
	}
	defer s.land(id, f)
	if gone, err = s.removeUnheld(id); !gone {
		return false, err
	}
	s.cfg.Forgotten(id)
	return true, errors.Join(err, s.cfg.Removed())
}

// Unused returns a channel that is closed when the present users of a checkpoint may have ended.
func (s *Store) Unused(id core.CheckpointID) <-chan struct{} {
	s.flightMu.Lock()
	f := s.flights[id]
	s.flightMu.Unlock()
	if f != nil {
		return f.done
	}
	return s.unheld(id)
}
