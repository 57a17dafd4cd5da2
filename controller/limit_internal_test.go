package controller

import (
	"fmt"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// TestBuckets takes from several buckets at once: all or none, and says when all will have one.
func TestBuckets(t *testing.T) {
	t.Parallel()
	l, now := newLimiter(Limits{}), time.Now()
	key, project := bucketKey{"key", RateRead}, bucketKey{"project", RateRead}
	rates := map[bucketKey]Rate{key: {10, 2}, project: {1, 3}, {"unlimited", RateRead}: {}}
	for left := 1; left >= 0; left-- {
		if got, err := l.take(now, rates); err != nil || got.Remaining != left || got.Limit != 2 {
			t.Errorf("%+v, %v", got, err)
		}
	}
	_, err := l.take(now, rates)
	if early, ok := err.(*RateError); !ok || early.After > 100*time.Millisecond || early.After < 99*time.Millisecond || core.CodeOf(err) != core.CodeRateLimited { //nolint:errorlint // it is not wrapped
		t.Errorf("%v", err)
	}
	now = now.Add(200 * time.Millisecond) // the key has two again; the refused one took nothing of the project's last
	if _, err := l.take(now, rates); err != nil {
		t.Error(err)
	}
	if _, err := l.take(now, rates); err == nil {
		t.Error("the project has none left")
	}
	l.sweep(now.Add(time.Second))
	if len(l.buckets) != 2 {
		t.Errorf("%d buckets: fresh ones are kept", len(l.buckets))
	}
	l.sweep(now.Add(time.Hour))
	if len(l.buckets) != 0 {
		t.Errorf("%d buckets are kept for ever", len(l.buckets))
	}
	// A key that has used up its bucket keeps it, however many others come.
	for range 2 {
		_, _ = l.take(now, map[bucketKey]Rate{key: {10, 2}}) // these are its last
	}
	for i := range maxBuckets + 10 {
		_, _ = l.take(now, map[bucketKey]Rate{{fmt.Sprint(i), RateRead}: {1, 1}}) // the last of them share one bucket
	}
	if len(l.buckets) > maxBuckets+1 {
		t.Errorf("%d buckets", len(l.buckets))
	}
	if _, err := l.take(now, map[bucketKey]Rate{key: {10, 2}}); err == nil {
		t.Error("a key has its tokens back because others came")
	}
	if _, err := l.take(now.Add(time.Hour), map[bucketKey]Rate{{"new", RateRead}: {1, 1}}); err != nil || len(l.buckets) > 1 {
		t.Errorf("%v, %d buckets: full ones make room", err, len(l.buckets))
	}
}

// TestStrangersAndKeys has strangers ask from everywhere while a key that is refused stays refused.
func TestStrangersAndKeys(t *testing.T) {
	t.Parallel()
	c, now := &Controller{limits: newLimiter(Limits{})}, time.Now()
	c.limits.now = func() time.Time { return now } // no token comes back while the test works, however slow it is
	key := Key{ID: core.NewID[core.KeyID](), ProjectID: core.NewID[core.ProjectID]()}
	for range 101 {
		_, _ = c.Allow(key, RateAdmin) // until it is refused
	}
	for i := range maxBuckets + 1000 {
		_, _ = c.AllowOpen(fmt.Sprintf("[2001:db8:%x:%x::1]:1", 1+i>>16, i&0xffff)) // most are refused
	}
	refused := 0
	for range 50 {
		if _, err := c.Allow(key, RateAdmin); err != nil {
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
