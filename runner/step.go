package runner

import (
	"context"
	"fmt"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// step is one step of making, capturing or thawing a machine.
type step struct {
	does string                          // what it does, for its error
	lap  string                          // the name of its time in the timings; empty: its time counts for the next step that has one
	then *failpoint.Point                // the point after it; nil: there is none
	do   func(ctx context.Context) error // nil: only the point
}

// runSteps runs steps in order and stops at the first one that fails. Its error says what the step does.
func runSteps(ctx context.Context, watch *core.Stopwatch, steps []step) error {
	for _, s := range steps {
		if err := s.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.does, err)
		}
		if s.lap != "" {
			watch.Lap(s.lap)
		}
	}
	return nil
}

func (s step) run(ctx context.Context) error {
	if s.do != nil {
		if err := s.do(ctx); err != nil {
			return err
		}
	}
	if s.then != nil {
		return s.then.Hit(ctx)
	}
	return nil
}
