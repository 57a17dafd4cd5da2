package host

import (
	"sync"
	"time"
)

// alone calls a function when no runner has been connected for some time.
type alone struct {
	after time.Duration
	timer *time.Timer

	mu   sync.Mutex // guards here
	here int        // connected clients
}

func newAlone(after time.Duration, do func()) *alone {
	return &alone{after: after, timer: time.AfterFunc(after, do)}
}

// come notes that a client is connected, until the returned function is called.
func (a *alone) come() (leave func()) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.here++
	a.timer.Stop()
	return func() {
		a.mu.Lock()
		defer a.mu.Unlock()
		if a.here--; a.here == 0 {
			a.timer.Reset(a.after)
		}
	}
}

// end stops the timer for good.
func (a *alone) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.here++ // so that no leaving client starts the timer again
	a.timer.Stop()
}
