package controller_test

import (
	"errors"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/snapshotstore/blob"
	"github.com/coppice-dev/coppice/snapshotstore/blob/dir"
	"github.com/coppice-dev/coppice/snapshotstore/manifest"
)

func (w *world) seal(files blob.Blobs, ids ...core.CheckpointID) {
	w.t.Helper()
	for _, id := range ids {
		if err := w.runner.Seal(w.t.Context(), w, files, w.epoch, id); err != nil {
			w.t.Fatalf("seal of %s: %v", id, err)
		}
	}
}

func (w *world) begin(files blob.Blobs, id core.CheckpointID) *runnertest.Upload {
	w.t.Helper()
	u, err := w.runner.BeginSeal(w.t.Context(), w, files, w.epoch, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return u
}

func (w *world) get(id core.CheckpointID) controller.Checkpoint {
	w.t.Helper()
	cp, err := w.Tree.Checkpoint(w.t.Context(), w.project, id)
	if err != nil {
		w.t.Fatal(err)
	}
	return cp
}

func keys(t testing.TB, files *dir.Store) []string {
	t.Helper()
	var list []string
	for info, err := range files.List(t.Context(), "") {
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, info.Key)
	}
	return list
}

func TestSeal(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	w := newWorld(t, store)
	ws := w.create("a")
	a := w.checkpoint(ws.ID)
	if a.Seal == nil || a.Seal.State != controller.SealQueued {
		t.Errorf("of a fresh checkpoint: %+v", a.Seal)
	}
	if cp, err := w.SealedCheckpoint(t.Context(), w.project, a.ID, time.Millisecond); err != nil || cp.State != core.CheckpointCaptured {
		t.Errorf("waited in vain: %+v, %v", cp, err)
	}
	waited := make(chan core.CheckpointState, 1)
	go func() {
		cp, err := w.SealedCheckpoint(t.Context(), w.project, a.ID, wait)
		if err != nil {
			t.Error(err)
		}
		waited <- cp.State
	}()
	w.seal(files, ws.Parent, a.ID)
	if state := <-waited; state != core.CheckpointSealed {
		t.Errorf("waited until it is %s", state)
	}
	got := w.get(a.ID)
	if got.Seal != nil || got.Stored == nil || runnertest.Restorable(t.Context(), files, *got.Stored) != nil {
		t.Errorf("sealed: %+v", got)
	}
	wantCode(t, w.runner.Seal(t.Context(), w, files, w.epoch, a.ID), core.CodeStateConflict)
}

// TestSealRepeats sends every message again, as one does whose answer was lost.
func TestSealRepeats(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	w := newWorld(t, store)
	a := w.checkpoint(w.create("a").ID)
	lost := w.begin(files, a.ID)
	u := w.begin(files, a.ID)
	for _, step := range []func() error{
		func() error { return u.Write(t.Context(), nil) },
		func() error { return u.Fail(t.Context(), errors.New("x")) },
		func() error { return u.Fail(t.Context(), errors.New("x")) },
	} {
		if err := step(); err != nil {
			t.Fatal(err)
		}
	}
	if got := w.get(a.ID).Seal; got.State != controller.SealFailed || got.Attempt != 2 || got.Problem == nil {
		t.Errorf("%+v", got)
	}
	wantCode(t, u.End(t.Context()), core.CodeStateConflict)
	wantCode(t, lost.Fail(t.Context(), errors.New("x")), core.CodeStateConflict)
	u = w.begin(files, a.ID)
	if err := u.Write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := u.End(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	wantCode(t, u.Fail(t.Context(), errors.New("x")), core.CodeStateConflict)
	wantCode(t, lost.End(t.Context()), core.CodeStateConflict)
	if got := w.get(a.ID); got.State != core.CheckpointSealed || got.StoredBytes == 0 {
		t.Errorf("%+v", got)
	}
}

// TestSealRefused sends what does not fit the attempt.
func TestSealRefused(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	w := newWorld(t, store)
	a := w.checkpoint(w.create("a").ID)
	for name, spoil := range map[string]func(*runnerapi.CommitSeal){
		"another checkpoint": func(c *runnerapi.CommitSeal) { c.Stored.CheckpointID = core.NewID[core.CheckpointID]() },
		"no digest":          func(c *runnerapi.CommitSeal) { c.Stored.Digest = "" },
		"manifest elsewhere": func(c *runnerapi.CommitSeal) { c.Stored.Manifest = "v1/x" },
		"manifest's size":    func(c *runnerapi.CommitSeal) { c.Stored.Bytes++ },
		"foreign key":        func(c *runnerapi.CommitSeal) { c.Written[0].Key = "v1/x" },
		"wrong key":          func(c *runnerapi.CommitSeal) { c.Written[0].Key += "/../../x" },
		"a key twice":        func(c *runnerapi.CommitSeal) { c.Written[1] = c.Written[0] },
		"a negative size":    func(c *runnerapi.CommitSeal) { c.Written[0].Bytes = -1 },
		"a foreign need":     func(c *runnerapi.CommitSeal) { c.Needs = append(c.Needs, "v1/x") },
	} {
		u := w.begin(files, a.ID)
		if err := u.Write(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		spoil(&u.Commit)
		if err := u.End(t.Context()); core.CategoryOf(err) != core.Invalid {
			t.Errorf("%s: %v", name, err)
		}
	}
	u := w.begin(files, a.ID)
	stale := w.epoch
	w.register() // the runner was started again
	wantCode(t, u.End(t.Context()), core.CodeRunnerLost)
	wantCode(t, u.Fail(t.Context(), errors.New("x")), core.CodeRunnerLost)
	// To a runner STATE_CONFLICT means that the checkpoint is sealed, and it never tries again.
	_, err := w.runner.BeginSeal(t.Context(), w, files, stale, a.ID)
	wantCode(t, err, core.CodeRunnerLost)
	eventually(t, "the attempt of the runner's last life is given up", func() bool { return w.get(a.ID).Seal.State == controller.SealFailed })
	w.seal(files, a.ID)
}

// TestSealLies has a runner that was taken over commit manifests that say something else than the rows of their checkpoint: none becomes one that
// other runners are told of.
func TestSealLies(t *testing.T) {
	t.Parallel()
	files, store := withStore(t)
	w := newWorld(t, store)
	ws := w.create("a")
	w.seal(files, ws.Parent)
	a := w.checkpoint(ws.ID)
	other := w.checkpoint(w.create("b").ID)
	refused := func(name string, u *runnertest.Upload) {
		t.Helper()
		if err := u.End(t.Context()); core.CodeOf(err) != core.CodeManifestInvalid {
			t.Errorf("%s: %v", name, err)
		}
		if got := w.get(a.ID); got.State == core.CheckpointSealed {
			t.Fatalf("%s: it is sealed", name)
		}
	}
	for name, lie := range map[string]func(*manifest.Header){
		"another image":      func(h *manifest.Header) { h.GuestImage = core.DigestOf([]byte("an image of all projects")) },
		"another project":    func(h *manifest.Header) { h.ProjectID = core.NewID[core.ProjectID]() },
		"another checkpoint": func(h *manifest.Header) { h.CheckpointID = other.ID },
		"another parent":     func(h *manifest.Header) { h.Parent = other.ID },
		"another class":      func(h *manifest.Header) { h.Class["cpu_model"] = "host" },
		"more memory":        func(h *manifest.Header) { h.Resources.MemoryMiB *= 2 },
		"more disk":          func(h *manifest.Header) { h.Resources.DiskGiB = 1024 },
		"a huge root": func(h *manifest.Header) {
			h.Images = []manifest.ImageRoot{{Name: runnerapi.ImageRoot, Bytes: 80 << 30}}
		},
		"a huge disk": func(h *manifest.Header) {
			h.Images = []manifest.ImageRoot{{Name: runnerapi.ImageDisk, Bytes: 500 << 30}}
		},
		"an image of no kind":  func(h *manifest.Header) { h.Images = []manifest.ImageRoot{{Name: "../x", Bytes: 1}} },
		"an object of another": func(h *manifest.Header) { h.Objects[0].Key = "v1/of-another/pack-0" },
		"an object's size":     func(h *manifest.Header) { h.Objects[len(h.Objects)-1].Bytes++ },
		"nodes of another": func(h *manifest.Header) {
			h.Shared = []manifest.Ref{{Key: "v1/x", Digest: core.DigestOf(nil), Bytes: 1}}
		},
	} {
		u := w.begin(files, a.ID)
		u.Change = lie
		if err := u.Write(t.Context(), nil); err != nil {
			t.Fatal(err)
		}
		refused(name, u)
	}
	// The manifest of another checkpoint, that of an earlier attempt, and one that is not there.
	first := w.begin(files, a.ID)
	if err := first.Write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	swapped := w.begin(files, other.ID)
	if err := swapped.Write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	u := w.begin(files, a.ID)
	if err := u.Write(t.Context(), nil); err != nil {
		t.Fatal(err)
	}
	good := u.Commit
	for name, change := range map[string]func(*runnerapi.CommitSeal){
		"swapped with another's": func(c *runnerapi.CommitSeal) {
			c.Stored.Manifest, c.Stored.Digest = swapped.Commit.Stored.Manifest, swapped.Commit.Stored.Digest
		},
		"that of before": func(c *runnerapi.CommitSeal) {
			c.Stored.Manifest, c.Stored.Digest = first.Commit.Stored.Manifest, first.Commit.Stored.Digest
		},
		"another digest": func(c *runnerapi.CommitSeal) { c.Stored.Digest = swapped.Commit.Stored.Digest },
	} {
		u.Commit = good
		change(&u.Commit)
		if err := u.End(t.Context()); err == nil || w.get(a.ID).State == core.CheckpointSealed {
			t.Fatalf("%s: %v", name, err)
		}
	}
	u.Commit = good
	if err := u.End(t.Context()); err != nil {
		t.Error(err)
	}
}

func TestNoStore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a := w.checkpoint(w.create("a").ID)
	if a.Seal != nil {
		t.Errorf("%+v", a.Seal)
	}
	_, err := w.SealedCheckpoint(t.Context(), w.project, a.ID, wait)
	wantCode(t, err, core.CodeUnsupported)
	_, err = w.runner.BeginSeal(t.Context(), w, nil, w.epoch, a.ID)
	wantCode(t, err, core.CodeUnsupported)
}
