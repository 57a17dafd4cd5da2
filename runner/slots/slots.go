// Package slots hands out small numbers. They bound the machines of a host and give each machine a user id of its own.
package slots

import (
	"sync"

	"github.com/coppice-dev/coppice/core"
)

// Slots are the numbers of a host. A machine gets the lowest free number. A number is used again only after its machine is gone. They are safe for
// concurrent use.
type Slots struct {
	mu   sync.Mutex // guards used
	used []bool
}

// New returns n free numbers.
func New(n int) *Slots { return &Slots{used: make([]bool, n)} }

// Take returns a number from 1 on.
func (s *Slots) Take() (int, error) {
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

// Reserve takes the number of an existing machine. It returns false if the number is taken or out of range.
func (s *Slots) Reserve(n int) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if n < 1 || n > len(s.used) || s.used[n-1] {
		return false
	}
	s.used[n-1] = true
	return true
}

// Give gives a number back.
func (s *Slots) Give(n int) {
	s.mu.Lock()
	s.used[n-1] = false
	s.mu.Unlock()
}

// Free is how many numbers are free, and how many there are.
func (s *Slots) Free() (free, all int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, used := range s.used {
		if !used {
			free++
		}
	}
	return free, len(s.used)
}
