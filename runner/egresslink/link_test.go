package egresslink

import (
	"context"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/eventually"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/runner/egress"
)

// TestServeWaits: a sandbox that is given when the process has just ended waits for its successor.
func TestServeWaits(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	client := r.process()
	r.set(egress.NewClient(filepath.Join(t.TempDir(), "gone")), nil)
	time.AfterFunc(100*time.Millisecond, func() { r.set(client, nil) })
	g := r.serve(rulesOf(1, "a.test"))
	testegress.Want(t, g.sockets.Proxy(), "a.test", allowed)
}

// TestOnlyWhatWasGiven: a process that comes gets the sandboxes that were given to the link, and loses those that the runner does not have. A
// sandbox in the making, one that is not proxied, one that could not be served and one that has ended are not given.
func TestOnlyWhatWasGiven(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g := r.serve(rulesOf(1, "a.test"))
	making := r.list(nil)
	if err := making.SetRules(t.Context(), rulesOf(1)); core.CodeOf(err) != core.CodeWorkspaceNotReady || len(making.recorded) != 0 {
		t.Errorf("rules for a sandbox in the making: %v, recorded %v", err, making.recorded)
	}
	closed := r.list(nil)
	closed.SetFirst(core.EgressDenyAll, rulesOf(0))
	if err := closed.Serve(t.Context()); err != nil {
		t.Error(err)
	}
	closed.Adopt()
	wrong := r.list(nil)
	wrong.SetFirst(core.EgressProxied, rulesOf(1, "not a host"))
	if err := wrong.Serve(t.Context()); core.CategoryOf(err) != core.Invalid {
		t.Errorf("rules that cannot be read: %v", err)
	}
	gone := r.serve(rulesOf(1, "a.test"))
	gone.End(t.Context())
	gone.End(t.Context())
	if list := r.sandboxes(); len(list) != 1 || list[0] != g.Sandbox {
		t.Errorf("the link has %d sandboxes", len(list))
	}
	adopted := r.list(nil) // the process of before does not have it
	adopted.SetFirst(core.EgressProxied, rulesOf(1, "b.test"))
	adopted.Adopt()
	forgotten := r.serve(rulesOf(1, "a.test")) // the runner has no such sandbox any more, and the process does
	r.mu.Lock()
	delete(r.known, forgotten.id)
	r.mu.Unlock()
	r.takeBack(forgotten.Sandbox)
	if err := r.reconcile(t.Context(), r.process()); err != nil {
		t.Error(err)
	}
	testegress.Want(t, forgotten.sockets.Proxy(), "a.test", 0)
	testegress.Want(t, adopted.sockets.Proxy(), "b.test", allowed)
	for _, s := range []*guest{making, closed} {
		if at := s.sockets.Proxy(); at != "" {
			t.Errorf("sockets of a sandbox that was not given are open at %s", at)
		}
	}
}

// TestProcessesFollow: a process that was killed is followed by another, which gets the sandboxes while some are being made.
func TestProcessesFollow(t *testing.T) {
	t.Parallel()
	r := newRig(t)
	g := r.serve(rulesOf(1, "a.test"))
	for range 8 {
		r.list(nil)
	}
	hello := testegress.Hello(t, r.process())
	if err := syscall.Kill(hello.PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually.True(t, "the sandbox is served again", func() bool { return testegress.Ask(t, g.sockets.Proxy(), "a.test") == allowed })
	if n := r.ended.Load(); n != 1 {
		t.Errorf("%d processes have ended", n)
	}
	if again := testegress.Hello(t, r.process()); again.Instance == hello.Instance {
		t.Error("it is the same process")
	}
}

// TestServeEnds: a sandbox waits no longer for a process than its context lasts, and is not given then.
func TestServeEnds(t *testing.T) {
	t.Parallel()
	l := New(Config{Changed: func() {}})
	s := l.Sandbox(SandboxConfig{ID: core.NewID[core.SandboxID]()})
	s.SetFirst(core.EgressProxied, rulesOf(1))
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := s.Serve(ctx); core.CodeOf(err) != core.CodeEgressGone || len(l.sandboxes()) != 0 || s.served {
		t.Errorf("%v; %d sandboxes", err, len(l.sandboxes()))
	}
}
