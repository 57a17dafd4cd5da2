package fleet

import (
	"context"
	"sync"
	"time"

	"golang.org/x/time/rate"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/request"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/pace"
)

// Most heartbeats are quiet: they only extend the lease. With a transaction for each of them, a thousand runners make PostgreSQL write its log to the
// disk 200 times a second, and the commits of forks wait for that. So the quiet heartbeats that arrive at a controller within a short time share one
// transaction (docs/SCALE.md).

const (
	quietWait  = 100 * time.Millisecond // how long the first of a batch waits for others, at most
	quietParts = 150                    // it waits at most for this part of a lease
	quietTime  = 5 * time.Second        // bounds the transaction
	maxQuiet   = 256                    // heartbeats in a batch
)

// QuietBeat is a quiet heartbeat.
type QuietBeat struct {
	ID core.RunnerID
	runnerapi.Heartbeat
}

// quietBatch is a set of heartbeats that share a transaction. What follows beats is set when done is closed.
type quietBatch struct {
	beats map[core.RunnerID]runnerapi.Heartbeat // guarded by quietBeats.mu until the batch is taken
	done  chan struct{}

	applied map[core.RunnerID]Order
}

// quietBeats collects batches.
type quietBeats struct {
	// mu guards next.
	mu   sync.Mutex
	next *quietBatch // nil: nothing waits

	report rate.Sometimes
}

// join adds a heartbeat to the next batch. The first must run the batch. It returns nil if there is no room, or a heartbeat of the same runner waits.
func (q *quietBeats) join(id core.RunnerID, h runnerapi.Heartbeat) (batch *quietBatch, first bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if first = q.next == nil; first {
		q.next = &quietBatch{beats: map[core.RunnerID]runnerapi.Heartbeat{}, done: make(chan struct{})}
	}
	if _, there := q.next.beats[id]; there || len(q.next.beats) >= maxQuiet {
		return nil, false
	}
	q.next.beats[id] = h
	return q.next, first
}

// take ends the collection of a batch.
func (q *quietBeats) take() []QuietBeat {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := make([]QuietBeat, 0, len(q.next.beats))
	for id, h := range q.next.beats {
		list = append(list, QuietBeat{ID: id, Heartbeat: h})
	}
	q.next = nil
	return list
}

// quiet says that a heartbeat needs nothing but its runner's row.
func (b *beat) quiet() bool {
	d := b.differences
	return d != nil && !d.AllSandboxes && !d.AllCheckpoints && !b.sumsDue() &&
		len(b.h.Sandboxes)+len(b.h.Checkpoints)+len(d.GoneCheckpoints)+len(b.h.Fetching)+len(b.usage)+len(b.h.DataKeys)+len(b.h.DataUsed)+len(b.h.DataWrites) == 0
}

// applyQuietly applies a quiet heartbeat together with others. It returns false if the heartbeat was not applied, or perhaps not. Then it must be
// applied alone, which also finds out why. A heartbeat that was applied after all is refused then, because of its number.
func (f *Fleet) applyQuietly(ctx context.Context, b *beat) (applied bool, err error) {
	batch, first := f.quiet.join(b.id, b.h)
	if batch == nil {
		return false, nil
	}
	if first && !f.cfg.Go(func(ctx context.Context) { f.runQuiet(ctx, batch) }) {
		f.runQuiet(ctx, batch) // the controller is stopping: nothing else waits for it
	}
	select {
	case <-batch.done:
	case <-ctx.Done():
		return false, ctx.Err()
	}
	order, applied := batch.applied[b.id]
	if applied {
		b.begin(order)
	}
	return applied, nil
}

// runQuiet waits for other heartbeats and applies the batch.
func (f *Fleet) runQuiet(ctx context.Context, batch *quietBatch) {
	defer close(batch.done)
	_ = pace.Pause(ctx, min(quietWait, f.cfg.Lease/quietParts)) // a controller that stops goes on at once
	list := f.quiet.take()
	ctx, cancel := context.WithTimeout(request.WithOrigin(ctx, request.Origin{Action: "heartbeat"}), quietTime)
	defer cancel()
	applied, err := read(ctx, f, func(tx Tx) (map[core.RunnerID]Order, error) { return tx.HeartbeatQuietRunners(ctx, list, f.terms()) })
	if err != nil {
		f.quiet.report.Do(func() {
			f.cfg.Log.WarnContext(ctx, "heartbeats could not be applied together; each is applied alone", "heartbeats", len(list), "err", err)
		})
		return
	}
	batch.applied = applied
}
