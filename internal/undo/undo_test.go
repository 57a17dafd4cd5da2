package undo_test

import (
	"context"
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/undo"
)

func TestSettle(t *testing.T) {
	t.Parallel()
	cause, stuck := errors.New("cause"), errors.New("stuck")
	for _, tc := range []struct {
		name string
		err  error
		want []string
	}{
		{"success forgets the steps", nil, nil},
		{"failure takes them back, last first, past one that fails", cause, []string{"three", "two", "one"}},
	} {
		t.Run(tc.name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithCancel(t.Context())
			var got []string
			var steps undo.Stack
			for _, name := range []string{"one", "two", "three"} {
				steps.Push(name, func(ctx context.Context) error {
					got = append(got, name)
					if ctx.Err() != nil {
						t.Errorf("step %s runs on a cancelled context", name)
					}
					if name == "two" {
						return stuck
					}
					return nil
				})
			}
			cancel()
			err := steps.Settle(ctx, tc.err)
			if diff := cmp.Diff(tc.want, got); diff != "" {
				t.Errorf("steps taken back (-want +got):\n%s", diff)
			}
			if tc.err == nil && err != nil {
				t.Errorf("Settle(nil) = %v", err)
			}
			if tc.err != nil && (!errors.Is(err, cause) || !errors.Is(err, stuck)) {
				t.Errorf("Settle = %v, want both %v and %v", err, cause, stuck)
			}
			if again := steps.Settle(ctx, cause); !errors.Is(again, cause) || errors.Is(again, stuck) {
				t.Errorf("a second Settle ran the steps again: %v", again)
			}
		})
	}
}
