package sidecar_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/internal/sidecar"
)

// user uses a process that a test plays. It notes what the supervisor does, and when.
type user struct {
	began time.Time

	mu      sync.Mutex // guards what follows
	noted   []string
	running int // 0: none; otherwise the number of the process
	starts  int
	unused  bool
	news    chan struct{}
	failing error // of a start
	alive   bool  // what Ended answers
	attend  func(ctx context.Context, process int) error
}

func (u *user) note(format string, a ...any) {
	u.noted = append(u.noted, fmt.Sprintf("%s: ", time.Since(u.began))+fmt.Sprintf(format, a...))
}

func (u *user) change(fn func()) {
	u.mu.Lock()
	defer u.mu.Unlock()
	fn()
	if u.news != nil {
		close(u.news)
		u.news = make(chan struct{})
	}
}

func (u *user) supervisor() sidecar.Supervisor[int] {
	return sidecar.Supervisor[int]{
		Name: "helper", Lost: "nothing works", Log: slog.New(slog.DiscardHandler),
		Starts: sidecar.Backoff{First: time.Second, Last: 4 * time.Second}, Attends: sidecar.Backoff{First: time.Second, Last: 4 * time.Second},
		Find: func() (int, sidecar.State, <-chan struct{}) {
			u.mu.Lock()
			defer u.mu.Unlock()
			switch {
			case u.running > 0:
				return u.running, sidecar.Running, u.news
			case u.unused:
				return 0, sidecar.Unneeded, u.news
			}
			return 0, sidecar.Needed, u.news
		},
		Start: func(context.Context) error {
			u.mu.Lock()
			defer u.mu.Unlock()
			if u.failing != nil {
				u.note("start fails")
				return u.failing
			}
			u.starts++
			u.running = u.starts
			u.note("start %d", u.running)
			return nil
		},
		Attend: func(ctx context.Context, process int) error { return u.attend(ctx, process) },
		Ended: func(_ context.Context, process int, err error, hung bool) bool {
			u.mu.Lock()
			defer u.mu.Unlock()
			u.note("%d ended: %v, hung: %t, alive: %t", process, err, hung, u.alive)
			if !u.alive {
				u.running = 0
			}
			return u.alive
		},
	}
}

// run runs a supervisor while the time of the test goes on, and returns what it did.
func (u *user) run(t *testing.T, script func()) []string {
	t.Helper()
	u.began = time.Now()
	ctx, stop := context.WithCancel(t.Context())
	var wg sync.WaitGroup
	wg.Go(func() { u.supervisor().Run(ctx) })
	script()
	stop()
	wg.Wait()
	return u.noted
}

func wantNoted(t *testing.T, got []string, want ...string) {
	t.Helper()
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("the supervisor did (-want +got):\n%s", diff)
	}
}

// TestSupervisorStartsAgain: a process that ends is followed by another at once, also after it hung. After ctx has ended, nothing is.
func TestSupervisorStartsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		gone := errors.New("gone")
		u := &user{attend: func(ctx context.Context, process int) error {
			select {
			case <-time.After(10 * time.Second):
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if process == 2 {
				return fmt.Errorf("the helper: %w", sidecar.ErrHung)
			}
			return gone
		}}
		got := u.run(t, func() { time.Sleep(25 * time.Second) })
		wantNoted(t, got, "0s: start 1", "10s: 1 ended: gone, hung: false, alive: false", "10s: start 2",
			"20s: 2 ended: the helper: it hung, hung: true, alive: false", "20s: start 3")
	})
}

// TestSupervisorPauses: the pause between attempts to start grows to its bound, ends with news, and is short again after a process ran.
func TestSupervisorPauses(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		end := make(chan struct{})
		u := &user{failing: errors.New("no memory"), news: make(chan struct{}), attend: func(ctx context.Context, _ int) error {
			select {
			case <-end:
			case <-ctx.Done():
			}
			return errors.New("gone")
		}}
		got := u.run(t, func() {
			time.Sleep(8500 * time.Millisecond) // at 0, 1, 3 and 7 s
			u.change(func() {})
			time.Sleep(time.Second)
			u.change(func() { u.failing = nil })
			time.Sleep(time.Second)
			u.change(func() { u.failing = errors.New("no memory") })
			close(end)
			time.Sleep(1500 * time.Millisecond)
		})
		wantNoted(t, got, "0s: start fails", "1s: start fails", "3s: start fails", "7s: start fails", "8.5s: start fails", "9.5s: start 1",
			"10.5s: 1 ended: gone, hung: false, alive: false", "10.5s: start fails", "11.5s: start fails")
	})
}

// TestSupervisorUnneeded: nothing is started that nobody needs.
func TestSupervisorUnneeded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		u := &user{unused: true, news: make(chan struct{}), attend: func(ctx context.Context, _ int) error {
			<-ctx.Done()
			return context.Cause(ctx)
		}}
		got := u.run(t, func() {
			time.Sleep(90 * time.Second)
			u.change(func() { u.unused = false })
			time.Sleep(time.Second)
		})
		wantNoted(t, got, "1m30s: start 1")
	})
}

// TestSupervisorAttendsAgain: a process that still runs is attended again after a pause, which grows until the process was attended for long.
func TestSupervisorAttendsAgain(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		times := 0
		u := &user{alive: true, attend: func(ctx context.Context, _ int) error {
			if times++; times == 5 {
				select {
				case <-time.After(5 * time.Second):
				case <-ctx.Done():
				}
			}
			return errors.New("cut off")
		}}
		got := u.run(t, func() { time.Sleep(17500 * time.Millisecond) })
		var want []string
		for _, at := range []string{"0s", "1s", "3s", "7s", "16s", "17s"} { // the fifth begins at 11 s
			want = append(want, at+": 1 ended: cut off, hung: false, alive: true")
		}
		wantNoted(t, got, slices.Insert(want, 0, "0s: start 1")...)
	})
}

// TestOffer: an offer is repeated until it is accepted, at once when there is reason to, and not after its context has ended.
func TestOffer(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		began, early := time.Now(), make(chan struct{})
		var at, pauses []time.Duration
		attempts := func(ctx context.Context, accept int) {
			at, pauses = nil, nil
			sidecar.Offer(ctx, sidecar.Backoff{First: time.Second, Last: 3 * time.Second}, func() <-chan struct{} { return early }, func(context.Context) error {
				if at = append(at, time.Since(began)); len(at) == accept {
					return nil
				}
				return errors.New("refused")
			}, func(pause time.Duration, _ error) { pauses = append(pauses, pause) })
		}
		attempts(t.Context(), 4)
		if diff := cmp.Diff([]time.Duration{0, time.Second, 3 * time.Second, 6 * time.Second}, at); diff != "" {
			t.Errorf("offers: %s", diff)
		}
		if diff := cmp.Diff([]time.Duration{time.Second, 2 * time.Second, 3 * time.Second}, pauses); diff != "" {
			t.Errorf("pauses: %s", diff)
		}
		began = time.Now()
		time.AfterFunc(100*time.Millisecond, func() { close(early) })
		attempts(t.Context(), 2)
		if diff := cmp.Diff([]time.Duration{0, 100 * time.Millisecond}, at); diff != "" {
			t.Errorf("offers when there is reason: %s", diff)
		}
		early = nil
		ctx, stop := context.WithTimeout(t.Context(), 1500*time.Millisecond)
		defer stop()
		began = time.Now()
		attempts(ctx, 0)
		if len(at) != 2 || time.Since(began) != 1500*time.Millisecond {
			t.Errorf("%d offers in %s", len(at), time.Since(began))
		}
		attempts(ctx, 0)
		if len(at) != 0 {
			t.Errorf("%d offers after the end", len(at))
		}
	})
}
