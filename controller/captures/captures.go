// Package captures wakes those who wait until a capture of a workspace by this controller ends.
package captures

import (
	"sync"

	"github.com/coppice-dev/coppice/core"
)

// Ends are the ends of captures to come. The zero value is ready. It is safe for concurrent use.
type Ends struct {
	// mu guards ends.
	mu   sync.Mutex
	ends map[core.WorkspaceID]chan struct{}
}

// Next returns a channel that is closed when the next capture of the workspace ends.
func (e *Ends) Next(id core.WorkspaceID) <-chan struct{} {
	e.mu.Lock()
	defer e.mu.Unlock()
	ch, ok := e.ends[id]
	if !ok {
		if e.ends == nil {
			e.ends = map[core.WorkspaceID]chan struct{}{}
		}
		ch = make(chan struct{})
		e.ends[id] = ch
	}
	return ch
}

// Ended wakes those who wait for the end of a capture of the workspace.
func (e *Ends) Ended(id core.WorkspaceID) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if ch, ok := e.ends[id]; ok {
		close(ch)
		delete(e.ends, id)
	}
}
