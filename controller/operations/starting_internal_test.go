package operations

import (
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// TestStartingEnds: an operation that was not inserted is not kept as one that starts, although its task has no row.
func TestStartingEnds(t *testing.T) {
	t.Parallel()
	e := &Engine[Tx, int]{starting: map[core.OperationID]bool{}, cfg: Config[Tx, int]{Clock: func() time.Duration { return 0 }}}
	task := &Task[Tx, int]{e: e}
	for _, id := range []core.OperationID{"op_1", "op_2"} { // the identity of the first was taken
		e.starts(task, id)
		task.op = Operation{} // as the store leaves it when it fails
	}
	e.started(task)
	if left := e.atWork(); len(left) > 0 {
		t.Errorf("%v are kept as at work", left)
	}
}
