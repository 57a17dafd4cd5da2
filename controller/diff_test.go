package controller_test

import (
	"context"
	"testing"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestDiffNeedsOneRunner: two checkpoints that are on different runners cannot be compared yet, and that is said; nor can one whose
// runner is away.
func TestDiffNeedsOneRunner(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	a, b := w.checkpoint(ws.ID), w.checkpoint(ws.ID)
	diff := func() error {
		_, err := w.Tree.Diff(t.Context(), w.project, a.ID, b.ID, controller.DiffPage{Limit: 10})
		return err
	}
	if err := diff(); err != nil {
		t.Fatal(err)
	}
	w.runner.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointDiff {
			return runnertest.ErrVanish
		}
		return nil
	})
	wantCode(t, diff(), core.CodeRunnerUnreachable)
	w.runner.Hook(nil)
	other := runnertest.Start(t, runnertest.Config{ID: core.NewID[core.RunnerID]()})
	if _, err := other.Announce(t.Context(), w.Fleet()); err != nil {
		t.Fatal(err)
	}
	w.sql(`UPDATE checkpoints SET runner_id = $1 WHERE id = $2`, other.ID(), b.ID)
	w.sql(`UPDATE checkpoint_copies SET runner_id = $1 WHERE checkpoint_id = $2`, other.ID(), b.ID)
	wantCode(t, diff(), core.CodeUnsupported)
}
