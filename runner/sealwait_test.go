package runner

import (
	"testing"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/runner/pager"
)

// has reports whether checkpoints are sealed. The caller holds the ledger's mu.
func (l *ledger) has(id core.CheckpointID) bool {
	_, there := l.stored[id]
	return there
}

// arrives has the memory of a checkpoint not be whole, as far as the runner knows.
func arrives(t *testing.T, r *fakeRig, id core.CheckpointID) *lazyImage {
	t.Helper()
	rec, err := r.checkpoints.get(id)
	if err != nil {
		t.Fatal(err)
	}
	im := &lazyImage{Image: pager.Image{ID: string(rec.Base)}}
	r.lazy.mu.Lock()
	defer r.lazy.mu.Unlock()
	r.lazy.images[im.ID] = im
	return im
}

// TestSealOthers: a checkpoint whose memory is still coming holds up what grew from it, and nothing else, and is sealed when it is whole.
func TestSealOthers(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	r := newFakeRig(t, func(c *Config) { c.Store.Blobs = p.blobs })
	slow := r.boot()
	child := r.capture(r.fork(slow))
	other := r.boot()
	im := arrives(t, r, slow)
	p.seal(r)
	p.sealed(t, other)
	p.mu.Lock()
	if p.has(slow) || p.has(child) || p.attempts[slow]+p.attempts[child] > 0 {
		t.Errorf("what is not whole was sealed: attempts %v", p.attempts)
	}
	p.mu.Unlock()
	r.lazy.forget(im)
	p.sealed(t, slow, child)
}

// TestSealKeyUnavailable: the controller is told why a checkpoint is not sealed whose memory the pager has no key for, and others are sealed.
func TestSealKeyUnavailable(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	r := newFakeRig(t, func(c *Config) { c.Store.Blobs = p.blobs })
	closed, other := r.boot(), r.boot()
	im := arrives(t, r, closed)
	r.lazy.mu.Lock()
	im.refused = core.Errorf(core.FailedPrecondition, core.CodeKeyUnavailable, "object x is encrypted, and its key is not here")
	r.lazy.mu.Unlock()
	p.seal(r)
	p.sealed(t, other)
	p.wait(t, "the problem is told", func() bool { return len(p.failed) > 0 && p.failed[0].Code == core.CodeKeyUnavailable })
	r.lazy.forget(im)
	p.sealed(t, closed)
}

// TestSealBesideRehearsal: a rehearsal that has to wait holds up its own template and nothing else.
func TestSealBesideRehearsal(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	process := &pager.Process{Dir: t.TempDir(), Command: []string{"/bin/false"}} // the rehearsal fails in the end
	r := newFakeRig(t, func(c *Config) { c.Store.Blobs, c.Store.Pager = p.blobs, process })
	rehearsed, known := r.boot(), r.boot()
	rec, err := r.checkpoints.get(known)
	if err != nil {
		t.Fatal(err)
	}
	r.working.rehearsed(rec.Base, nil)
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
