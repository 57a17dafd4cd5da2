package pace

import (
	"context"
	"math/rand/v2"
	"time"
)

// Pause waits for d. If the context ends first, it returns the context's cause.
func Pause(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-timer.C:
		return nil
	}
}

// Spread shortens d by up to a tenth, at random, so that those who began together do not stay together.
func Spread(d time.Duration) time.Duration {
	return d - rand.N(d/10+1) //nolint:gosec // G404: no secret
}

// Every calls do at once, then at every interval and whenever wake receives, until the context ends. A nil wake never receives.
func Every(ctx context.Context, interval time.Duration, wake <-chan struct{}, do func()) {
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		case <-wake:
		}
		do()
		timer.Reset(interval)
	}
}
