package controller_test

import (
	"testing"

	"github.com/coppice-dev/coppice/core"
)

// TestRejoinedHost: a host joins again and is another runner, which still holds what it captured before. It did not capture it
// under its present name, so it cannot say so. A fork there is ready, with an attestation that names the manifest.
func TestRejoinedHost(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	w := newWorld(t, store)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.seal(files, ws.Parent, cp.ID)
	if got := w.attested(w.fork(cp.ID, 1)[0].ID, 0).Statement.Predicate.Checkpoint; got.Manifest != "" {
		t.Errorf("the runner that captured the checkpoint names manifest %s", got.Manifest)
	}
	was := w.runner.ID()
	if now := w.runner.Rejoin(); now == was {
		t.Fatal("it is the same runner")
	}
	w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 minute' WHERE id = $1`, was) // it is silent
	w.register()
	w.beat()
	for range 2 {
		for _, child := range w.fork(cp.ID, 2) {
			p := w.attested(child.ID, 0).Statement.Predicate
			if child.State != core.WorkspaceReady || p.Runner.ID != w.runner.ID() || p.Checkpoint.ID != cp.ID || p.Checkpoint.Manifest != w.get(cp.ID).Stored.Digest {
				t.Errorf("%s: %+v", child.State, p)
			}
		}
	}
}
