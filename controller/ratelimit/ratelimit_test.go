package ratelimit

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/core"
)

// TestBuckets takes from several buckets at once: all or none, and says when all will have one.
func TestBuckets(t *testing.T) {
	t.Parallel()
	l, now := New(Limits{}), time.Now()
	key, project := bucketKey{"key", Read}, bucketKey{"project", Read}
	rates := map[bucketKey]Rate{key: {10, 2}, project: {1, 3}, {"unlimited", Read}: {}}
	for left := 1; left >= 0; left-- {
		if got, err := l.take(now, rates); err != nil || got.Remaining != left || got.Limit != 2 {
			t.Errorf("%+v, %v", got, err)
		}
	}
	_, err := l.take(now, rates)
	if early, ok := err.(*Error); !ok || early.After > 100*time.Millisecond || early.After < 99*time.Millisecond || core.CodeOf(err) != core.CodeRateLimited { //nolint:errorlint // it is not wrapped
		t.Errorf("%v", err)
	}
	now = now.Add(200 * time.Millisecond) // the key has two again; the refused one took nothing of the project's last
	if _, err := l.take(now, rates); err != nil {
		t.Error(err)
	}
	if _, err := l.take(now, rates); err == nil {
		t.Error("the project has none left")
	}
	l.DropIdle(now.Add(time.Second))
	if len(l.buckets) != 2 {
		t.Errorf("%d buckets: fresh ones are kept", len(l.buckets))
	}
	l.DropIdle(now.Add(time.Hour))
	if len(l.buckets) != 0 {
		t.Errorf("%d buckets are kept for ever", len(l.buckets))
	}
	// A key that has used up its bucket keeps it, however many others come.
	for range 2 {
		_, _ = l.take(now, map[bucketKey]Rate{key: {10, 2}}) // these are its last
	}
	for i := range maxBuckets + 10 {
		_, _ = l.take(now, map[bucketKey]Rate{{fmt.Sprint(i), Read}: {1, 1}}) // the last of them share one bucket
	}
	if len(l.buckets) > maxBuckets+1 {
		t.Errorf("%d buckets", len(l.buckets))
	}
	if _, err := l.take(now, map[bucketKey]Rate{key: {10, 2}}); err == nil {
		t.Error("a key has its tokens back because others came")
	}
	if _, err := l.take(now.Add(time.Hour), map[bucketKey]Rate{{"new", Read}: {1, 1}}); err != nil || len(l.buckets) > 1 {
		t.Errorf("%v, %d buckets: full ones make room", err, len(l.buckets))
	}
}

// TestStrangersAndKeys has strangers ask from everywhere while a key that is refused stays refused.
func TestStrangersAndKeys(t *testing.T) {
	t.Parallel()
	c, now := New(Limits{}), time.Now()
	c.now = func() time.Time { return now } // no token comes back while the test works, however slow it is
	key := model.Key{ID: core.NewID[core.KeyID](), ProjectID: core.NewID[core.ProjectID]()}
	for range 101 {
		_, _ = c.Allow(key, Admin) // until it is refused
	}
	for i := range maxBuckets + 1000 {
		_, _ = c.AllowOpen(fmt.Sprintf("[2001:db8:%x:%x::1]:1", 1+i>>16, i&0xffff)) // most are refused
	}
	refused := 0
	for range 50 {
		if _, err := c.Allow(key, Admin); err != nil {
			refused++
		}
	}
	if refused != 50 {
		t.Errorf("the key was refused %d times of 50 after strangers came: its bucket was forgotten", refused)
	}
	if left, err := c.AllowOpen("192.0.2.1:5"); err != nil {
		t.Errorf("a stranger of another prefix: %+v, %v", left, err)
	}
}

// TestDelayedAnswersAreBounded: 256 answers to wrong keys are held back for a second at most, and the next one is refused at once.
func TestDelayedAnswersAreBounded(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := New(Limits{FailureDelay: time.Second})
		const from = "192.0.2.1:1000"
		for range 100 { // beyond those that are answered at once
			c.open.Failed(time.Now(), origin(from))
		}
		began := time.Now()
		var wg sync.WaitGroup
		for range maxDelayed {
			wg.Go(func() {
				if err := c.SlowFailure(t.Context(), from); err != nil {
					t.Error(err)
				}
			})
		}
		synctest.Wait()
		for range 10 {
			if err := c.SlowFailure(t.Context(), from); core.CodeOf(err) != core.CodeRateLimited {
				t.Errorf("beyond %d: %v", maxDelayed, err)
			}
		}
		if now := time.Now(); now != began {
			t.Errorf("a refusal took %s", now.Sub(began))
		}
		wg.Wait()
		if took := time.Since(began); took != maxFailureDelay {
			t.Errorf("the answers were held back for %s", took)
		}
		ctx, cancel := context.WithCancel(t.Context())
		cancel()
		if err := c.SlowFailure(ctx, from); !errors.Is(err, context.Canceled) || c.delayed != 0 {
			t.Errorf("afterwards: %v, and %d are held back", err, c.delayed)
		}
	})
}
