package report

import (
	"errors"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// Together runs a function n times at once and collects its measurements.
func Together(n int, run func(n int) (Samples, error)) (Samples, error) {
	var mu sync.Mutex // guards what follows
	var all Samples
	var failed error
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() {
			got, err := run(i)
			mu.Lock()
			defer mu.Unlock()
			all.Add(got...)
			failed = errors.Join(failed, err)
		})
	}
	group.Wait()
	return all, failed
}

// Sustained has several clients do something again and again for as long as that.
func Sustained(clients int, long time.Duration, do func() (float64, error)) (Samples, error) {
	start := time.Now()
	return Together(clients, func(int) (Samples, error) {
		var mine Samples
		for time.Since(start) < long {
			took, err := do()
			if err != nil {
				return nil, err
			}
			mine.Add(took)
		}
		return mine, nil
	})
}

// Since returns the time since t in milliseconds.
func Since(t time.Time) float64 { return core.Milliseconds(time.Since(t)) }
