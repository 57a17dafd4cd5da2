package sealing

import (
	"context"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/snapshotstore"
)

// How long a checkpoint that could not be uploaded waits for its next turn.
const (
	firstRetry = time.Second
	lastRetry  = 2 * time.Minute
	givenUp    = 30 * time.Second // after this wait of a checkpoint, those that descend from it no longer wait for it

	lastCommitRetry = 4 * time.Second // the longest wait before a commit is repeated
)

// queue has the checkpoints of this host that are not in the store yet. They are uploaded one after the other, ancestors first.
type queue struct {
	wake   chan struct{}  // of size 1
	beside sync.WaitGroup // of rehearsals

	mu         sync.Mutex // guards what follows
	sealed     map[core.CheckpointID]bool
	retries    map[core.CheckpointID]pause
	recent     []*snapshotstore.Snapshot // the snapshots that were written or read last: the reference of the next one is probably among them
	rehearsing bool                      // one at a time
	runCtx     context.Context           // the context of Run: a rehearsal may last longer than the attempt that began it
}

type pause struct {
	at         time.Time
	wait       time.Duration
	incomplete bool // it was put back, see errIncomplete
}

func newQueue(s *checkpoints.Store) *queue {
	q := &queue{wake: make(chan struct{}, 1), sealed: make(map[core.CheckpointID]bool), retries: make(map[core.CheckpointID]pause)}
	for _, rec := range s.List() {
		if _, err := os.Stat(s.Path(rec.ID, checkpoints.SealedFile)); err == nil {
			q.sealed[rec.ID] = true
		}
	}
	return q
}

// poke wakes Run, because there may be something to upload.
func (q *queue) poke() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// next returns the oldest checkpoint that is due. If there is none, it returns when to look again; zero means when something happens. A
// checkpoint is always older than those that descend from it.
func (q *queue) next(list []*checkpoints.Record, now time.Time) (*checkpoints.Record, time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	slices.SortFunc(list, func(a, b *checkpoints.Record) int { return a.CreatedAt.Compare(b.CreatedAt) })
	waiting := make(map[core.CheckpointID]bool) // checkpoints that are not sealed, and those that descend from them
	var soonest time.Duration
	for _, rec := range list {
		if q.sealed[rec.ID] {
			continue
		}
		if waiting[rec.Parent] { // if this one were stored first, all bytes of its ancestor would be stored twice
			waiting[rec.ID] = true
			continue
		}
		retry := q.retries[rec.ID]
		waiting[rec.ID] = retry.incomplete || retry.wait < givenUp
		wait := retry.at.Sub(now)
		if wait <= 0 {
			return rec, 0
		}
		if soonest == 0 || wait < soonest {
			soonest = wait
		}
	}
	return nil, soonest
}

func (q *queue) done(id core.CheckpointID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sealed[id] = true
	delete(q.retries, id)
}

func (q *queue) later(id core.CheckpointID, now time.Time, incomplete bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	wait := min(max(2*q.retries[id].wait, firstRetry), lastRetry)
	q.retries[id] = pause{now.Add(wait), wait, incomplete}
}

// arrived says that something has arrived that an incomplete checkpoint may need, so all of them are tried again.
func (q *queue) arrived() {
	q.mu.Lock()
	for id, retry := range q.retries {
		retry.at = time.Time{}
		q.retries[id] = retry
	}
	q.mu.Unlock()
	q.poke()
}

func (q *queue) isSealed(id core.CheckpointID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sealed[id]
}

func (q *queue) forget(id core.CheckpointID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.sealed, id)
	delete(q.retries, id)
}
