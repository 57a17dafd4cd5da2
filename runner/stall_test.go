package runner

import (
	"context"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/runner/lazy"
	"github.com/coppice-dev/coppice/runner/pager"
	"github.com/coppice-dev/coppice/runner/pager/pagertest"
	"github.com/coppice-dev/coppice/runner/roots"
)

const awaitedObject = "v1/prj/ckpt/1/pack"

// stallGuestTimeout is how long a guest is waited for that is not known to be stalled. A refusal that takes a part of it has not waited.
const stallGuestTimeout = 2 * time.Minute

// stallRig is a runner with a sandbox that has its root file system from a pager.
type stallRig struct {
	*fakeRig
	pager *pagertest.Pager
	root  string // the image of the root file system
}

func newStallRig(t *testing.T) (*stallRig, core.SandboxID) {
	t.Helper()
	r := &stallRig{}
	r.fakeRig, r.pager = newPagerRig(t, func(c *Config) { c.StallAfter, c.GuestTimeout = 50*time.Millisecond, stallGuestTimeout })
	template := r.boot()
	r.root = rootImageID(roots.Own(r.image.Digest))
	r.arrives(&lazy.Image{Image: pager.Image{ID: r.root}})
	return r, r.fork(template)
}

// newPagerRig is a runner with a pager that the test speaks for. It fetches nothing lazily by itself.
func newPagerRig(t *testing.T, change func(*Config)) (*fakeRig, *pagertest.Pager) {
	t.Helper()
	p := pagertest.Start(t)
	r := newFakeRig(t, func(c *Config) {
		c.Store.Pager, c.Store.Whole = p.Process(), true
		change(c)
	})
	t.Cleanup(p.Close) // before the runner's end: it cannot be told to stop
	return r, p
}

// arrives has an image be incomplete, as far as the runner knows. Its file would go where nobody looks for it.
func (r *fakeRig) arrives(im *lazy.Image) {
	r.t.Helper()
	im.To = "arrived-" + im.ID
	if err := r.lazy.Begin(r.t.Context(), im); err != nil {
		r.t.Fatal(err)
	}
}

// says has the pager say who waits for the root file system.
func (r *stallRig) says(waiters ...pager.Waiter) {
	r.t.Helper()
	r.pager.Say(r.root, func(st *pager.Status) { st.Waiters = waiters })
}

// own is a thread of the fake machines' process.
func own(since time.Time) pager.Waiter {
	return pager.Waiter{Thread: os.Getpid(), Since: since, Object: awaitedObject}
}

func (r *fakeRig) awaitStall(id core.SandboxID, is bool) {
	r.t.Helper()
	eventually.True(r.t, "the sandbox is stalled, or is not any more", func() bool {
		s, err := r.Sandbox(id)
		if err != nil || s.State == runnerapi.SandboxDead {
			r.t.Fatalf("%+v, %v", s, err)
		}
		return (s.Stalled != nil) == is
	})
}

func wantStalled(t *testing.T, what string, err error) {
	t.Helper()
	if core.CodeOf(err) != core.CodeStoreUnavailable || core.CategoryOf(err) != core.Unavailable || !strings.Contains(core.MessageOf(err), awaitedObject) {
		t.Errorf("%s: %v", what, err)
	}
}

// TestStall: a machine that waits for the store is stopped and reported, requests for its guest fail with this at once, and it goes on
// by itself.
func TestStall(t *testing.T) {
	r, id := newStallRig(t)
	fail := func(http.ResponseWriter, *http.Request, error) {}
	if _, err := r.Guest(t.Context(), id, fail); err != nil {
		t.Fatal(err)
	}
	r.says(own(time.Now().Add(-time.Minute)))
	r.awaitStall(id, true)
	if s, _ := r.Sandbox(id); time.Since(s.Stalled.Since) < time.Minute || s.Stalled.Problem.Code != core.CodeStoreUnavailable {
		t.Errorf("%+v", s.Stalled)
	}
	begun := time.Now()
	_, err := r.Guest(t.Context(), id, fail)
	wantStalled(t, "its guest", err)
	_, err = r.Capture(t.Context(), id, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
	wantStalled(t, "a capture", err)
	if d := time.Since(begun); d > stallGuestTimeout/2 {
		t.Errorf("the refusals took %s", d)
	}
	s, err := r.find(id)
	if err != nil {
		t.Fatal(err)
	}
	short, cancel := context.WithTimeout(t.Context(), 300*time.Millisecond)
	defer cancel()
	if _, err := s.agent(short); err == nil {
		t.Error("its guest runs")
	}
	r.says()
	r.awaitStall(id, false)
	r.wantOnly(id)
	r.capture(id)
}

// TestStallInCapture: a machine that comes to wait for the store in a capture is not ended because of that. The capture fails, and the machine is
// thawed when it waits no more.
func TestStallInCapture(t *testing.T) { //nolint:paralleltest // failpoints are the process's
	r, id := newStallRig(t)
	answer := make(chan error, 1)
	armed := hang(t, "capture.frozen", func() {
		_, err := r.Capture(context.WithoutCancel(t.Context()), id, runnerapi.Capture{CheckpointID: core.NewID[core.CheckpointID]()})
		answer <- err
	})
	r.says(own(time.Now().Add(-time.Minute)))
	r.awaitStall(id, true)
	armed.Disarm()
	wantStalled(t, "the capture", <-answer)
	if s, err := r.Sandbox(id); err != nil || s.State != runnerapi.SandboxPaused {
		t.Errorf("%+v, %v", s, err)
	}
	r.says()
	r.awaitStall(id, false)
	eventually.True(t, "the sandbox is ready", func() bool {
		s, err := r.Sandbox(id)
		return err == nil && s.State == runnerapi.SandboxReady
	})
	r.wantOnly(id)
	r.capture(id)
}
