package runner

import (
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
)

// forest is a tree that one runner has sealed, root last.
func (p *pool) forest(a *fakeRig, n int) (ids []core.CheckpointID, root core.CheckpointID) {
	p.t.Helper()
	root = a.boot()
	s := a.fork(root)
	for range n {
		ids = append(ids, a.capture(s))
	}
	p.sealed(p.t, append(ids, root)...)
	return ids, root
}

func (p *pool) forkFrom(r *fakeRig, id, root core.CheckpointID) core.SandboxID {
	p.t.Helper()
	sources := p.sources(id, root)
	if id == root {
		sources = p.sources(root)
	}
	child := r.child()
	out, err := r.Fork(p.t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{child}, Sources: sources})
	if err != nil || out.Children[0].Problem != nil {
		p.t.Fatalf("%+v, %v", out, err)
	}
	return child.SandboxID
}

func (r *fakeRig) has(id core.CheckpointID) bool {
	_, err := r.Checkpoint(id)
	return err == nil
}

// TestCopiesModel forks, captures and destroys at random on a runner that has no room for what it fetches: every fork succeeds, what is in
// use and what was captured here stays, and at last nothing else is left.
func TestCopiesModel(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a := p.runner(nil)
	b := newFakeRig(t, func(c *Config) { c.Store.Blobs, c.Store.Copies, c.Rebase.Off = p.blobs, 1, true })
	stop := p.seal(b)
	ids, root := p.forest(a, 4)
	random := rand.New(rand.NewPCG(5, 2))
	forkedFrom := map[core.SandboxID]core.CheckpointID{}
	var sandboxes []core.SandboxID
	var own []core.CheckpointID
	destroy := func(i int) {
		t.Helper()
		if err := b.Destroy(t.Context(), sandboxes[i]); err != nil {
			t.Fatal(err)
		}
		sandboxes = slices.Delete(sandboxes, i, i+1)
	}
	trim := func() {
		t.Helper()
		if err := b.fetches.Trim(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	for range 80 {
		switch n := random.IntN(10); {
		case n < 5 && len(sandboxes) < 4:
			id := append(slices.Clone(ids), root)[random.IntN(len(ids)+1)]
			s := p.forkFrom(b, id, root)
			sandboxes, forkedFrom[s] = append(sandboxes, s), id
		case n < 6 && len(sandboxes) > 0:
			own = append(own, b.capture(sandboxes[random.IntN(len(sandboxes))]))
		case n < 8 && len(sandboxes) > 0:
			destroy(random.IntN(len(sandboxes)))
		default:
			trim()
		}
		for _, s := range sandboxes {
			if len(own) == 0 && !b.has(forkedFrom[s]) {
				t.Fatalf("checkpoint %s is gone under its sandbox", forkedFrom[s])
			}
		}
		for _, id := range own {
			if !b.has(id) {
				t.Fatalf("checkpoint %s, which was captured here, is gone", id)
			}
		}
	}
	for len(sandboxes) > 0 {
		destroy(0)
	}
	p.sealed(t, own...)
	stop() // it knows, too
	trim()
	bases := map[core.BaseID]bool{}
	for _, id := range own {
		rec, err := b.checkpoints.Get(id)
		if err != nil {
			t.Fatal(err)
		}
		bases[rec.Base] = true
	}
	for _, rec := range b.checkpoints.List() {
		if rec.Fetched && (rec.HasDelta() || !bases[rec.Base]) {
			t.Errorf("%s is left", rec.ID)
		}
	}
	eventually.True(t, "there is a directory for each checkpoint, and no other", func() bool { // the runner may be giving one up by itself
		entries, err := os.ReadDir(b.checkpoints.Dir())
		if err != nil {
			t.Fatal(err)
		}
		return len(entries) == len(b.checkpoints.List())
	})
	for _, id := range ids {
		p.forkFrom(b, id, root)
		wantSame(t, a, b, id)
	}
}

// TestCopiesOldestFirst gives up what was used longest ago, and the base of others not at all.
func TestCopiesOldestFirst(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a, b := p.runner(nil), p.runner(func(c *Config) { c.Rebase.Off = true })
	ids, root := p.forest(a, 3)
	for _, id := range append(ids, ids[0]) {
		if err := b.Destroy(t.Context(), p.forkFrom(b, id, root)); err != nil {
			t.Fatal(err)
		}
	}
	for _, want := range []core.CheckpointID{ids[1], ids[2], ids[0], root} {
		got, over := b.fetches.LeastUsed(1)
		if !over || got != want {
			t.Fatalf("%s goes next, %t; want %s", got, over, want)
		}
		if gone, err := b.checkpoints.GiveUp(got); !gone || err != nil {
			t.Fatalf("%t, %v", gone, err)
		}
	}
	if id, over := b.fetches.LeastUsed(1); id != "" || over {
		t.Errorf("%s, %t", id, over)
	}
	if bases, err := b.bases.List(); err != nil || len(bases) > 0 {
		t.Errorf("%v are left, %v", bases, err)
	}
}

// TestCopiesRace forks while what is forked is given up again and again.
func TestCopiesRace(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a, b := p.runner(nil), p.runner(func(c *Config) { c.Rebase.Off = true })
	ids, root := p.forest(a, 2)
	done := make(chan struct{})
	var forking, giving sync.WaitGroup
	for i := range 3 {
		children := make([]runnerapi.Child, 8)
		for j := range children {
			children[j] = b.child()
		}
		forking.Go(func() {
			id := ids[i%2]
			for _, child := range children {
				out, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: id, Children: []runnerapi.Child{child}, Sources: p.sources(id, root)})
				if err != nil || out.Children[0].Problem != nil {
					t.Errorf("%+v, %v", out, err)
				}
				if err := b.Destroy(t.Context(), child.SandboxID); err != nil {
					t.Error(err)
				}
			}
		})
	}
	gone := 0
	giving.Go(func() {
		for {
			for _, id := range append(ids, root) {
				ok, err := b.checkpoints.GiveUp(id)
				if err != nil {
					t.Error(err)
				}
				if ok {
					gone++
				}
			}
			select {
			case <-done:
				return
			default:
			}
		}
	})
	forking.Wait()
	close(done)
	giving.Wait()
	if gone == 0 {
		t.Error("nothing was given up")
	}
}
