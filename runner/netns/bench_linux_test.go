package netns

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// BenchmarkLife measures each stage of a namespace's life, one after the other: go test -run '^$' -bench Life.
func BenchmarkLife(b *testing.B) {
	p := newTestPool(b, func(c *Config) { c.Warm, c.Max = 1, 2 })
	ctx := b.Context()
	var spent [7]time.Duration
	stages := [len(spent)]string{"create", "acquire", "assign", "open", "release", "reset", "delete"}
	lives := 0
	for b.Loop() {
		lives++
		stage := 0
		lap := func(fn func() error) {
			begin := time.Now()
			must(b, fn())
			spent[stage] += time.Since(begin)
			stage++
		}
		var n *Namespace
		p.mu.Lock()
		create := p.nextJobLocked()
		p.mu.Unlock()
		lap(func() error { return create(ctx) })
		lap(func() (err error) { n, err = p.Acquire(ctx); return err })
		lap(func() error { return n.Assign(ctx, identity(lives%60000+1)) })
		lap(func() error { return n.Open(ctx, core.EgressDenyAll) })
		lap(func() error { return n.Release(ctx) })
		p.mu.Lock()
		reset := p.nextJobLocked()
		p.mu.Unlock()
		lap(func() error { return reset(ctx) })
		p.mu.Lock()
		s := p.idle[0]
		p.idle = nil
		p.busy[s.name] = true
		p.mu.Unlock()
		lap(func() error { return errors.Join(s.sever(), p.finishDelete(s)) })
	}
	for i, name := range stages {
		b.ReportMetric(float64(spent[i].Microseconds())/float64(lives), "µs/"+name)
	}
}

// BenchmarkForkPath is what a fork waits for: a warm namespace, assigned and opened. A running pool resets behind it.
func BenchmarkForkPath(b *testing.B) {
	p := newTestPool(b, func(c *Config) { c.Warm, c.Max = 4, 8 })
	runPool(b, p)
	ctx := b.Context()
	var acquire, open time.Duration
	lives := 0
	for b.Loop() {
		lives++
		must(b, p.await(ctx, func(s Stats) bool { return s.Idle > 0 }))
		begin := time.Now()
		n, err := p.Acquire(ctx)
		must(b, err)
		acquire += time.Since(begin)
		begin = time.Now()
		must(b, n.Assign(ctx, identity(lives%60000+1)))
		must(b, n.Open(ctx, core.EgressDenyAll))
		open += time.Since(begin)
		must(b, n.Release(ctx))
	}
	b.ReportMetric(float64(acquire.Nanoseconds())/float64(lives)/1000, "µs/acquire")
	b.ReportMetric(float64(open.Nanoseconds())/float64(lives)/1000, "µs/assign+open")
}

// BenchmarkAllowAll is the development policy's price: Open with a veth pair and a table on the host, and Shut.
func BenchmarkAllowAll(b *testing.B) {
	p := newTestPool(b, nil)
	n, err := p.Acquire(b.Context())
	must(b, err)
	ctx := context.WithoutCancel(b.Context())
	var open time.Duration
	lives := 0
	for b.Loop() {
		lives++
		must(b, n.Assign(ctx, identity(1)))
		begin := time.Now()
		must(b, n.Open(ctx, core.EgressAllowAll))
		open += time.Since(begin)
		must(b, n.Shut(ctx))
	}
	b.ReportMetric(float64(open.Microseconds())/float64(lives), "µs/open")
}
