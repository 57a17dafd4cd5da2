// Package sweep bounds periodic work on many rows: work is done in batches, each in a transaction of
// its own, and stops when its time is over. The next run continues. It knows no rows.
package sweep

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"
)

// The budgets of what one controller sweeps for all. The queue library cancels a periodic job after 30 seconds.
const (
	walkTime  = 15 * time.Second // a walk stops after this time, and continues from there the next time
	partsTime = 24 * time.Second // of all parts of a periodic job; each has its share
)

// Marks are the places where walks continue. The zero value is ready. It is safe for concurrent use.
type Marks struct {
	// mu guards at.
	mu sync.Mutex
	at map[string]string
}

func (m *Marks) get(name string) string {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.at[name]
}

func (m *Marks) set(name, at string) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.at == nil {
		m.at = map[string]string{}
	}
	m.at[name] = at
}

// Walk looks at all rows of a kind, batch by batch. step runs a transaction for the rows after one, and returns the last row that it has
// looked at, or none at the end. A walk that takes too long or fails continues from there the next time, so that each row is looked at.
func (m *Marks) Walk(ctx context.Context, name string, step func(ctx context.Context, after string) (last string, err error)) error {
	until := time.Now().Add(walkTime)
	for {
		last, err := step(ctx, m.get(name))
		if err != nil {
			return err
		}
		if m.set(name, last); last == "" || !time.Now().Before(until) {
			return nil
		}
	}
}

// Part is one part of a periodic job.
type Part struct {
	Name string
	Do   func(ctx context.Context) error
}

// Parts runs the parts of a periodic job, each for a bounded time. One that fails does not stop the others; failed hears its name.
func Parts(ctx context.Context, failed func(name string), list ...Part) error {
	var errs []error
	for _, p := range list {
		limited, cancel := context.WithTimeout(ctx, partsTime/time.Duration(len(list)))
		err := p.Do(limited)
		cancel()
		if err != nil {
			failed(p.Name)
			errs = append(errs, fmt.Errorf("%s: %w", p.Name, err))
		}
	}
	return errors.Join(errs...)
}

// Batches repeats a transaction that does at most limit things. It stops when a transaction does
// fewer, or when half of the time is over. The other half is left for the last transaction. The
// next run does the rest.
func Batches(ctx context.Context, limit int, do func(context.Context) (int, error)) error {
	until := time.Now().Add(walkTime)
	if deadline, ok := ctx.Deadline(); ok {
		until = time.Now().Add(time.Until(deadline) / 2)
	}
	for {
		n, err := do(ctx)
		if err != nil || n < limit || !time.Now().Before(until) {
			return err
		}
	}
}
