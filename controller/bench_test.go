package controller_test

import (
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// BenchmarkForkOperation measures what the controller adds to a fork: a runner that answers at once, a real database. The
// time is that of the whole request, from the call to the committed rows.
func BenchmarkForkOperation(b *testing.B) {
	for _, c := range []struct{ children, clients int }{{1, 1}, {1, 8}, {8, 1}, {64, 1}} {
		b.Run(fmt.Sprintf("children=%d/clients=%d", c.children, c.clients), func(b *testing.B) {
			w := newWorld(b)
			cp := w.checkpoint(w.create("main").ID)
			var mu sync.Mutex
			var times []time.Duration
			left := b.N
			b.ResetTimer()
			var group sync.WaitGroup
			for range c.clients {
				group.Go(func() {
					for {
						mu.Lock()
						if left--; left < 0 || b.Failed() {
							mu.Unlock()
							return
						}
						mu.Unlock()
						start := time.Now()
						a, err := w.ForkCheckpoint(b.Context(), w.project, cp.ID, controller.ForkRequest{Count: c.children}, wait)
						took := time.Since(start)
						if err != nil || len(a.Result.Children) != c.children {
							b.Errorf("%v", err)
							return
						}
						mu.Lock()
						times = append(times, took)
						mu.Unlock()
					}
				})
			}
			group.Wait()
			b.StopTimer()
			if len(times) == 0 {
				return
			}
			slices.Sort(times)
			b.ReportMetric(core.Milliseconds(times[len(times)/2]), "p50-ms")
			b.ReportMetric(core.Milliseconds(times[len(times)*99/100]), "p99-ms")
			b.ReportMetric(float64(len(times))/b.Elapsed().Seconds(), "forks/s")
		})
	}
}

// BenchmarkParallelForks starts 1,000 forks of one checkpoint at once and waits until all are ready.
func BenchmarkParallelForks(b *testing.B) {
	const n = 1000
	for b.Loop() {
		b.StopTimer()
		w := newWorld(b)
		cp := w.checkpoint(w.create("main").ID)
		b.StartTimer()
		var group sync.WaitGroup
		for range n {
			group.Go(func() {
				if a, err := w.ForkCheckpoint(b.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1}, 2*wait); err != nil || !a.Done {
					b.Errorf("%+v, %v", a, err)
				}
			})
		}
		group.Wait()
		b.StopTimer()
		if ready := w.number(`SELECT count(*) FROM workspaces WHERE state = 'ready'`); ready != n+1 {
			b.Errorf("%d are ready", ready)
		}
		b.StartTimer()
	}
}
