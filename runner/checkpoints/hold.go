package checkpoints

import (
	"os"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Hold notes that a checkpoint is in use until Release.
func (s *Store) Hold(id core.CheckpointID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.held[id]++
	s.used[id] = time.Now()
}

// Release ends Hold.
func (s *Store) Release(id core.CheckpointID) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[id]--; s.held[id] == 0 {
		delete(s.held, id)
		if s.freed != nil {
			close(s.freed)
			s.freed = nil
		}
	}
	if _, there := s.records[id]; !there {
		delete(s.used, id)
	}
}

// IsHeld reports whether a checkpoint is in use.
func (s *Store) IsHeld(id core.CheckpointID) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.held[id] > 0
}

// unheld returns a channel that is closed when a checkpoint may no longer be in use.
func (s *Store) unheld(id core.CheckpointID) <-chan struct{} {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.held[id] == 0 {
		return alreadyClosed
	}
	if s.freed == nil {
		s.freed = make(chan struct{})
	}
	return s.freed
}

// LastUse is when a checkpoint was opened last. If this process has not opened it, it is when the checkpoint arrived on this host.
func (s *Store) LastUse(id core.CheckpointID) time.Time {
	s.mu.Lock()
	at, known := s.used[id]
	s.mu.Unlock()
	if known {
		return at
	}
	info, err := os.Stat(s.Path(id, RecordFile))
	if err != nil {
		return time.Time{}
	}
	return info.ModTime()
}

// removeUnheld removes a checkpoint unless it is in use.
func (s *Store) removeUnheld(id core.CheckpointID) (gone bool, err error) {
	s.mu.Lock()
	_, there := s.records[id]
	if !there || s.held[id] > 0 {
		s.mu.Unlock()
		return false, nil
	}
	delete(s.records, id)
	delete(s.used, id)
	s.mu.Unlock()
	return true, s.removeFiles(id)
}

// alreadyClosed is a channel that is readable.
var alreadyClosed = func() <-chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}()
