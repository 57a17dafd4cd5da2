package controller_test

import (
	"context"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestFaultIsNoRefusal: a runner that has a fault of its own has not refused the rules that it was given. It is given the same
// rules again, and never less, so a workspace does not lose its egress to the full disk of a host.
func TestFaultIsNoRefusal(t *testing.T) {
	t.Parallel()
	for _, category := range []core.Category{core.Internal, core.Unavailable, core.Exhausted, core.FailedPrecondition, core.PermissionDenied, core.DataLoss} {
		t.Run(string(category), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t)
			ws := w.createAllowing("a", "a.example")
			var failing atomic.Bool
			failing.Store(true)
			w.runner.Hook(func(_ context.Context, point, _ string) error {
				if point == runnertest.PointRules && failing.Swap(false) { // once: what follows is taken
					return core.Errorf(category, "SOME_FAULT", "the disk is full")
				}
				return nil
			})
			var mu sync.Mutex
			var given []runnerapi.EgressRules
			w.runner.RefuseRules(ws.Sandbox.ID, func(r runnerapi.EgressRules) bool {
				mu.Lock()
				defer mu.Unlock()
				given = append(given, r)
				return false
			})
			w.mustAllow(ws.ID, "a.example", "b.example")
			w.wantRules(ws.ID, "a.example", "b.example")
			mu.Lock()
			defer mu.Unlock()
			for _, r := range given {
				if len(r.Allow) != 2 {
					t.Errorf("after a fault the runner was given %q", r.Allow)
				}
			}
		})
	}
}
