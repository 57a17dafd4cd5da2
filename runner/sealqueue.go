package runner

import (
	"context"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore"
)

// How long a checkpoint that could not be uploaded waits for its next turn.
const (
	firstSealRetry = time.Second
	lastSealRetry  = 2 * time.Minute
	givenUpSeal    = 30 * time.Second // what waits this long is not waited for by what grew from it

	lastCommitRetry = 4 * time.Second // the longest wait before a commit is repeated
)

// sealQueue is the checkpoints of this host that are not in the store yet. They are uploaded one after the other, ancestors first.
type sealQueue struct {
	wake   chan struct{}  // of size 1
	beside sync.WaitGroup // of rehearsals

	mu         sync.Mutex // guards what follows
	sealed     map[core.CheckpointID]bool
	retries    map[core.CheckpointID]sealRetry
	recent     []*snapshotstore.Snapshot // the last ones that were written or read: the next one's reference is likely among them
	rehearsing bool                      // one at a time
	runCtx     context.Context           // of Seal: a rehearsal outlives the attempt that has begun it
}

type sealRetry struct {
	at         time.Time
	wait       time.Duration
	incomplete bool // it was put back, see errIncomplete
}

func newSealQueue(s *checkpointStore) *sealQueue {
	q := &sealQueue{wake: make(chan struct{}, 1), sealed: make(map[core.CheckpointID]bool), retries: make(map[core.CheckpointID]sealRetry)}
	for _, rec := range s.list() {
		if _, err := os.Stat(s.path(rec.ID, sealedFile)); err == nil {
			q.sealed[rec.ID] = true
		}
	}
	return q
}

// poke says that there may be something to upload.
func (q *sealQueue) poke() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// next returns the oldest checkpoint that is due, and otherwise when to look again; zero for when something happens. An ancestor was
// captured before what grew from it.
func (q *sealQueue) next(list []*checkpointRecord, now time.Time) (*checkpointRecord, time.Duration) {
	q.mu.Lock()
	defer q.mu.Unlock()
	slices.SortFunc(list, func(a, b *checkpointRecord) int { return a.CreatedAt.Compare(b.CreatedAt) })
	waiting := make(map[core.CheckpointID]bool) // what is not sealed, and what grew from that
	var soonest time.Duration
	for _, rec := range list {
		if q.sealed[rec.ID] {
			continue
		}
		if waiting[rec.Parent] { // stored without it, all that it has stored already would be stored again
			waiting[rec.ID] = true
			continue
		}
		retry := q.retries[rec.ID]
		waiting[rec.ID] = retry.incomplete || retry.wait < givenUpSeal
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

func (q *sealQueue) done(id core.CheckpointID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.sealed[id] = true
	delete(q.retries, id)
}

func (q *sealQueue) later(id core.CheckpointID, now time.Time, incomplete bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	wait := min(max(2*q.retries[id].wait, firstSealRetry), lastSealRetry)
	q.retries[id] = sealRetry{now.Add(wait), wait, incomplete}
}

// arrived says that something is here which a checkpoint may have lacked: all have their turn.
func (q *sealQueue) arrived() {
	q.mu.Lock()
	for id, retry := range q.retries {
		retry.at = time.Time{}
		q.retries[id] = retry
	}
	q.mu.Unlock()
	q.poke()
}

func (q *sealQueue) isSealed(id core.CheckpointID) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.sealed[id]
}

func (q *sealQueue) forget(id core.CheckpointID) {
	q.mu.Lock()
	defer q.mu.Unlock()
	delete(q.sealed, id)
	delete(q.retries, id)
}

const keptSnapshots = 4

func (q *sealQueue) keep(s *snapshotstore.Snapshot) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.recent = append(q.recent, s)
	if len(q.recent) > keptSnapshots {
		q.recent = slices.Delete(q.recent, 0, 1)
	}
}
