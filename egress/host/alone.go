package host

import (
	"sync"
	"time"
)

// alone notices that no runner is connected, and none has been for a time.
type alone struct {
	after time.Duration
	timer *time.Timer

	mu   sync.Mutex // guards here
	here int        // clients that are connected
}

func newAlone(after time.Duration, do func()) *alone {
	return &alone{after: after, timer: time.AfterFunc(after, do)}
}

// come notes that a client is here, until what it returns is called.
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

// end is that nobody needs to notice any more.
func (a *alone) end() {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.here++ // for good
	a.timer.Stop()
}
