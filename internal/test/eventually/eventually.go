// Package eventually lets tests wait for a state that no event announces: a state of another
// process, of the kernel or of a server.
package eventually

import (
	"context"
	"errors"
	"testing"
	"time"
)

// patience is longer than anything takes on a machine that is not broken.
const patience = 5 * time.Minute

// True asks again and again until ok says so, and fails the test after five minutes. Cleanups may use it.
func True(tb testing.TB, what string, ok func() bool) {
	tb.Helper()
	ctx, cancel := context.WithTimeoutCause(context.WithoutCancel(tb.Context()), patience, errors.New("five minutes passed"))
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			tb.Fatalf("waiting that %s: %v", what, context.Cause(ctx))
		}
	}
}
