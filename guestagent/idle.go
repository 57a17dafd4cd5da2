//go:build linux

package guestagent

import (
	"runtime/debug"
	"sync"
	"time"
)

const (
	idleAfter = 3 * time.Second
	// memoryLimit is the heap size at which a collection runs in any case. Control calls, which do not switch the
	// collector on, reach it only after thousands of calls.
	memoryLimit = 48 << 20
	// busyGC keeps the heap close to the live size: every additional page of the heap is a page that every later fork
	// carries.
	busyGC = 30
)

// idler switches the garbage collector off while the agent has no requests. Go's runtime collects every two minutes
// even if nothing was allocated, which would make pages private in every idle fork.
type idler struct {
	mu    sync.Mutex
	busy  int
	off   bool
	timer *time.Timer // runs once after the last request
}

// begin is called before a public request, end after it.
func (i *idler) begin() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.busy++
	if i.timer != nil {
		i.timer.Stop()
	}
	if i.off {
		debug.SetGCPercent(busyGC)
		i.off = false
	}
}

func (i *idler) end() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.busy--; i.busy > 0 {
		return
	}
	if i.timer == nil {
		i.timer = time.AfterFunc(idleAfter, i.sleep)
		return
	}
	i.timer.Reset(idleAfter)
}

func (i *idler) sleep() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.busy == 0 {
		i.switchOff()
	}
}

// sleepNow is called when the guest is frozen: a collection during a reseal would take a large part of its time.
func (i *idler) sleepNow() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.switchOff()
}

// stop ends the timer.
func (i *idler) stop() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.timer != nil {
		i.timer.Stop()
	}
}

// switchOff switches the collector off. The caller holds mu.
func (i *idler) switchOff() {
	if !i.off {
		debug.SetGCPercent(-1)
		i.off = true
	}
}
