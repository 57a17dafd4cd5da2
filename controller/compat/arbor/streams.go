package arbor

import (
	"net/http"
	"sync"

	"github.com/coppice-dev/coppice/controller/compat/shared"
	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// maxStreams bounds the WebSockets and event streams of one key that are open at the same time.
const maxStreams = 64

// streams counts what is open, by key. Its zero value is ready for use.
type streams struct {
	mu   sync.Mutex // guards open
	open map[coppice.KeyID]int
}

// enter takes a place, which leave gives back.
func (s *streams) enter(key coppice.KeyID) (leave func(), err error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.open[key] >= maxStreams {
		return nil, shared.Failf(http.StatusTooManyRequests, "this key has %d streams open, its limit; close one of them", maxStreams)
	}
	if s.open == nil {
		s.open = map[coppice.KeyID]int{}
	}
	s.open[key]++
	return func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.open[key]--; s.open[key] == 0 {
			delete(s.open, key)
		}
	}, nil
}
