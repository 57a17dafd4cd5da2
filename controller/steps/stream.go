package steps

import (
	"context"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/controller/operations"
	"github.com/coppice-dev/coppice/core"
)

const (
	followPoll = 500 * time.Millisecond // of a step that another controller carries out

	maxStreams        = 1024
	maxProjectStreams = 128
)

// streams are the streams of the results of steps. It is safe for concurrent use.
type streams struct {
	mu       sync.Mutex // guards what is below, and the fields of each followed
	total    int
	projects map[core.ProjectID]int
	steps    map[core.OperationID]*followed
}

// followed is a step that at least one stream follows.
type followed struct {
	followers int
	changed   chan struct{}      // closed and replaced when there may be something new
	stop      context.CancelFunc // ends the poller
}

func newStreams() streams {
	return streams{projects: map[core.ProjectID]int{}, steps: map[core.OperationID]*followed{}}
}

// Enter takes the place of a stream. leave gives it back, and must be called once.
func (s *Stepper) Enter(project core.ProjectID) (leave func(), err error) {
	t := &s.streams
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.total >= maxStreams || t.projects[project] >= maxProjectStreams {
		return nil, core.Errorf(core.Exhausted, core.CodeCapacity, "too many streams of steps are open; ask without application/x-ndjson, or wait for one of them")
	}
	t.total++
	t.projects[project]++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.total--
		if t.projects[project]--; t.projects[project] == 0 {
			delete(t.projects, project)
		}
	}, nil
}

// Follow hands out the results of a step as they come, until the step has ended or the context has. It returns the operation at its end.
func (s *Stepper) Follow(ctx context.Context, project core.ProjectID, step core.OperationID, give func(Result) error) (operations.Operation, error) {
	defer s.follow(ctx, project, step)()
	var had []int
	for {
		changed := s.streams.next(step)
		var op operations.Operation
		var list []Result
		if err := s.store.InProject(ctx, project, func(tx Tx) (err error) {
			if op, err = tx.Operation(ctx, step); err == nil { // before the results, so that none is missed
				list, err = tx.StepResults(ctx, step, had)
			}
			return err
		}); err != nil {
			return op, err
		}
		for _, r := range list {
			if err := give(r); err != nil {
				return op, err
			}
			had = append(had, r.Index)
		}
		if op.State.Done() {
			return op, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return op, context.Cause(ctx)
		}
	}
}

// follow counts a follower of a step. The first one starts the poller of the step, and the last one ends it.
func (s *Stepper) follow(ctx context.Context, project core.ProjectID, step core.OperationID) (leave func()) {
	t := &s.streams
	t.mu.Lock()
	defer t.mu.Unlock()
	f := t.steps[step]
	if f == nil {
		polling, stop := context.WithCancel(context.WithoutCancel(ctx))
		f = &followed{changed: make(chan struct{}), stop: stop}
		t.steps[step] = f
		go s.poll(polling, project, step)
	}
	f.followers++
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		if f.followers--; f.followers == 0 {
			f.stop()
			delete(t.steps, step)
		}
	}
}

// poll wakes the followers of a step that another controller may carry out, when an action or the step has ended.
func (s *Stepper) poll(ctx context.Context, project core.ProjectID, step core.OperationID) {
	tick := time.NewTicker(followPoll)
	defer tick.Stop()
	for had := 0; ; {
		select {
		case <-tick.C:
		case <-ctx.Done():
			return
		}
		ended, done := 0, false
		err := s.store.InProject(ctx, project, func(tx Tx) error {
			op, err := tx.Operation(ctx, step)
			if err != nil {
				return err
			}
			rows, err := tx.StepActions(ctx, step)
			for _, r := range rows {
				if r.Phase == Ended {
					ended++
				}
			}
			done = op.State.Done()
			return err
		})
		if err != nil || done || ended != had { // the followers find the error themselves
			s.streams.wake(step)
		}
		had = ended
	}
}

// Ended tells those who follow a step that it may have ended.
func (s *Stepper) Ended(step core.OperationID) { s.streams.wake(step) }

// wake tells those who follow a step that there may be something new.
func (t *streams) wake(step core.OperationID) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if f := t.steps[step]; f != nil {
		close(f.changed)
		f.changed = make(chan struct{})
	}
}

// next returns a channel that is closed when there may be something new of a step that is followed.
func (t *streams) next(step core.OperationID) <-chan struct{} {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.steps[step].changed
}
