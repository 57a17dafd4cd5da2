package controller_test

import (
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/bootclock"
)

// TestSleepOfTheHost lets the leases of a controller run out while its host sleeps. It renews them at once. When the sleep came right after a renewal, so that it cannot know, it still claims nothing of its own.
func TestSleepOfTheHost(t *testing.T) {
	t.Parallel()
	for name, slept := range map[string]time.Duration{"before a renewal": time.Hour, "right after a renewal": 0} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var asleep atomic.Int64
			w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) {
				c.Clock = func() time.Duration { return bootclock.Now() + time.Duration(asleep.Load()) }
				if slept > 0 { // only the sleep makes a renewal due
					c.OperationLease = slept
				}
			})
			ws := w.create("main")
			g := w.gate(runnertest.PointCapture)
			a, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, 0)
			if err != nil {
				t.Fatal(err)
			}
			<-g.reached
			w.sql(`UPDATE operations SET lease_expires_at = now() - interval '1 s' WHERE id = $1`, a.Operation.ID)
			asleep.Store(int64(slept))
			eventually(t, "the lease is renewed", func() bool {
				return w.number(`SELECT count(*) FROM operations WHERE id = $1 AND lease_expires_at > now()`, a.Operation.ID) == 1
			})
			close(g.open)
			end, err := w.Operation(t.Context(), w.project, a.Operation.ID, wait)
			if err != nil || end.Operation.State != core.OperationSucceeded || end.Operation.LeaseEpoch != 1 {
				t.Errorf("the operation is %s by lease %d, %v; want it done by the first", end.Operation.State, end.Operation.LeaseEpoch, err)
			}
			if n := w.runner.Calls(runnertest.PointCapture); n != 1 {
				t.Errorf("the runner was asked %d times", n)
			}
			w.consistent()
		})
	}
}

// TestSleepBeforeSuspend lets a controller sleep just before it has a runner stop a machine. Another one has taken the operation
// over meanwhile and given the workspace back: the machine must not be stopped any more.
func TestSleepBeforeSuspend(t *testing.T) {
	t.Parallel()
	var asleep atomic.Int64
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) {
		c.LoopInterval = time.Hour // it renews nothing
		c.Clock = func() time.Duration { return bootclock.Now() + time.Duration(asleep.Load()) }
	})
	ws := w.create("main")
	g := w.hold(runnertest.PointCapture, runnertest.ErrVanish) // the controller asks again
	a, err := w.Suspend(t.Context(), w.project, ws.ID, 0)
	if err != nil {
		t.Fatal(err)
	}
	<-g.reached
	asleep.Store(int64(time.Minute))
	w.sql(`UPDATE operations SET state = 'failed', lease_epoch = 2, ended_at = now(), problem_category = 'x', problem_code = 'X', problem_message = 'x' WHERE id = $1`, a.Operation.ID)
	w.sql(`UPDATE checkpoints SET state = 'failed', ended_at = now(), failure_code = 'X', failure_message = 'x' WHERE state = 'capturing'`)
	w.sql(`UPDATE workspaces SET state = 'ready' WHERE id = $1`, ws.ID)
	close(g.open)
	w.stop()
	w.Controller, _ = w.start(controller.Config{LoopInterval: 50 * time.Millisecond})
	if n := w.runner.Calls(runnertest.PointCapture); n != 1 {
		t.Errorf("the runner was asked %d times", n)
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("the workspace is %s", got)
	}
	w.consistent()
}
