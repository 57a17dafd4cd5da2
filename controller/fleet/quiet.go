package fleet

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"
	"unicode/utf8"

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
	quietWait    = 100 * time.Millisecond // how long the first of a batch waits for others, at most
	quietParts   = 150                    // it waits at most for this part of a lease
	maxQuiet     = 256                    // heartbeats in a batch
	maxQuietText = 4096                   // bytes of text in a heartbeat
)

// QuietBeat is a quiet heartbeat. Of Info it has only what a heartbeat writes to the runner's row.
type QuietBeat struct {
	ID core.RunnerID
	runnerapi.Heartbeat
}

// quietBatch is a set of heartbeats that share a transaction.
type quietBatch struct {
	beats map[core.RunnerID]QuietBeat // guarded by quietBeats.mu
	done  chan struct{}
	// applied has the results. It is read after done is closed; nil: the transaction failed.
	applied map[core.RunnerID]Order
}

// quietBeats collects batches.
type quietBeats struct {
	// mu guards next.
	mu   sync.Mutex
	next *quietBatch // nil: nothing waits

	report rate.Sometimes
}

// join adds a heartbeat to the next batch. Whoever is the first must run the batch. It returns nil if the batch is full, or has a heartbeat of the same runner.
func (q *quietBeats) join(b QuietBeat) (batch *quietBatch, first bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if first = q.next == nil; first {
		q.next = &quietBatch{beats: map[core.RunnerID]QuietBeat{}, done: make(chan struct{})}
	}
	if _, there := q.next.beats[b.ID]; there || len(q.next.beats) >= maxQuiet {
		return nil, false
	}
	q.next.beats[b.ID] = b
	return q.next, first
}

// take ends the collection of a batch.
func (q *quietBeats) take() []QuietBeat {
	q.mu.Lock()
	defer q.mu.Unlock()
	list := slices.Collect(maps.Values(q.next.beats))
	q.next = nil
	return list
}

// quiet says whether a heartbeat needs nothing but its runner's row. Texts that are long, or that PostgreSQL refuses, would harm the others of a batch.
func (b *beat) quiet() bool {
	d, texts := b.differences, b.h.Info.KVM+b.h.Info.EgressURL
	return d != nil && !d.AllSandboxes && !d.AllCheckpoints && !b.sumsDue() &&
		len(b.h.Sandboxes)+len(b.h.Checkpoints)+len(d.GoneCheckpoints)+len(b.h.Fetching)+len(b.usage)+len(b.h.DataKeys)+len(b.h.DataUsed)+len(b.h.DataWrites) == 0 &&
		len(texts)+len(b.h.Info.EgressKey) <= maxQuietText && !strings.Contains(texts, "\x00") && utf8.ValidString(texts)
}

// applyQuietly applies a quiet heartbeat together with others. It returns false if the heartbeat was not applied, or if that is not known. The caller
// then applies it alone. If the batch was committed after all, that is refused as stale, and the runner sends a whole list.
func (f *Fleet) applyQuietly(ctx context.Context, b *beat) (applied bool, err error) {
	h, info := b.h, b.h.Info
	batch, first := f.quiet.join(QuietBeat{ID: b.id, Heartbeat: runnerapi.Heartbeat{
		LeaseEpoch: h.LeaseEpoch, Number: h.Number, Answered: h.Answered,
		Info: runnerapi.Info{
			StartedAt: info.StartedAt, Capacity: info.Capacity, Allocated: info.Allocated, DiskFreeMB: info.DiskFreeMB,
			KVM: info.KVM, EgressKey: info.EgressKey, EgressURL: info.EgressURL,
		},
	}})
	if batch == nil {
		return false, nil
	}
	if first && !f.cfg.Go(func(ctx context.Context) { f.runQuiet(ctx, batch) }) {
		f.runQuiet(context.WithoutCancel(ctx), batch) // the controller is stopping, and begins no more work of its own
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
	_ = pace.Pause(ctx, min(quietWait, f.cfg.Lease/quietParts)) // if the context ends, the transaction fails, and each heartbeat is applied alone
	list := f.quiet.take()
	ctx = request.WithOrigin(ctx, request.Origin{Action: "heartbeat"})
	applied, err := read(ctx, f, func(tx Tx) (map[core.RunnerID]Order, error) { return tx.HeartbeatQuietRunners(ctx, list, f.terms()) })
	if err == nil {
		batch.applied = applied
	} else if ctx.Err() == nil {
		f.quiet.report.Do(func() {
			f.cfg.Log.WarnContext(ctx, "heartbeats could not be applied together; each is applied alone", "heartbeats", len(list), "err", err)
		})
	}
}
