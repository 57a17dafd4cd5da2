package egresslink

import (
	"context"
	"log/slog"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/internal/test/testegress"
	"github.com/coppice-dev/coppice/internal/test/testleak"
	"github.com/coppice-dev/coppice/runner/egress"
	"github.com/coppice-dev/coppice/runner/netns"
)

func TestMain(m *testing.M) {
	testegress.Enter()
	testleak.Main(m)
}

const (
	allowed = testegress.Allowed
	denied  = testegress.Denied
)

// rig is a link with a real egress process. It plays the runner.
type rig struct {
	*Link
	t    *testing.T
	cuts atomic.Int64
	halt func() // ends Run

	mu    sync.Mutex // guards known
	known map[core.SandboxID]bool
}

func newRig(t *testing.T) *rig {
	t.Helper()
	r := &rig{t: t, known: map[core.SandboxID]bool{}}
	r.Link = New(Config{
		Process: testegress.Process(t, testegress.Settings{}), Log: slog.New(slog.NewTextHandler(t.Output(), nil)), Life: t.Context(),
		Exists: func(id core.SandboxID) bool {
			r.mu.Lock()
			defer r.mu.Unlock()
			return r.known[id]
		},
		Changed: func() {}, Cut: func() { r.cuts.Add(1) },
	})
	ctx, stop := context.WithCancel(context.WithoutCancel(t.Context()))
	var running sync.WaitGroup
	running.Go(func() { r.Run(ctx) })
	r.halt = func() {
		stop()
		running.Wait()
	}
	t.Cleanup(func() {
		r.halt()
		if err := r.Stop(context.WithoutCancel(t.Context())); err != nil {
			t.Error(err)
		}
	})
	return r
}

// process is the client of the process that runs.
func (r *rig) process() *egress.Client {
	r.t.Helper()
	c, err := r.await(r.t.Context())
	if err != nil {
		r.t.Fatal(err)
	}
	return c
}

// guest is a sandbox, as a runner has it.
type guest struct {
	*Sandbox
	sockets testegress.Sockets
	busy    atomic.Bool // another operation is under way

	mu        sync.Mutex // guards what follows
	recorded  []int64    // the versions of rules that were recorded
	unwritten error      // what recording fails with
}

// Assign implements Namespace.
func (*guest) Assign(context.Context, core.Identity) error { return nil }

// Open implements Namespace.
func (*guest) Open(context.Context, core.EgressPolicy) error { return nil }

// Check implements Namespace.
func (*guest) Check(context.Context) error { return nil }

// EgressSockets implements Namespace.
func (g *guest) EgressSockets(ctx context.Context) (netns.EgressSockets, error) {
	return g.sockets.Open(ctx)
}

func (g *guest) record(rules runnerapi.EgressRules) error {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.recorded = append(g.recorded, rules.Version)
	return g.unwritten
}

// list makes a sandbox that the runner knows, and that is being made. ns is its network; nil: its own.
func (r *rig) list(ns Namespace) *guest {
	id := core.NewID[core.SandboxID]()
	r.mu.Lock()
	r.known[id] = true
	r.mu.Unlock()
	g := &guest{}
	if ns == nil {
		ns = g
	}
	g.Sandbox = r.Sandbox(SandboxConfig{
		ID: id, WorkspaceID: core.NewID[core.WorkspaceID](), Epoch: 1, Identity: identity, Namespace: ns, Record: g.record, Open: func() bool { return true },
		Try: func() (func(), bool) { return func() {}, !g.busy.Load() },
	})
	return g
}

// serve makes a sandbox that the process serves.
func (r *rig) serve(rules runnerapi.EgressRules) *guest {
	r.t.Helper()
	g := r.list(nil)
	g.SetFirst(core.EgressProxied, rules)
	if err := g.Serve(r.t.Context()); err != nil {
		r.t.Fatal(err)
	}
	return g
}

func rulesOf(version int64, allow ...string) runnerapi.EgressRules {
	return runnerapi.EgressRules{Version: version, Allow: allow}
}
