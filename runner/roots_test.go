package runner

import (
	"os"
	"testing"
	"time"
)

// TestRootsHeldWhileCollected: who needs a root file system while those that nothing needs are being removed has it until he lets go.
func TestRootsHeldWhileCollected(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	r := newFakeRig(t, func(*Config) {})
	img := r.image
	if err := r.keepRoot(img); err != nil {
		t.Fatal(err)
	}
	collected := make(chan error, 1)
	armed := hang(t, "roots.judged", func() { collected <- r.collectRoots() })
	kept, done := make(chan struct{}), make(chan struct{})
	defer close(done)
	go func() {
		defer r.holdRoots()()
		if err := r.keepRoot(img); err != nil {
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
	if err := r.collectRoots(); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(r.rootPath(ownRoot(img.Digest))); err != nil {
		t.Errorf("what is held was removed: %v", err)
	}
}
