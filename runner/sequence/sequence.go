// Package sequence runs the steps of making, capturing or thawing a machine.
package sequence

import (
	"context"
	"fmt"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/failpoint"
)

// Step is one step.
type Step struct {
	Does string                          // what it does, for its error
	Lap  string                          // the name of its time in the timings; empty: its time counts for the next step that has one
	Then *failpoint.Point                // the point after it; nil: there is none
	Do   func(ctx context.Context) error // nil: only the point
}

// Run runs steps in order and stops at the first one that fails. Its error says what the step does.
func Run(ctx context.Context, watch *core.Stopwatch, steps []Step) error {
	for _, s := range steps {
		if err := s.run(ctx); err != nil {
			return fmt.Errorf("%s: %w", s.Does, err)
		}
		if s.Lap != "" {
			watch.Lap(s.Lap)
		}
	}
	return nil
}

func (s Step) run(ctx context.Context) error {
	if s.Do != nil {
		if err := s.Do(ctx); err != nil {
			return err
		}
	}
	if s.Then != nil {
		return s.Then.Hit(ctx)
	}
	return nil
}
