package runner

import (
	"sync"

	"github.com/coppice-dev/coppice/core"
)

// slots hands out small numbers. They bound the machines of a host and give each machine a user id of its own. A machine gets the
// lowest free number. A number is used again only after its machine is gone.
type slots struct {
	mu   sync.Mutex // guards used
	used []bool
}

func newSlots(n int) *slots { return &slots{used: make([]bool, n)} }

// take returns a number from 1 on.
func (s *slots) take() (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, used := range s.used {
		if !used {
			s.used[i] = true
			return i + 1, nil
		}
	}
	return 0, core.Errorf(core.Exhausted, core.CodeCapacity, "this runner runs %d sandboxes, its limit; terminate some or raise the limit", len(s.used))
}

// reserve takes the number of an existing machine. It returns false if the number is taken or out of range.
func (s *slots) reserve(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n < 1 || n > len(s.used) || s.used[n-1] {
		return false
	}
	s.used[n-1] = true
	return true
}

func (s *slots) give(n int) {
	s.mu.Lock()
	s.used[n-1] = false
	s.mu.Unlock()
}
