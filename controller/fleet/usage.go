package fleet

import (
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// usageTimes remembers when the usage of each sandbox was last written, so that a heartbeat writes little.
type usageTimes struct {
	// mu guards what follows.
	mu sync.Mutex
	at map[core.SandboxID]time.Time
	// swept is when those were last removed that no runner reports any more.
	swept time.Time
}

// due returns the part of a report that must be written: ended sandboxes, and sandboxes that were not written for a while.
func (s *usageTimes) due(list []runnerapi.Usage, every time.Duration) []runnerapi.Usage {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []runnerapi.Usage
	for _, u := range list {
		if u.Ended || now.Sub(s.at[u.SandboxID]) >= every {
			out = append(out, u)
		}
	}
	return out
}

// written notes what was written. It forgets ended sandboxes, and sandboxes that no runner reports any more.
func (s *usageTimes) written(list []runnerapi.Usage, every time.Duration) {
	now := time.Now()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.at == nil {
		s.at = map[core.SandboxID]time.Time{}
	}
	for _, u := range list {
		if s.at[u.SandboxID] = now; u.Ended {
			delete(s.at, u.SandboxID)
		}
	}
	if now.Sub(s.swept) < every { // it takes time for all sandboxes of the cluster
		return
	}
	s.swept = now
	for id, at := range s.at {
		if now.Sub(at) > 10*every {
			delete(s.at, id)
		}
	}
}
