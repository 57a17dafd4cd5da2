// Package undo takes back the completed steps of a function when a later step failed.
package undo

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"
)

// Time bounds all the steps of one Settle or Undo together.
const Time = 30 * time.Second

// Stack holds how to take back each step done so far. The zero value is ready. It is used by one goroutine:
//
//	func make(ctx context.Context) (_ *thing, err error) {
//		var steps undo.Stack
//		defer func() { err = steps.Settle(ctx, err) }()
//		...
//		steps.Push("namespace", ns.Release)
type Stack struct {
	steps []step
}

type step struct {
	name string
	undo func(context.Context) error
}

// Push says how to take back what was just done.
func (s *Stack) Push(name string, undo func(context.Context) error) {
	s.steps = append(s.steps, step{name, undo})
}

// Settle forgets the steps if err is nil. Otherwise it takes them back and returns err joined with what failed.
func (s *Stack) Settle(ctx context.Context, err error) error {
	if err == nil {
		s.steps = nil
		return nil
	}
	if undoErr := s.Undo(ctx); undoErr != nil {
		return errors.Join(err, undoErr)
	}
	return err
}

// Undo takes the steps back, last first, on a context that outlives the caller's. It goes on after a failure and returns
// what failed.
func (s *Stack) Undo(ctx context.Context) error {
	steps := s.steps
	s.steps = nil
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), Time)
	defer cancel()
	var errs []error
	for _, step := range slices.Backward(steps) {
		if err := step.undo(ctx); err != nil {
			errs = append(errs, fmt.Errorf("take back %s: %w", step.name, err))
		}
	}
	return errors.Join(errs...)
}
