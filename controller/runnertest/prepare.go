package runnertest

import (
	"context"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/prepared"
	"github.com/coppice-dev/coppice/runner/prepared/forecast"
)

// preparing is the pool of prepared machines, which is that of a real runner. Its machines are numbers.
type preparing struct {
	pool *prepared.Pool[int64]
	end  func()
}

// prepare serves runnerapi.PathPrepared.
func (r *Runner) prepare(in runnerapi.Prepare) (runnerapi.Prepared, error) {
	r.mu.Lock()
	if r.preparing == nil {
		r.preparing = r.newPreparing()
	}
	pool := r.preparing.pool
	r.mu.Unlock()
	return pool.Serve(in)
}

func (r *Runner) newPreparing() *preparing {
	var made atomic.Int64
	ctx, cancel := context.WithCancel(context.Background())
	p := &preparing{pool: prepared.New(prepared.Config[int64]{
		Max: r.cfg.Prepare, Log: slog.New(slog.DiscardHandler), Now: time.Now,
		Make:     func(context.Context, forecast.Want) (int64, error) { return made.Add(1), nil },
		TakeDown: func(context.Context, int64) error { return nil },
		Used:     func(int64) float64 { return 0.5 },
		Memory:   func(int64) int64 { return 1 << 20 },
		Dead:     func(int64) bool { return false },
		Bound:    func(int64) bool { return true },
		Busy:     func() bool { return false },
		Room: func() (prepared.Room, error) {
			return prepared.Room{Memory: 1 << 40, Disk: 1, FreeSlots: 1 << 16, Slots: 1 << 16}, nil
		},
	})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		p.pool.Run(ctx)
	}()
	p.end = func() {
		cancel()
		<-ended
	}
	return p
}

// claim takes a prepared machine for a child. r.mu is held.
func (r *Runner) claim(from core.CheckpointID, child runnerapi.Child) {
	if r.preparing == nil {
		return
	}
	n, outcome, ok := r.preparing.pool.Take(from, child.CA, func(int64) bool { return true })
	if ok {
		outcome(true)
		r.claims = append(r.claims, n)
	}
}

// endPreparing takes all prepared machines down, as the successor of a killed runner does.
func (r *Runner) endPreparing() {
	r.mu.Lock()
	p := r.preparing
	r.preparing = nil
	r.mu.Unlock()
	if p != nil {
		p.end()
	}
}

// Claims are the numbers of the prepared machines that children took.
func (r *Runner) Claims() []int64 {
	r.mu.Lock()
	defer r.mu.Unlock()
	return append([]int64{}, r.claims...)
}

// Prepared is how many machines wait for forks of a checkpoint.
func (r *Runner) Prepared(id core.CheckpointID) int {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.preparing == nil {
		return 0
	}
	return r.preparing.pool.Ready(id)
}
