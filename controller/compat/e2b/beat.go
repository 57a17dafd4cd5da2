package e2b

import (
	"context"
	"net/http"
	"strconv"
	"sync"
	"time"
)

const (
	defaultKeepalive = 90 * time.Second
	maxKeepalive     = time.Hour
	headerKeepalive  = "Keepalive-Ping-Interval"
)

// keepalive is the pause after which a client wants a sign of life.
func keepalive(h http.Header) time.Duration {
	n, err := strconv.Atoi(h.Get(headerKeepalive))
	if err != nil || n < 1 {
		return defaultKeepalive
	}
	return time.Duration(min(n, int(maxKeepalive/time.Second))) * time.Second
}

// beating is a stream of messages, from several goroutines, with a sign of life when it is idle.
type beating[M any] struct {
	send  func(M) error
	pulse func() M

	mu   sync.Mutex // guards the stream and last
	last time.Time
}

func (b *beating[M]) put(m M) error {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last = time.Now()
	return b.send(m)
}

// beat sends a sign of life whenever the stream has been idle for a while. The returned function ends this.
func (b *beating[M]) beat(ctx context.Context, every time.Duration) (still func()) {
	ctx, cancel := context.WithCancel(ctx)
	var group sync.WaitGroup
	group.Go(func() { b.pulses(ctx, every) })
	return func() {
		cancel()
		group.Wait()
	}
}

func (b *beating[M]) pulses(ctx context.Context, every time.Duration) {
	timer := time.NewTimer(every)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-timer.C:
		}
		b.mu.Lock()
		idle := time.Since(b.last)
		b.mu.Unlock()
		if idle >= every {
			if b.put(b.pulse()) != nil {
				return // the other writers notice it, too
			}
			idle = 0
		}
		timer.Reset(every - idle)
	}
}
