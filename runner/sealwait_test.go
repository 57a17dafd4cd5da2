package runner

import (
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/pager"
)

// has reports whether checkpoints are sealed. The caller holds the ledger's mu.
func (l *ledger) has(id core.CheckpointID) bool {
	_, there := l.stored[id]
	return there
}

// memoryArrives has the memory of a checkpoint be incomplete, as far as the runner knows, and returns the image's id.
func memoryArrives(t *testing.T, r *fakeRig, id core.CheckpointID) string {
	t.Helper()
	base := string(r.recordOf(t, id).Base)
	r.arrives(&lazy.Image{Image: pager.Image{ID: base}})
	return base
}

// TestSealOthers: a checkpoint whose memory is still coming holds up what descends from it, and nothing else, and is sealed when it is whole.
func TestSealOthers(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	r, pages := newPagerRig(t, func(c *Config) { c.Store.Blobs = p.blobs })
	slow := r.boot()
	child := r.capture(r.fork(slow))
	other := r.boot()
	im := memoryArrives(t, r, slow)
	p.seal(r)
	p.sealed(t, other)
	p.mu.Lock()
	if p.has(slow) || p.has(child) || p.attempts[slow]+p.attempts[child] > 0 {
		t.Errorf("what is not whole was sealed: attempts %v", p.attempts)
	}
	p.mu.Unlock()
	pages.Complete(im)
	p.sealed(t, slow, child)
}

// TestSealKeyUnavailable: the controller is told why a checkpoint is not sealed whose memory the pager has no key for, and others are sealed.
func TestSealKeyUnavailable(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	r, pages := newPagerRig(t, func(c *Config) { c.Store.Blobs = p.blobs })
	closed, other := r.boot(), r.boot()
	im := memoryArrives(t, r, closed)
	pages.Restart(runnerapi.ProblemOf(core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable, "object x is encrypted, and its key is not here")))
	eventually.True(t, "the pager has refused the image", func() bool {
		_, problem := r.lazy.Missing(im)
		return core.CodeOf(problem) == core.CodeKeyUnavailable
	})
	p.seal(r)
	p.sealed(t, other)
	p.wait(t, "the problem is told", func() bool { return len(p.failed) > 0 && p.failed[0].Code == core.CodeKeyUnavailable })
	pages.Take()
	r.lazy.Wake()
	eventually.True(t, "the pager has taken the image", func() bool {
		_, problem := r.lazy.Missing(im)
		return problem == nil
	})
	pages.Complete(im)
	p.sealed(t, closed)
}

// TestSealBesideRehearsal: a rehearsal that has to wait holds up its own template and nothing else.
func TestSealBesideRehearsal(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	process := &pager.Process{Dir: t.TempDir(), Command: []string{"/bin/false"}} // the rehearsal fails in the end
	r := newFakeRig(t, func(c *Config) { c.Store.Blobs, c.Store.Pager = p.blobs, process })
	rehearsed, known := r.boot(), r.boot()
	rec, err := r.checkpoints.Get(known)
	if err != nil {
		t.Fatal(err)
	}
	r.lazy.WorkingSets.SetRehearsed(rec.Base, nil)
	child := r.capture(r.fork(known))
	for range cap(r.starting) { // no machine can be started
		r.starting <- struct{}{}
	}
	p.seal(r)
	p.sealed(t, known, child)
	p.mu.Lock()
	if p.has(rehearsed) {
		t.Error("it was not rehearsed")
	}
	p.mu.Unlock()
	for range cap(r.starting) {
		<-r.starting
	}
	p.sealed(t, rehearsed)
}
