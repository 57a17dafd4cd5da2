package controller

import (
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
)

// TestStartingEnds: an operation that was not inserted is not kept as one that starts, although its task has no row.
func TestStartingEnds(t *testing.T) {
	t.Parallel()
	c := &Controller{starting: map[core.OperationID]bool{}, cfg: Config{Clock: func() time.Duration { return 0 }}}
	task := &Task{c: c}
	for _, id := range []core.OperationID{"op_1", "op_2"} { // the identity of the first was taken
		c.starts(task, id)
		task.op = Operation{} // as the store leaves it when it fails
	}
	c.started(task)
	if left := c.atWork(); len(left) > 0 {
		t.Errorf("%v are kept as at work", left)
	}
}
