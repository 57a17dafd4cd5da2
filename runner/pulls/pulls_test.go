package pulls

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
)

// TestPull follows one pull by repeated requests: it runs once, whoever asks, and ends when nobody does.
func TestPull(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var runs, ended atomic.Int64
		finish := make(chan error)
		p := New(func(ctx context.Context, in runnerapi.Pull, report func(runnerapi.PullState)) (runnerapi.PullState, error) {
			runs.Add(1)
			defer ended.Add(1)
			report(runnerapi.PullState{Stage: runnerapi.PullFetching, Layers: 3, LayersDone: 1})
			select {
			case err := <-finish:
				return runnerapi.PullState{Image: "made of " + core.Digest(in.Reference)}, err
			case <-ctx.Done():
				return runnerapi.PullState{}, ctx.Err()
			}
		})
		defer p.Close()
		ask := func(id core.OperationID) (runnerapi.PullState, error) {
			state, err := p.Pull(id, runnerapi.Pull{Reference: "app"})
			synctest.Wait()
			return state, err
		}
		first, second := core.NewID[core.OperationID](), core.NewID[core.OperationID]()
		if s, err := ask(first); err != nil || s.Stage != runnerapi.PullWaiting {
			t.Errorf("begun: %+v, %v", s, err)
		}
		for range 3 { // longer than the patience in all
			time.Sleep(patience / 2)
			if s, err := ask(first); err != nil || s.LayersDone != 1 || s.Done || runs.Load() != 1 {
				t.Errorf("asked again: %+v, %v, %d runs", s, err, runs.Load())
			}
		}
		finish <- nil
		synctest.Wait()
		if s, err := ask(first); err != nil || !s.Done || s.Image != "made of app" {
			t.Errorf("done: %+v, %v", s, err)
		}
		if _, err := ask(second); err != nil {
			t.Error(err)
		}
		finish <- errors.New("refused")
		synctest.Wait()
		for range 2 {
			if _, err := ask(second); err == nil || err.Error() != "refused" {
				t.Errorf("failed: %v", err)
			}
		}
		if _, err := ask(core.NewID[core.OperationID]()); err != nil {
			t.Error(err)
		}
		time.Sleep(patience + time.Second) // nobody asks
		synctest.Wait()
		if ended.Load() != 3 || len(p.byID) != 0 {
			t.Errorf("%d of %d pulls have ended, %d are known", ended.Load(), runs.Load(), len(p.byID))
		}
	})
}

// TestPullBounds: a runner has few pulls, runs fewer at once, and ends all of them when it ends.
func TestPullBounds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		var running atomic.Int64
		p := New(func(ctx context.Context, _ runnerapi.Pull, _ func(runnerapi.PullState)) (runnerapi.PullState, error) {
			running.Add(1)
			<-ctx.Done()
			return runnerapi.PullState{}, ctx.Err()
		})
		for range maxPulls {
			if _, err := p.Pull(core.NewID[core.OperationID](), runnerapi.Pull{}); err != nil {
				t.Fatal(err)
			}
		}
		synctest.Wait()
		if n := running.Load(); n != Parallel {
			t.Errorf("%d run at once", n)
		}
		if _, err := p.Pull(core.NewID[core.OperationID](), runnerapi.Pull{}); core.CodeOf(err) != core.CodeCapacity {
			t.Errorf("one more: %v", err)
		}
		if _, err := p.Pull("../x", runnerapi.Pull{}); core.CategoryOf(err) != core.Invalid {
			t.Errorf("an id that is none: %v", err)
		}
		p.Close()
		if _, err := p.Pull(core.NewID[core.OperationID](), runnerapi.Pull{}); core.CategoryOf(err) != core.Unavailable {
			t.Errorf("after the end: %v", err)
		}
	})
	if _, err := (*Pulls)(nil).Pull(core.NewID[core.OperationID](), runnerapi.Pull{}); core.CodeOf(err) != core.CodeUnsupported {
		t.Errorf("a runner without pulls: %v", err)
	}
}
