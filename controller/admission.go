package controller

import (
	"context"
	"errors"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/core"
)

// admissionPoll is how often the next request in line looks for room. Requests on this and on other controllers free room.
const admissionPoll = 50 * time.Millisecond

// admission has the lines in which requests wait for room on a runner. There is a line for each place that can be full: one for each
// runner that is the only one with the needed bytes, and one for all runners together. Within a line projects take turns, and the
// requests of a project keep their order, so that a project with many requests does not keep the others out. The next request stays
// next until there is room for it, its time is over, or its client has gone. No request overtakes it, so that many small requests do
// not starve a large one. Nothing is allocated meanwhile.
type admission struct {
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
func (a *admission) busy(place core.RunnerID) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.lines[place] != nil
}

// join adds a request to a line, unless too many wait already.
func (a *admission) join(place core.RunnerID, project core.ProjectID, most int) (*waiter, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.length >= most {
		return nil, false
	}
	a.length++
	w := &waiter{place: place, project: project, turn: make(chan struct{})}
	l := a.lines[place]
	if l == nil {
		if a.lines == nil {
			a.lines = map[core.RunnerID]*line{}
		}
		a.lines[place] = &line{next: w, waiting: map[core.ProjectID][]*waiter{}}
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
func (a *admission) leave(w *waiter) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.length--
	l := a.lines[w.place]
	if l.next != w {
		l.remove(w)
		return
	}
	if len(l.ring) == 0 {
		delete(a.lines, w.place)
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

// admit begins something that needs room. It waits in line for the room, at most as long as the request itself would wait.
func (c *Controller) admit(ctx context.Context, project core.ProjectID, wait time.Duration, try func(ctx context.Context) (*Task, error)) (*Task, error) {
	t, err := try(ctx)
	bound := min(wait, c.cfg.AdmissionWait)
	full, ok := errors.AsType[*placement.FullError](err)
	if !ok || full.Never || bound <= 0 {
		return t, err
	}
	w, ok := c.admission.join(full.Holder, project, c.cfg.AdmissionQueue)
	if !ok {
		return nil, err
	}
	defer c.admission.leave(w)
	over := time.NewTimer(bound)
	defer over.Stop()
	select {
	case <-w.turn:
	case <-over.C:
		return nil, err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	poll := time.NewTicker(admissionPoll)
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

// inLine refuses a request that has not waited in line while others wait for the same place.
func (c *Controller) inLine(ctx context.Context, req placement.Request) error {
	if mine, _ := ctx.Value(turnKey{}).(bool); mine || !c.admission.busy(req.Holder) {
		return nil
	}
	return placement.Full(req, "room: other requests wait for it")
}

// Waiting is how many requests wait for room.
func (c *Controller) Waiting() int {
	c.admission.mu.Lock()
	defer c.admission.mu.Unlock()
	return c.admission.length
}
