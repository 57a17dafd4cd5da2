package pace_test

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coppice-dev/coppice/internal/pace"
)

func TestPause(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if err := pace.Pause(t.Context(), time.Minute); err != nil || time.Since(began) != time.Minute {
			t.Errorf("it waited %s, %v", time.Since(began), err)
		}
		cause := errors.New("enough")
		ctx, stop := context.WithCancelCause(t.Context())
		time.AfterFunc(time.Second, func() { stop(cause) })
		began = time.Now()
		if err := pace.Pause(ctx, time.Minute); !errors.Is(err, cause) || time.Since(began) != time.Second {
			t.Errorf("it waited %s, %v", time.Since(began), err)
		}
	})
}

// TestEvery counts calls: at once, at two intervals, for a wake between them, and none after the end.
func TestEvery(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		wake, began := make(chan struct{}), time.Now()
		var at []time.Duration
		done := make(chan struct{})
		go func() {
			pace.Every(ctx, time.Minute, wake, func() { at = append(at, time.Since(began)) })
			close(done)
		}()
		time.AfterFunc(90*time.Second, func() { wake <- struct{}{} })
		time.AfterFunc(3*time.Minute, stop)
		<-done
		want := []time.Duration{0, time.Minute, 90 * time.Second, 150 * time.Second}
		if len(at) != len(want) {
			t.Fatalf("called at %v, want %v", at, want)
		}
		for i := range want {
			if at[i] != want[i] {
				t.Errorf("called at %v, want %v", at, want)
			}
		}
	})
}

func TestSpread(t *testing.T) {
	t.Parallel()
	const d = 5 * time.Second
	least, most := d, time.Duration(0)
	for range 1000 {
		got := pace.Spread(d)
		least, most = min(least, got), max(most, got)
	}
	if least < d*9/10 || least > d*92/100 || most > d || most < d*98/100 || pace.Spread(0) != 0 {
		t.Errorf("a thousand times between %s and %s", least, most)
	}
}
