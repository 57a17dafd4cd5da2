package sealing

import (
	"slices"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/checkpoints"
)

// TestSealOrder: nothing is uploaded before its ancestors, unless those fail again and again.
func TestSealOrder(t *testing.T) {
	t.Parallel()
	now := time.Now()
	record := func(id, parent core.CheckpointID, age time.Duration) *checkpoints.Record {
		return &checkpoints.Record{Checkpoint: runnerapi.Checkpoint{ID: id, Parent: parent, CreatedAt: now.Add(-age)}}
	}
	list := []*checkpoints.Record{record("c", "b", 1), record("a", "", 3), record("b", "a", 2), record("x", "", 0)}
	q := newQueue(new(checkpoints.Store))
	next := func(want core.CheckpointID) {
		t.Helper()
		rec, wait := q.next(slices.Clone(list), now)
		if rec == nil && want == "" {
			if wait == 0 {
				t.Error("it says to wait for nothing")
			}
			return
		}
		if rec == nil || rec.ID != want {
			t.Fatalf("next is %+v, want %s", rec, want)
		}
	}
	next("a")
	q.later("a", now, false)
	next("x")
	q.done("x")
	next("")
	for range 6 { // what it lacks may take long
		q.later("a", now, true)
	}
	next("")
	q.arrived()
	next("a")
	q.later("a", now, false)
	next("b")
	q.done("b")
	next("c")
	q.forget("b")
	q.done("a")
	next("b")
}
