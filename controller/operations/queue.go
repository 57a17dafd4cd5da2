package operations

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// queuePoll is how often the next request in line looks for room. Requests on this and on other controllers free room.
const queuePoll = 50 * time.Millisecond

// queue has the lines in which requests wait for room on a runner. There is a line for each place that can be full: one for each
// runner that is the only one with the needed bytes, and one for all runners together. Within a line projects take turns, and the
// requests of a project keep their order, so that a project with many requests does not keep the others out. The next request stays
// next until there is room for it, its time is over, or its client has gone. No request overtakes it, so that many small requests do
// not starve a large one. Nothing is allocated meanwhile.
type queue struct {
	// mu guards the fields below.
	mu     sync.Mutex
	lines  map[core.RunnerID]*line
	length int
}

type line struct {
	next    *waiter
	ring    []core.ProjectID // projects with waiting requests, in the order of their turns
	waiting map[core.ProjectID][]*waiter
}

type waiter struct {
	place   core.RunnerID
	project core.ProjectID
	turn    chan struct{} // closed when the request is next
}

// busy reports whether a request waits for a place.
func (q *queue) busy(place core.RunnerID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.lines[place] != nil
}

// join adds a request to a line, unless too many wait already.
func (q *queue) join(place core.RunnerID, project core.ProjectID, most int) (*waiter, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.length >= most {
		return nil, false
	}
	q.length++
	w := &waiter{place: place, project: project, turn: make(chan struct{})}
	l := q.lines[place]
	if l == nil {
		if q.lines == nil {
			q.lines = map[core.RunnerID]*line{}
		}
		q.lines[place] = &line{next: w, waiting: map[core.ProjectID][]*waiter{}}
		close(w.turn)
		return w, true
	}
	if len(l.waiting[project]) == 0 {
		l.ring = append(l.ring, project)
	}
	l.waiting[project] = append(l.waiting[project], w)
	return w, true
}

// leave takes a request out of its line; if it was next, the next project has its turn.
func (q *queue) leave(w *waiter) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.length--
	l := q.lines[w.place]
	if l.next != w {
		l.remove(w)
		return
	}
	if len(l.ring) == 0 {
		delete(q.lines, w.place)
		return
	}
	project := l.ring[0]
	l.next = l.waiting[project][0]
	l.remove(l.next)
	if len(l.waiting[project]) > 0 { // its next request comes after the other projects'
		l.ring = append(slices.DeleteFunc(l.ring, func(p core.ProjectID) bool { return p == project }), project)
	}
	close(l.next.turn)
}

func (l *line) remove(w *waiter) {
	rest := slices.DeleteFunc(l.waiting[w.project], func(x *waiter) bool { return x == w })
	l.waiting[w.project] = rest
	if len(rest) == 0 {
		delete(l.waiting, w.project)
		l.ring = slices.DeleteFunc(l.ring, func(p core.ProjectID) bool { return p == w.project })
	}
}

type turnKey struct{}

// Queue begins something that needs room. It waits in line for the room, at most as long as the request itself would wait.
func (e *Engine[T, R]) Queue(ctx context.Context, project core.ProjectID, wait time.Duration, try func(ctx context.Context) (*Task[T, R], error)) (*Task[T, R], error) {
	t, err := try(ctx)
	bound := min(wait, e.cfg.QueueWait)
	full, ok := errors.AsType[*placement.FullError](err)
	if !ok || full.Never || bound <= 0 {
		return t, err
	}
	w, ok := e.queue.join(full.Holder, project, e.cfg.QueueMost)
	if !ok {
		return nil, err
	}
	defer e.queue.leave(w)
	over := time.NewTimer(bound)
	defer over.Stop()
	select {
	case <-w.turn:
	case <-over.C:
		return nil, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	poll := time.NewTicker(queuePoll)
	defer poll.Stop()
	mine := context.WithValue(ctx, turnKey{}, true)
	for {
		if t, err = try(mine); !errors.As(err, &full) || full.Never {
			return t, err
		}
		select {
		case <-poll.C:
		case <-over.C:
			return nil, err
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// MayPlace refuses a request that has not waited in line while others wait for the same place.
func (e *Engine[T, R]) MayPlace(ctx context.Context, req placement.Request) error {
	if mine, _ := ctx.Value(turnKey{}).(bool); mine || !e.queue.busy(req.Holder) {
		return nil
	}
	return placement.Full(req, "room: other requests wait for it")
}

// Waiting is how many requests wait for room.
func (e *Engine[T, R]) Waiting() int {
	e.queue.mu.Lock()
	defer e.queue.mu.Unlock()
	return e.queue.length
}
