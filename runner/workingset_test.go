package runner

import (
	"bytes"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/memory"
)

// TestWorkingSetTravels: what the first machine on a base has in use is known of the checkpoints that descend from it, after a restart too, and on another
// host.
func TestWorkingSetTravels(t *testing.T) {
	t.Parallel()
	p := newSealPool(t)
	a := newFakeRig(t, func(c *Config) { c.Store.Blobs = p.blobs })
	template := a.boot()
	first := a.fork(template)
	base := a.recordOf(t, template).Base
	eventually.True(t, "the runner has noted what is in use", func() bool { return a.lazy.WorkingSets.Of(base).Pages != nil })
	c := a.capture(first)
	set := a.recordOf(t, c).WorkingSet
	if n := len(lazy.DecodeWorkingSet(set, fakeMiB<<20/memory.PageSize)); n == 0 {
		t.Error("nothing was in use")
	}
	a.stop()
	a.start()
	p.seal(a)
	again := a.capture(a.fork(c))
	p.sealed(t, template, c, again)
	b := p.runner(nil)
	if _, err := b.Fork(t.Context(), runnerapi.Fork{CheckpointID: again, Children: []runnerapi.Child{b.child()}, Sources: p.sources(again, c, template)}); err != nil {
		t.Fatal(err)
	}
	for where, rec := range map[string]*checkpoints.Record{"a child after a restart": a.recordOf(t, again), "the child elsewhere": b.recordOf(t, again)} {
		if !bytes.Equal(rec.WorkingSet, set) {
			t.Errorf("%s has another set: %d bytes, want %d", where, len(rec.WorkingSet), len(set))
		}
	}
}

func (r *fakeRig) recordOf(t *testing.T, id core.CheckpointID) *checkpoints.Record {
	t.Helper()
	rec, err := r.checkpoints.Get(id)
	if err != nil {
		t.Fatal(err)
	}
	return rec
}
