package controller_test

import (
	"context"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/attest"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
)

// pool is a world with a second runner, and a store for both.
type pool struct {
	*world
	files  *dir.Store
	second *runnertest.Runner
}

func newPool(t testing.TB, options ...option) *pool {
	t.Helper()
	files, store := withStore(t)
	p := &pool{files: files, second: runnertest.Start(t, runnertest.Config{Store: files})}
	p.world = newWorld(t, append(options, store)...)
	p.join()
	return p
}

func (p *pool) join() {
	p.t.Helper()
	if _, err := p.second.Announce(p.t.Context(), p.Fleet()); err != nil {
		p.t.Fatal(err)
	}
}

// drain keeps new sandboxes away from a runner, or not.
func (p *pool) drain(r *runnertest.Runner, on bool) {
	p.t.Helper()
	if got, err := p.Fleet().Drain(p.t.Context(), r.ID(), on); err != nil || got.Draining != on {
		p.t.Fatal(got, err)
	}
}

func (p *pool) beatSecond() runnerapi.Heartbeated {
	p.t.Helper()
	beat := p.second.NextBeat(1)
	out, err := p.Fleet().Heartbeat(p.t.Context(), p.second.ID(), beat)
	if err != nil {
		p.t.Fatal(err)
	}
	p.second.Obey(beat, out)
	return out
}

// first makes a workspace on the first runner, with a sealed checkpoint.
func (p *pool) first(name string) (controller.Workspace, controller.Checkpoint) {
	p.t.Helper()
	p.drain(p.second, true)
	ws := p.create(name)
	cp := p.checkpoint(ws.ID)
	for _, id := range []core.CheckpointID{ws.Parent, cp.ID} {
		if p.get(id).State != core.CheckpointSealed {
			p.seal(p.files, id)
		}
	}
	p.drain(p.second, false)
	return ws, p.get(cp.ID)
}

func TestForkElsewhere(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ws, cp := p.first("a")
	if got := p.fork(cp.ID, 1); got[0].Sandbox.RunnerID != p.runner.ID() {
		t.Errorf("not where the bytes are: %s", got[0].Sandbox.RunnerID)
	}
	unsealed := p.checkpoint(ws.ID)
	p.drain(p.runner, true)
	_, err := p.ForkCheckpoint(t.Context(), p.project, unsealed.ID, controller.ForkRequest{Count: 1}, wait)
	wantCode(t, err, core.CodeNoRunner)
	if got := p.fork(cp.ID, 3); got[0].Sandbox.RunnerID != p.second.ID() || len(p.second.Sandboxes()) != 3 {
		t.Errorf("%+v", got)
	}
	// It names the manifest that it verified the bytes against; without that it is not believed.
	sealed := p.get(cp.ID)
	there := p.fork(cp.ID, 1)[0].ID
	if got := p.attested(there, 0).Statement.Predicate.Checkpoint; got.Manifest != sealed.Stored.Digest {
		t.Errorf("%+v, want the manifest %s", got, sealed.Stored.Digest)
	}
	p.second.Lie(func(a *attest.Predicate) { a.Checkpoint.Manifest = "" })
	_, err = p.ForkCheckpoint(t.Context(), p.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
	wantCode(t, err, core.CodeForkFailed)
	p.second.Lie(nil)
	p.end(there)
	// It is not told to drop what it has fetched, and is known to have it.
	if out := p.beatSecond(); len(out.DropCheckpoints) != 0 || p.number(`SELECT count(*) FROM checkpoint_copies WHERE checkpoint_id = $1`, cp.ID) != 2 {
		t.Errorf("%+v", out)
	}
	p.drain(p.runner, false)
	if got := p.fork(cp.ID, 1); got[0].Sandbox.RunnerID != p.runner.ID() { // both have it, the first has two sandboxes and the second three
		t.Errorf("not on the emptier one of those that hold it: %s", got[0].Sandbox.RunnerID)
	}
	// What grew there is captured there.
	p.drain(p.runner, true)
	own := p.checkpoint(p.fork(cp.ID, 1)[0].ID)
	if own.RunnerID != p.second.ID() {
		t.Errorf("captured on %s", own.RunnerID)
	}
	if got := p.fork(own.ID, 1); got[0].Sandbox.RunnerID != p.second.ID() {
		t.Errorf("grown on %s", got[0].Sandbox.RunnerID)
	}
	// What was captured on one and what was fetched there can be compared there.
	p.beatSecond()
	if _, err := p.Tree.Diff(t.Context(), p.project, cp.ID, own.ID, controller.DiffPage{Limit: 10}); err != nil || p.second.Calls(runnertest.PointDiff) != 1 {
		t.Errorf("diff: %v", err)
	}
	_, err = p.Tree.Diff(t.Context(), p.project, unsealed.ID, own.ID, controller.DiffPage{Limit: 10})
	wantCode(t, err, core.CodeUnsupported)
	// What it has lost it is not known for any more.
	p.second.LoseCheckpoints()
	p.beatSecond()
	if n := p.number(`SELECT count(*) FROM checkpoint_copies WHERE runner_id = $1`, p.second.ID()); n != 0 {
		t.Errorf("%d copies", n)
	}
}

func TestForkElsewhereWhenFull(t *testing.T) {
	t.Parallel()
	p := newPool(t, func(_ *controller.Config, r *runnertest.Config) { r.Capacity = runnerapi.Capacity{Sandboxes: 3} })
	_, cp := p.first("a")
	got := append(p.fork(cp.ID, 2), p.fork(cp.ID, 2)...)
	for i, w := range got {
		if want := []core.RunnerID{p.runner.ID(), p.second.ID()}[i/2]; w.Sandbox.RunnerID != want {
			t.Errorf("child %d is on %s", i, w.Sandbox.RunnerID)
		}
	}
}

// TestRestoreAndResumeElsewhere moves workspaces whose runner drains, by name: nothing moves by itself.
func TestRestoreAndResumeElsewhere(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ws, cp := p.first("a")
	asleep := p.fork(cp.ID, 1)[0]
	head := p.suspend(asleep.ID).Head
	p.seal(p.files, head)
	p.drain(p.runner, true)
	if back := p.resume(asleep.ID); back.Sandbox.RunnerID != p.second.ID() || back.State != core.WorkspaceReady {
		t.Errorf("resumed: %+v", back)
	}
	a, err := p.RestoreWorkspace(t.Context(), p.project, ws.ID, cp.ID, wait)
	if err != nil || a.Result.Workspace.Sandbox.RunnerID != p.second.ID() {
		t.Fatalf("restored: %+v, %v", a.Result.Workspace, err)
	}
	if n := len(p.runner.Sandboxes()); n != 0 {
		t.Errorf("%d sandboxes are left on the first runner", n)
	}
}

// TestTemplateOfAnotherRunner makes workspaces on a runner that never booted the image.
func TestTemplateOfAnotherRunner(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ws, _ := p.first("a")
	p.drain(p.runner, true)
	got := p.create("b")
	if got.Sandbox.RunnerID != p.second.ID() || got.Parent != ws.Parent || p.second.Calls(runnertest.PointTemplate) != 0 {
		t.Errorf("%+v, booted %d times", got, p.second.Calls(runnertest.PointTemplate))
	}
	// Where it cannot be fetched it is booted.
	p.second.LoseCheckpoints()
	if err := p.files.Delete(t.Context(), keys(t, p.files)...); err != nil {
		t.Fatal(err)
	}
	got = p.create("c")
	if got.Sandbox.RunnerID != p.second.ID() || got.Parent == ws.Parent || p.second.Calls(runnertest.PointTemplate) != 1 {
		t.Errorf("%+v, booted %d times", got, p.second.Calls(runnertest.PointTemplate))
	}
	if state := p.get(ws.Parent).State; state != core.CheckpointSealed {
		t.Errorf("the other template is %s", state)
	}
	// From then on it has its own.
	if next := p.create("d"); next.Parent != got.Parent {
		t.Errorf("made of %s, not %s", next.Parent, got.Parent)
	}
}

// TestDeleteWhileFetched deletes what a fork on another runner is being fetched for.
func TestDeleteWhileFetched(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	_, cp := p.first("a")
	p.drain(p.runner, true)
	fetching, goOn := make(chan struct{}), make(chan struct{})
	var once atomic.Bool
	p.second.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointFetch && once.CompareAndSwap(false, true) {
			close(fetching)
			<-goOn
		}
		return nil
	})
	done := make(chan error, 1)
	go func() {
		_, err := p.ForkCheckpoint(t.Context(), p.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
		done <- err
	}()
	<-fetching
	wantCode(t, p.DeleteCheckpoint(t.Context(), p.project, cp.ID), core.CodeCheckpointInUse)
	close(goOn)
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if err := p.DeleteCheckpoint(t.Context(), p.project, cp.ID); err != nil {
		t.Error(err)
	}
}

// TestLostWithItsRunner says of each workspace of a lost runner where its work can be taken up.
func TestLostWithItsRunner(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ws, cp := p.first("a")
	p.checkpoint(ws.ID) // which is nowhere else
	p.drain(p.second, true)
	fresh := p.create("fresh")
	p.drain(p.second, false)
	p.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 hour' WHERE id = $1`, p.runner.ID())
	eventually(t, "the workspaces are lost", func() bool { return p.state(ws.ID) == core.WorkspaceLost && p.state(fresh.ID) == core.WorkspaceLost })
	lost, err := p.Workspace(t.Context(), p.project, ws.ID)
	if err != nil || lost.Failure.Code != core.CodeRunnerLost || lost.Failure.RecoverFrom != cp.ID {
		t.Errorf("%+v, %v", lost.Failure, err)
	}
	if never, err := p.Workspace(t.Context(), p.project, fresh.ID); err != nil || never.Failure.RecoverFrom != "" {
		t.Errorf("of a workspace without a checkpoint: %+v, %v", never.Failure, err)
	}
	a, err := p.RestoreCheckpoint(t.Context(), p.project, lost.Failure.RecoverFrom, controller.ForkRequest{Name: "again"}, wait)
	if err != nil || a.Result.Workspace.Sandbox.RunnerID != p.second.ID() {
		t.Fatalf("%+v, %v", a.Result.Workspace, err)
	}
}

// TestSources grows a long chain and looks at what a runner is told of it.
func TestSources(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ws, cp := p.first("a")
	chain := []core.CheckpointID{ws.Parent, cp.ID}
	for range 70 {
		next := p.checkpoint(ws.ID)
		p.seal(p.files, next.ID)
		chain = append(chain, next.ID)
	}
	gone := chain[len(chain)-3]
	if err := p.DeleteCheckpoint(t.Context(), p.project, gone); err != nil {
		t.Fatal(err)
	}
	var got []core.CheckpointID
	err := p.store.InTx(t.Context(), controller.InProject(p.project), func(tx controller.AllTx) error {
		list, err := tx.Sources(t.Context(), chain[len(chain)-1])
		got = nil
		for _, s := range list {
			got = append(got, s.CheckpointID)
		}
		return err
	})
	slices.Reverse(chain)
	want := append(slices.DeleteFunc(chain[:63], func(id core.CheckpointID) bool { return id == gone }), ws.Parent)
	if err != nil || !slices.Equal(got, want) {
		t.Errorf("%d sources, %v:\n got %v\nwant %v", len(got), err, got, want)
	}
	peers := func() (out []core.RunnerID) {
		t.Helper()
		err := p.store.InTx(t.Context(), controller.InProject(p.project), func(tx controller.AllTx) error {
			cp, err := tx.Checkpoint(t.Context(), chain[0])
			if err != nil {
				return err
			}
			list, err := tx.Peers(t.Context(), cp)
			out = nil
			for _, peer := range list {
				if peer.Endpoint == "" {
					t.Errorf("%s has no endpoint", peer.RunnerID)
				}
				out = append(out, peer.RunnerID)
			}
			return err
		})
		if err != nil {
			t.Error(err)
		}
		return out
	}
	if got := peers(); !slices.Equal(got, []core.RunnerID{p.runner.ID()}) {
		t.Errorf("peers: %v", got)
	}
	p.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 second' WHERE id = $1`, p.runner.ID())
	if got := peers(); len(got) > 0 {
		t.Errorf("peers without a lease: %v", got)
	}
	p.sql(`UPDATE runners SET lease_expires_at = now() + interval '1 hour' WHERE id = $1`, p.runner.ID())
	p.drain(p.runner, true)
	start := time.Now()
	if w := p.fork(chain[0], 1)[0]; w.Sandbox.RunnerID != p.second.ID() {
		t.Errorf("%+v", w)
	}
	t.Logf("forked elsewhere in %s", time.Since(start))
}

// on counts the children of a fork that became ready on each runner, and those that did not.
func (p *pool) on(a controller.Answer) (first, second, failed int) {
	p.t.Helper()
	for _, child := range a.Result.Children {
		switch {
		case child.Problem != nil:
			failed++
		case child.Workspace.Sandbox.RunnerID == p.runner.ID():
			first++
		default:
			second++
		}
	}
	return first, second, failed
}

func TestForkSpread(t *testing.T) {
	t.Parallel()
	p := newPool(t, func(_ *controller.Config, r *runnertest.Config) { r.Capacity = runnerapi.Capacity{Sandboxes: 8} })
	ws, cp := p.first("a")
	p.sql(`UPDATE runners SET capacity = '{"sandboxes": 8}'`)
	fork := func(count int, even, together bool) (controller.Answer, error) {
		return p.ForkCheckpoint(t.Context(), p.project, cp.ID, controller.ForkRequest{Count: count, Spread: even, AllOrNothing: together}, wait)
	}
	end := func(a controller.Answer) {
		for _, child := range a.Result.Children {
			if child.Workspace != nil {
				p.end(child.Workspace.ID)
			}
		}
	}
	_, err := p.ForkCheckpoint(t.Context(), p.project, p.checkpoint(ws.ID).ID, controller.ForkRequest{Count: 2, Spread: true}, wait)
	wantCode(t, err, core.CodeCheckpointNotReady)
	a, err := fork(7, true, false)
	if first, second, failed := p.on(a); err != nil || first != 3 || second != 4 || failed != 0 {
		t.Errorf("even: %d, %d, %d, %v", first, second, failed, err)
	}
	end(a)
	a, err = fork(10, false, false) // seven have room on the first
	if first, second, failed := p.on(a); err != nil || first != 7 || second != 3 || failed != 0 {
		t.Errorf("more than there is room for: %d, %d, %d, %v", first, second, failed, err)
	}
	names := map[string]bool{}
	for i, child := range a.Result.Children {
		names[child.Workspace.Name] = true
		if i > 0 && child.Workspace.ID < a.Result.Children[i-1].Workspace.ID {
			t.Error("the children are not in their order")
		}
	}
	if len(names) != 10 {
		t.Errorf("names: %v", names)
	}
	end(a)
	_, err = fork(16, false, false)
	wantCode(t, err, core.CodeCapacity)
	// One runner refuses its share: the others' children are there, unless all are to be.
	p.second.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointFork {
			return core.Errorf(core.Exhausted, core.CodeDiskFull, "no room on the disk")
		}
		return nil
	})
	a, err = fork(4, true, false)
	if first, second, failed := p.on(a); err != nil || first != 1 || second != 0 || failed != 3 {
		t.Errorf("with one that refuses: %d, %d, %d, %v", first, second, failed, err)
	}
	for _, child := range a.Result.Children {
		if child.Problem != nil && child.Problem.Code != core.CodeDiskFull {
			t.Errorf("%+v", child.Problem)
		}
	}
	end(a)
	_, err = fork(4, true, true)
	wantCode(t, err, core.CodeForkFailed)
	eventually(t, "only the parent is left", func() bool { return len(p.runner.Sandboxes()) == 1 && len(p.second.Sandboxes()) == 0 })
	// One vanishes after it has done its part: nobody knows, so its children have failed and are taken down.
	p.second.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointFork+runnertest.Done {
			return runnertest.ErrVanish
		}
		return nil
	})
	a, err = fork(4, true, false)
	if first, second, failed := p.on(a); err != nil || first != 1 || second != 0 || failed != 3 {
		t.Errorf("with one that vanishes: %d, %d, %d, %v", first, second, failed, err)
	}
	p.second.Hook(nil)
	end(a)
	p.beatSecond()
	eventually(t, "only the parent is left", func() bool { return len(p.runner.Sandboxes()) == 1 && len(p.second.Sandboxes()) == 0 })
	p.consistent()
}
