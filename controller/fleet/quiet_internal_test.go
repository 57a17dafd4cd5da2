package fleet

import (
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// TestBatchesAreBounded: a batch has one heartbeat of each runner, and not more than maxQuiet. The next batch begins when it was taken.
func TestBatchesAreBounded(t *testing.T) {
	t.Parallel()
	var q quietBeats
	for round := range 2 {
		for i := range maxQuiet + 10 {
			id := core.NewID[core.RunnerID]()
			batch, first := q.join(id, runnerapi.Heartbeat{})
			if first != (i == 0) || (batch != nil) != (i < maxQuiet) {
				t.Fatalf("round %d: runner %d: first: %v, in the batch: %v", round, i, first, batch != nil)
			}
			if again, first := q.join(id, runnerapi.Heartbeat{}); again != nil || first {
				t.Fatal("two heartbeats of a runner in one batch")
			}
		}
		if list := q.take(); len(list) != maxQuiet {
			t.Fatalf("%d heartbeats", len(list))
		}
	}
}
