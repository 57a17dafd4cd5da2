package sidecar

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Backoff is the pause before something is repeated. It doubles with each repetition.
type Backoff struct {
	First time.Duration
	Last  time.Duration // no pause is longer
}

func (b Backoff) after(pause time.Duration) time.Duration { return min(2*pause, b.Last) }

// Supervisor keeps a process running for code that uses it. It starts the process when it is needed, attends it until it ends, and starts it
// again. P stands for a running process: its client, for example. Fields without a note are required.
type Supervisor[P any] struct {
	Name string // of the process, for the log
	Lost string // what does not work while none runs, for the log
	Log  *slog.Logger

	// Find returns the process that runs as far as is known, or says that none runs and whether one is needed. news is closed when that may have
	// changed; nil: the Supervisor looks again after its pauses only.
	Find func() (process P, state State, news <-chan struct{})
	// Start makes sure that a process runs. Find knows it from then on.
	Start func(ctx context.Context) error
	// Attend offers the process its work and watches it. It returns when the process has ended or does not answer, or when ctx ends.
	Attend func(ctx context.Context, process P) error
	// Ended is called after Attend, unless ctx has ended, with the error of Attend. hung says that the process was killed because it did not
	// answer. If the process still runs, Ended returns true: it is attended again after a pause. Otherwise Find no longer knows it.
	Ended func(ctx context.Context, process P, err error, hung bool) (alive bool)

	Starts  Backoff // before the next attempt to start
	Attends Backoff // before a process that still runs is attended again
}

// State is what a Supervisor is to do.
type State int

// The states.
const (
	Unneeded State = iota // no process runs, and none is needed
	Needed                // no process runs, and one is needed
	Running
)

// Run keeps the process running until ctx ends.
func (s Supervisor[P]) Run(ctx context.Context) {
	start, attend := s.Starts.First, s.Attends.First
	for ctx.Err() == nil {
		process, state, news := s.Find()
		switch state {
		case Running:
			start = s.Starts.First
			attend = s.attend(ctx, process, attend)
			continue
		case Needed:
			err := s.Start(ctx)
			if err == nil || ctx.Err() != nil {
				continue
			}
			s.Log.ErrorContext(ctx, "a side process was not started; it is started again", "process", s.Name, "meanwhile", s.Lost, "again_ms", core.Milliseconds(start), "err", err)
		case Unneeded:
		}
		if wait(ctx, start, news) {
			start = s.Starts.after(start)
		}
	}
}

// attend attends a process once. pause is the pause if the process still runs afterwards; it returns the pause for the next time.
func (s Supervisor[P]) attend(ctx context.Context, process P, pause time.Duration) time.Duration {
	began := time.Now()
	err := s.Attend(ctx, process)
	if ctx.Err() != nil || !s.Ended(ctx, process, err, errors.Is(err, ErrHung)) {
		return s.Attends.First
	}
	if time.Since(began) > s.Attends.Last { // it was attended well for a while
		pause = s.Attends.First
	}
	s.Log.ErrorContext(ctx, "a side process runs, but its reports were not received; it is asked again", "process", s.Name, "again_ms", core.Milliseconds(pause), "err", err)
	_ = pace.Pause(ctx, pause)
	return s.Attends.after(pause)
}

// wait waits for a pause, news, or the end of ctx. It reports whether the pause has passed.
func wait(ctx context.Context, pause time.Duration, news <-chan struct{}) bool {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-news:
	case <-ctx.Done():
	}
	return false
}

// Offer repeats an offer to a process until the process accepts it, or ctx ends. offer may also return nil because there is nothing to offer any
// more. refused hears of each attempt that failed, and of the pause that follows. If sooner is not nil, it is called before each attempt, and the
// pause ends early when the channel that it returns is closed.
func Offer(ctx context.Context, b Backoff, sooner func() <-chan struct{}, offer func(ctx context.Context) error, refused func(pause time.Duration, err error)) {
	for pause := b.First; ctx.Err() == nil; pause = b.after(pause) {
		var early <-chan struct{}
		if sooner != nil {
			early = sooner()
		}
		err := offer(ctx)
		if err == nil || ctx.Err() != nil {
			return
		}
		refused(pause, err)
		wait(ctx, pause, early)
	}
}
