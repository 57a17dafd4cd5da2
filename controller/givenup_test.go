package controller_test

import (
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestRestoreOnRunnerGivenUp: a restore whose runner is given up says so, so that a client repeats it.
func TestRestoreOnRunnerGivenUp(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	g := w.gate(runnertest.PointFork + runnertest.Done)
	answered := make(chan error, 1)
	go func() {
		_, err := w.RestoreCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1, Name: "again"}, wait)
		answered <- err
	}()
	<-g.reached
	if err := w.Fleet().Remove(t.Context(), w.runner.ID(), true); err != nil {
		t.Fatal(err)
	}
	close(g.open)
	err := <-answered
	wantCode(t, err, core.CodeRunnerLost)
	if core.CategoryOf(err) != core.Unavailable {
		t.Errorf("it is %s", core.CategoryOf(err))
	}
}
