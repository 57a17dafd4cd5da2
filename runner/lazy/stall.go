package lazy

import (
	"context"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/threads"
)

// stallTick is the time between two looks at the machines while one of them waits.
const stallTick = time.Second

// Awaited are the images that machines wait for, by id.
type Awaited map[string]pager.Status

// WatchStalls calls update whenever something about the images has changed, until ctx ends. If update returns true, WatchStalls calls
// it again soon.
func (l *Images) WatchStalls(ctx context.Context, update func(context.Context, Awaited) (again bool)) {
	tick := time.NewTicker(stallTick)
	defer tick.Stop()
	for {
		l.mu.Lock()
		news := l.news
		l.mu.Unlock()
		var again <-chan time.Time
		if update(ctx, l.awaited()) {
			again = tick.C
		}
		select {
		case <-news:
		case <-again:
		case <-ctx.Done():
			return
		}
	}
}

// CheckStalls makes WatchStalls call its update now, because something about a machine has changed.
func (l *Images) CheckStalls() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.changed()
}

func (l *Images) awaited() Awaited {
	l.mu.Lock()
	defer l.mu.Unlock()
	out := make(Awaited)
	for id, im := range l.images {
		if len(im.status.Waiters) > 0 {
			out[id] = im.status
		}
	}
	return out
}

// Waits remembers how long the VMM of one machine has been blocked. The zero value is ready for use.
type Waits struct {
	mu     sync.Mutex // guards what follows
	thread int        // the thread of the VMM that was blocked at the last look
	since  time.Time
}

// Since returns the time since when a machine waits for a page of an image, and the cause. pid is the process of its VMM. The time is
// zero if the machine does not wait.
func (w *Waits) Since(images Awaited, m Machine, pid int) (since time.Time, why *runnerapi.Problem) {
	for id, st := range images {
		if !m.uses(id) {
			continue
		}
		from, object := time.Time{}, st.Waiters[0].Object
		for _, waiter := range st.Waiters { // the oldest first
			// Under KVM a kernel thread may ask for a vCPU of any machine.
			if threads.Of(pid, waiter.Thread) || threads.Kernel(waiter.Thread) {
				from, object = waiter.Since, waiter.Object
				break
			}
		}
		if from.IsZero() { // this machine may wait for a page that another machine has requested
			from = w.blockedSince(pid)
		}
		if !from.IsZero() && (since.IsZero() || from.Before(since)) {
			since, why = from, stallProblem(m.ID, from, object, st.Problem)
		}
	}
	return since, why
}

// blockedSince is the time since when every look has seen the same thread of the VMM wait in the kernel.
func (w *Waits) blockedSince(pid int) time.Time {
	thread := threads.Blocked(pid)
	w.mu.Lock()
	defer w.mu.Unlock()
	if thread == 0 || thread != w.thread {
		w.thread, w.since = thread, time.Now()
	}
	if thread == 0 {
		return time.Time{}
	}
	return w.since
}

func stallProblem(id core.SandboxID, since time.Time, object string, cause *runnerapi.Problem) *runnerapi.Problem {
	because := "it does not answer"
	if cause != nil {
		because = cause.Message
	}
	if cause != nil && (cause.Code == core.CodeDiskFull || cause.Category == core.Internal) { // the store delivers the page, but this host cannot keep it
		return runnerapi.ProblemOf(core.Errorf(cause.Category, cause.Code,
			"sandbox %s has waited since %s for memory that its runner cannot store: %s; it continues by itself when the runner can",
			id, since.UTC().Format(time.RFC3339), because))
	}
	return runnerapi.ProblemOf(core.Errorf(core.Unavailable, core.CodeStoreUnavailable,
		"sandbox %s has waited since %s for memory in object %s of the store: %s; it continues by itself when the store delivers it",
		id, since.UTC().Format(time.RFC3339), object, because))
}
