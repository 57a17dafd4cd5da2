package runner

import (
	"bytes"
	"io"
	"os"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/images"
	"github.com/coppice-dev/coppice/runner/checkpoints"
	"github.com/coppice-dev/coppice/runner/roots"
)

// replaceRoot puts another root file system in the place of a shared one, and returns it open, as a machine has it.
func replaceRoot(t *testing.T, r *fakeRig, k roots.Key, b []byte) *os.File {
	t.Helper()
	path := r.roots.Path(k)
	if err := os.WriteFile(path+".new", b, 0o444); err != nil {
		t.Fatal(err)
	}
	if err := os.Rename(path+".new", path); err != nil {
		t.Fatal(err)
	}
	f, err := os.Open(path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Close() })
	return f
}

func wantRoot(t *testing.T, r *fakeRig, k roots.Key, want []byte) {
	t.Helper()
	if got, err := os.ReadFile(r.roots.Path(k)); err != nil || !bytes.Equal(got, want) {
		t.Errorf("the root file system is of %d bytes, not those of the image: %v", len(got), err)
	}
}

// TestBadRootIsReplaced: a shared root file system that is not its image's is replaced, by a fork and by a fetch. A machine that has the bad
// one keeps what it has.
func TestBadRootIsReplaced(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	want, err := os.ReadFile(x.a.image.RootFS)
	if err != nil {
		t.Fatal(err)
	}
	evil := bytes.Repeat([]byte("evil"), len(want)/4)
	b := x.runner(nil)
	for name, r := range map[string]*fakeRig{"a fork": x.a, "a fetch": b} {
		k := roots.Own(r.image.Digest)
		used := replaceRoot(t, r, k, evil)
		if err := x.forkFrom(r, x.sources(x.c), x.truth); err != nil {
			t.Errorf("%s: %v", name, err)
		}
		wantRoot(t, r, k, want)
		if got, err := io.ReadAll(used); err != nil || !bytes.Equal(got, evil) {
			t.Errorf("%s: a machine that had the file finds %d other bytes, %v", name, len(got), err)
		}
	}
	if left, err := os.ReadDir(b.roots.Dir()); err != nil || len(left) != 1 {
		t.Errorf("there are %v, %v", left, err)
	}
}

// TestOldStoreRoot: what an older runner kept from the store under the name of an image that is not here is not believed.
func TestOldStoreRoot(t *testing.T) {
	t.Parallel()
	x := newExpectation(t)
	b := x.runner(func(c *Config) {
		empty, err := images.Open(t.TempDir())
		if err != nil {
			t.Fatal(err)
		}
		c.Images = empty
	})
	if err := x.forkFrom(b, x.sources(x.c), x.truth); err != nil {
		t.Fatal(err)
	}
	for _, s := range b.Sandboxes() {
		if err := b.Destroy(t.Context(), s.ID); err != nil {
			t.Fatal(err)
		}
	}
	var old checkpoints.Record
	b.checkpoints.Inspect(func(st checkpoints.State) {
		old = *st.Records[x.c]
		old.Project, old.Root = "", ""
		st.Records[x.c] = &old
	})
	replaceRoot(t, b, old.RootKey(), []byte("evil"))
	if err := x.forkFrom(b, x.sources(x.c), x.truth); err != nil {
		t.Error(err)
	}
	rec, err := b.checkpoints.Get(x.c)
	if err != nil || !rec.RootKey().Stored() {
		t.Errorf("a machine has the root file system %s, %v", rec.RootKey(), err)
	}
	if _, err := os.Stat(b.roots.Path(roots.Own(rec.Image))); !os.IsNotExist(err) {
		t.Errorf("the old root file system is still there: %v", err)
	}
}

// TestRootsHeldWhileCollected: who needs a root file system while those that nothing needs are being removed has it until he lets go.
func TestRootsHeldWhileCollected(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	r := newFakeRig(t, func(*Config) {})
	img := r.image
	if err := r.roots.Keep(img); err != nil {
		t.Fatal(err)
	}
	collected := make(chan error, 1)
	armed := hang(t, "roots.judged", func() { collected <- r.roots.Collect() })
	kept, done := make(chan struct{}), make(chan struct{})
	defer close(done)
	go func() {
		defer r.roots.Hold()()
		if err := r.roots.Keep(img); err != nil {
			t.Error(err)
		}
		close(kept)
		<-done
	}()
	select { // it must wait; one that does not has its root taken away below
	case <-kept:
	case <-time.After(200 * time.Millisecond):
	}
	armed.Release()
	if err := <-collected; err != nil {
		t.Fatal(err)
	}
	<-kept
	if err := r.roots.Collect(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.roots.Path(roots.Own(img.Digest))); err != nil {
		t.Errorf("what is held was removed: %v", err)
	}
}

// TestRootReplacedWhileCollected: a fork replaces a bad root file system while those that nothing needs are removed.
func TestRootReplacedWhileCollected(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	x := newExpectation(t)
	k := roots.Own(x.a.image.Digest)
	want, err := os.ReadFile(x.a.image.RootFS)
	if err != nil {
		t.Fatal(err)
	}
	replaceRoot(t, x.a, k, bytes.Repeat([]byte("evil"), len(want)/4))
	forked := make(chan error, 1)
	armed := hang(t, "roots.placed", func() { forked <- x.forkFrom(x.a, x.sources(x.c), x.truth) })
	if err := x.a.roots.Collect(); err != nil {
		t.Error(err)
	}
	armed.Release()
	if err := <-forked; err != nil {
		t.Errorf("the fork: %v", err)
	}
	wantRoot(t, x.a, k, want)
}
