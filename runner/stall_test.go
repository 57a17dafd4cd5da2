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
	"github.com/coppice-dev/coppice/internal/eventually"
	"github.com/coppice-dev/coppice/runner/pager"
)

const awaitedObject = "v1/prj/ckpt/1/pack"

// stallGuestTimeout is how long a guest is waited for that is not known to be stalled. A refusal that takes a part of it has not waited.
const stallGuestTimeout = 2 * time.Minute

// newStallRig is a runner with one sandbox that has its root file system from a pager.
func newStallRig(t *testing.T) (*fakeRig, core.SandboxID) {
	t.Helper()
	r := newFakeRig(t, func(c *Config) { c.StallAfter, c.GuestTimeout = 50*time.Millisecond, stallGuestTimeout })
	template := r.boot()
	r.lazy.mu.Lock()
	r.lazy.instance = "one"
	r.lazy.images[rootImageID(ownRoot(r.image.Digest))] = &lazyImage{Image: pager.Image{ID: rootImageID(ownRoot(r.image.Digest))}}
	r.lazy.mu.Unlock()
	return r, r.fork(template)
}

// says has the pager say who waits for the root file system.
func (r *fakeRig) says(waiters ...pager.Waiter) {
	r.lazy.mu.Lock()
	defer r.lazy.mu.Unlock()
	r.lazy.images[rootImageID(ownRoot(r.image.Digest))].status.Waiters = waiters
	r.lazy.changed()
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

// TestStall: a machine that waits for the store is held and reported, whoever asks for its guest is told so at once, and it goes on by itself.
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

// TestWhoWaits: a machine waits if a thread of its VMM does, or the kernel for somebody; not because others do.
func TestWhoWaits(t *testing.T) {
	r, id := newStallRig(t)
	s, err := r.find(id)
	if err != nil {
		t.Fatal(err)
	}
	const kernel, other = 2, 1 // kthreadd, init
	since := time.Now().Add(-time.Millisecond)
	for _, c := range []struct {
		name    string
		image   string
		waiters []pager.Waiter
		want    bool
	}{
		{"its own", rootImageID(ownRoot(r.image.Digest)), []pager.Waiter{{Thread: other, Since: since}, own(since)}, true},
		{"the kernel's", rootImageID(ownRoot(r.image.Digest)), []pager.Waiter{{Thread: kernel, Since: since}}, true},
		{"another's", rootImageID(ownRoot(r.image.Digest)), []pager.Waiter{{Thread: other, Since: since}}, false},
		{"another image", "base_1", []pager.Waiter{own(since)}, false},
	} {
		got, why := s.awaits(map[string]pager.Status{c.image: {Waiters: c.waiters}})
		if got.IsZero() == c.want || (why != nil) != c.want {
			t.Errorf("%s: %v, %+v", c.name, got, why)
		}
	}
}

// TestStallProblem: a machine that waits for the host's disk is not said to wait for the store.
func TestStallProblem(t *testing.T) {
	t.Parallel()
	for code, cause := range map[core.Code]*runnerapi.Problem{
		core.CodeStoreUnavailable: nil,
		core.CodeStoreAuth:        {Category: core.Unavailable, Code: core.CodeStoreAuth, Message: "the store refuses the credentials"},
		core.CodeDiskFull:         {Category: core.Exhausted, Code: core.CodeDiskFull, Message: "the runner's disk is full"},
		core.CodeInternal:         {Category: core.Internal, Code: core.CodeInternal, Message: "the runner's disk is failing"},
	} {
		want := code
		if code == core.CodeStoreAuth {
			want = core.CodeStoreUnavailable
		}
		if got := stallProblem("sb_1", time.Now(), "pack-1", cause); got.Code != want || cause != nil && !strings.Contains(got.Message, cause.Message) {
			t.Errorf("%s: %+v", code, got)
		}
	}
}
