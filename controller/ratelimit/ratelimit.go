// Package ratelimit bounds how often a client may ask: each key, each project and, without a valid key, each address. It also delays the
// answers to wrong keys.
package ratelimit

import (
	"context"
	"math"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/controller/model"
	"github.com/coppice-dev/coppice/controller/openlimit"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Class is a kind of routes that share a rate.
type Class string

// The classes.
const (
	Read  Class = "read"
	Write Class = "write" // routes that begin operations or change objects
	Exec  Class = "exec"  // routes that reach into guests
	Admin Class = "admin" // projects and keys
	Open  Class = "open"  // without a valid key, by address
)

// Rate is a token bucket.
type Rate struct {
	PerSecond float64
	Burst     int
}

// Limits are the rates of this process; each of several controllers has the same rates for itself. Zero values take generous
// defaults: they do not delay a search that forks 300 times a second.
type Limits struct {
	Key          map[Class]Rate // of one key
	Project      map[Class]Rate // of all keys of one project
	Open         Rate           // of one address, for requests whose key is not yet known to be valid
	FailureDelay time.Duration  // of the answer to the sixth wrong key from an address in a minute; it doubles up to maxFailureDelay. Default 50 ms
}

func (l Limits) withDefaults() Limits {
	set := func(m *map[Class]Rate, rates map[Class]Rate) {
		if *m == nil {
			*m = rates
		}
	}
	fast, slow := Rate{2000, 4000}, Rate{20, 100}
	set(&l.Key, map[Class]Rate{Read: fast, Write: fast, Exec: fast, Admin: slow})
	fast, slow = Rate{4000, 8000}, Rate{40, 200}
	set(&l.Project, map[Class]Rate{Read: fast, Write: fast, Exec: fast, Admin: slow})
	if l.Open.Burst == 0 {
		l.Open = Rate{100, 500}
	}
	if l.FailureDelay == 0 {
		l.FailureDelay = 50 * time.Millisecond
	}
	return l
}

const (
	maxFailureDelay = time.Second
	maxDelayed      = 256 // answers that are delayed at the same time
	bucketIdle      = time.Minute
	maxBuckets      = 1 << 16
)

// Allowance is the state of the request's bucket that is nearest to empty.
type Allowance struct {
	Limit     int           // requests that a full bucket holds
	Remaining int           // left
	Reset     time.Duration // until it is full again
}

// Limiter keeps the buckets of this process. The buckets of keys and projects are separate from those of addresses, so that a sender
// without a valid key cannot influence them.
type Limiter struct {
	limits Limits
	open   *openlimit.Tree
	now    func() time.Time
	// mu guards the fields below.
	mu      sync.Mutex
	buckets map[bucketKey]*bucket
	delayed int
}

type bucketKey struct {
	owner string // key or project
	class Class
}

type bucket struct {
	*rate.Limiter
	used time.Time
}

// New makes a limiter.
func New(l Limits) *Limiter {
	l = l.withDefaults()
	return &Limiter{limits: l, open: openlimit.New(l.Open.PerSecond, l.Open.Burst), now: time.Now, buckets: map[bucketKey]*bucket{}}
}

// bucket needs mu. A bucket that limits somebody is never forgotten. If the largest number of buckets is reached, new owners share one
// bucket for each class.
func (l *Limiter) bucket(key bucketKey, r Rate, now time.Time) *bucket {
	b, ok := l.buckets[key]
	if !ok && len(l.buckets) >= maxBuckets {
		if l.reclaim(now, 0); len(l.buckets) >= maxBuckets {
			key = bucketKey{class: key.class}
			b, ok = l.buckets[key]
		}
	}
	if !ok {
		b = &bucket{Limiter: rate.NewLimiter(rate.Limit(r.PerSecond), r.Burst)}
		l.buckets[key] = b
	}
	b.used = now
	return b
}

// take takes a token out of every bucket. If one of them is empty, it takes none and returns when all will have one.
func (l *Limiter) take(now time.Time, rates map[bucketKey]Rate) (Allowance, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	left, wait := Allowance{Remaining: math.MaxInt}, time.Duration(0)
	buckets := make([]*bucket, 0, len(rates))
	for key, r := range rates {
		if r.Burst <= 0 {
			continue
		}
		b := l.bucket(key, r, now)
		buckets = append(buckets, b)
		tokens := b.TokensAt(now)
		if tokens < 1 {
			wait = max(wait, seconds((1-tokens)/r.PerSecond))
		}
		if n := max(0, int(tokens)-1); n < left.Remaining {
			left = Allowance{Limit: r.Burst, Remaining: n, Reset: seconds((float64(r.Burst) - tokens + 1) / r.PerSecond)}
		}
	}
	if wait > 0 {
		left.Remaining = 0
		return left, &Error{After: wait}
	}
	for _, b := range buckets {
		b.AllowN(now, 1)
	}
	return left, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// DropIdle forgets buckets that were not used for so long that they are full again.
func (l *Limiter) DropIdle(now time.Time) {
	l.open.Sweep(now)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.reclaim(now, bucketIdle)
}

// reclaim needs mu. It forgets buckets that are full: a new one would be the same.
func (l *Limiter) reclaim(now time.Time, idle time.Duration) {
	for key, b := range l.buckets {
		if now.Sub(b.used) >= idle && b.TokensAt(now) >= float64(b.Burst()) {
			delete(l.buckets, key)
		}
	}
}

// Error refuses a request that came too soon.
type Error struct{ After time.Duration }

// Error says what to do.
func (e *Error) Error() string { return e.core().Error() }

// Unwrap gives the core error that callers see.
func (e *Error) Unwrap() error { return e.core() }

func (e *Error) core() *core.Error {
	return core.Errorf(core.Exhausted, core.CodeRateLimited, "too many requests; repeat this one after the seconds in Retry-After")
}

// Allow takes a request of a key into account; an *Error when the key or its project makes too many of its class.
func (l *Limiter) Allow(key model.Key, class Class) (Allowance, error) {
	return l.take(l.now(), map[bucketKey]Rate{
		{string(key.ID), class}: l.limits.Key[class], {string(key.ProjectID), class}: l.limits.Project[class],
	})
}

// AllowOpen takes a request without a key, or with one that is not known yet, into account.
func (l *Limiter) AllowOpen(address string) (Allowance, error) {
	left, wait := l.open.Take(l.now(), origin(address))
	allowed := Allowance{Limit: left.Limit, Remaining: left.Remaining, Reset: left.Reset}
	if wait > 0 {
		return allowed, &Error{After: wait}
	}
	return allowed, nil
}

// origin is the address of the sender of a request; the zero value for requests by a socket of this host.
func origin(remote string) netip.Addr {
	port, err := netip.ParseAddrPort(remote)
	if err != nil {
		return netip.Addr{}
	}
	return port.Addr()
}

// SlowFailure delays the answer to a wrong key. The delay grows with the number of wrong keys from that address. It refuses with a
// Error if too many answers are being delayed.
func (l *Limiter) SlowFailure(ctx context.Context, address string) error {
	n := l.open.Failed(l.now(), origin(address))
	if n <= 0 {
		return nil
	}
	l.mu.Lock()
	full := l.delayed >= maxDelayed
	if !full {
		l.delayed++
	}
	l.mu.Unlock()
	if full {
		return &Error{After: maxFailureDelay}
	}
	defer func() {
		l.mu.Lock()
		defer l.mu.Unlock()
		l.delayed--
	}()
	return pace.Pause(ctx, min(l.limits.FailureDelay<<min(n-1, 10), maxFailureDelay))
}
