package controller_test

import (
	"context"
	"errors"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/builds"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// TestCheckpointsTakeTurns captures one workspace from many sides at once: a chain grows, nobody is refused.
func TestCheckpointsTakeTurns(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *controller.Config, rc *runnertest.Config) { rc.Capture = 20 * time.Millisecond })
	ws := w.create("main")
	const n = 6
	got := make([]controller.Checkpoint, n)
	var group sync.WaitGroup
	for i := range n {
		group.Go(func() { got[i] = w.checkpoint(ws.ID) })
	}
	group.Wait()
	slices.SortFunc(got, func(a, b controller.Checkpoint) int { return a.Depth - b.Depth })
	for i, cp := range got {
		if cp.Depth != i+1 || i > 0 && cp.Parent != got[i-1].ID {
			t.Errorf("checkpoint %d: depth %d, parent %s", i, cp.Depth, cp.Parent)
		}
	}
	w.consistent()
}

func TestCaptureFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointCapture {
			return core.Errorf(core.FailedPrecondition, core.CodeNotQuiesced, "pid 7 (dd) cannot be frozen")
		}
		return nil
	})
	_, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{Name: "x"}, wait)
	wantCode(t, err, core.CodeNotQuiesced)
	_, err = w.ForkWorkspace(t.Context(), w.project, ws.ID, controller.CheckpointRequest{Name: "x"}, controller.ForkRequest{Count: 2, Name: "c"}, wait)
	wantCode(t, err, core.CodeNotQuiesced)
	if _, ok := errors.AsType[*controller.OperationError](err); !ok {
		t.Errorf("the failure does not name its operation: %v", err)
	}
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("the parent is %s", got)
	}
	w.runner.Hook(nil)
	if a, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{Name: "x"}, wait); err != nil || a.Result.Checkpoint.Parent != ws.Head {
		t.Errorf("after failures: %+v, %v", a, err)
	}
	w.consistent()
}

// TestRefusals asks for what cannot be: each is refused by name, and no row is written.
func TestRefusals(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(_ *controller.Config, rc *runnertest.Config) { rc.Capacity = runnerapi.Capacity{Sandboxes: 3} })
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	ctx, shape := t.Context(), core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}
	create := func(req controller.CreateRequest) error {
		if req.Resources == (core.Resources{}) {
			req.Resources = shape
		}
		_, err := w.CreateWorkspace(ctx, w.project, req, wait)
		return err
	}
	fork := func(req controller.ForkRequest) error {
		_, err := w.ForkCheckpoint(ctx, w.project, cp.ID, req, wait)
		return err
	}
	rows := func() int {
		return w.number(`SELECT (SELECT count(*) FROM operations) + (SELECT count(*) FROM workspaces) + (SELECT count(*) FROM sandboxes) + (SELECT count(*) FROM checkpoints)`)
	}
	before := rows()
	for name, c := range map[string]struct {
		err  error
		want core.Code
	}{
		"name taken":     {create(controller.CreateRequest{Name: "main"}), core.CodeNameTaken},
		"no such image":  {create(controller.CreateRequest{Image: "nosuch"}), core.CodeImageNotFound},
		"no such digest": {create(controller.CreateRequest{Image: string(core.DigestOf([]byte("x")))}), core.CodeImageNotFound},
		"bad shape":      {create(controller.CreateRequest{Resources: core.Resources{VCPUs: 1, MemoryMiB: 511, DiskGiB: 1}}), core.CodeInvalidField},
		"none":           {fork(controller.ForkRequest{Count: 0}), core.CodeInvalidField},
		"too many":       {fork(controller.ForkRequest{Count: controller.MaxFork + 1}), core.CodeInvalidField},
		"no room":        {fork(controller.ForkRequest{Count: 3}), core.CodeCapacity},
		"long branch":    {fork(controller.ForkRequest{Count: 2, Name: strings.Repeat("a", 63)}), core.CodeInvalidName},
		"branch taken":   {fork(controller.ForkRequest{Count: 1, Name: "main"}), core.CodeNameTaken},
		"unknown node": {func() error {
			_, err := w.ForkCheckpoint(ctx, w.project, core.NewID[core.CheckpointID](), controller.ForkRequest{Count: 1}, wait)
			return err
		}(), core.CodeCheckpointNotFound},
		"unknown workspace": {func() error { _, err := w.Terminate(ctx, w.project, core.NewID[core.WorkspaceID](), wait); return err }(), core.CodeWorkspaceNotFound},
		"template deleted":  {w.DeleteCheckpoint(ctx, w.project, ws.Parent), core.CodeCheckpointInUse},
	} {
		if core.CodeOf(c.err) != c.want {
			t.Errorf("%s: %v, want %s", name, c.err, c.want)
		}
	}
	if after := rows(); after != before {
		t.Errorf("%d rows were written by refused requests", after-before)
	}
	other := w.runner.Info().Class
	other.VMMVersion = "2"
	w.runner.SetClass(other)
	w.register()
	err := fork(controller.ForkRequest{Count: 1})
	wantCode(t, err, core.CodeIncompatibleHost)
	if !strings.Contains(core.MessageOf(err), "its vmm_version is \"1\" and the runner's is \"2\"") {
		t.Errorf("it does not name the field: %v", err)
	}
	w.create("after-the-upgrade") // a template of the new class is made
	if n := w.number(`SELECT count(*) FROM checkpoints WHERE kind = 'template'`); n != 2 {
		t.Errorf("%d templates", n)
	}
}

func TestRestoreRefusesOtherShapes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	a, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Resources: core.Resources{VCPUs: 2, MemoryMiB: 512, DiskGiB: 1}}, wait)
	if err != nil {
		t.Fatal(err)
	}
	cp := w.checkpoint(a.Result.Workspace.ID)
	_, err = w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait)
	wantCode(t, err, core.CodeInvalidField)
	if got := w.state(ws.ID); got != core.WorkspaceReady {
		t.Errorf("it is %s", got)
	}
}

// TestTemplateFails tells every creator that waited, and lets the next one try again.
func TestTemplateFails(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	broken := true
	var mu sync.Mutex
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		mu.Lock()
		defer mu.Unlock()
		if at == runnertest.PointTemplate && broken {
			return core.Errorf(core.Unavailable, core.CodeGuestUnreachable, "the agent did not answer; console: panic")
		}
		return nil
	})
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			_, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}}, wait)
			if core.CodeOf(err) != core.CodeGuestUnreachable || !strings.Contains(core.MessageOf(err), "console: panic") {
				t.Errorf("got %v", err)
			}
		})
	}
	group.Wait()
	mu.Lock()
	broken = false
	mu.Unlock()
	w.create("main")
	w.consistent()
}

// TestTemplateIsLost makes a template again whose bytes the runner has no more.
func TestTemplateIsLost(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.create("one")
	w.runner.LoseCheckpoints()
	second := w.create("two")
	if second.Parent == first.Parent {
		t.Error("the lost template is still used")
	}
	w.consistent()
}

func TestImageIsRebuilt(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.create("one")
	rebuilt := runnertest.DefaultImage
	rebuilt.Digest, rebuilt.CreatedAt = core.DigestOf([]byte("rebuilt")), rebuilt.CreatedAt.Add(time.Hour)
	w.runner.SetImages(rebuilt)
	second := w.create("two")
	if second.Image.Digest != rebuilt.Digest || first.Image.Digest == second.Image.Digest || second.Image.Name != "base" {
		t.Errorf("the new image is not used at once: %+v", second.Image)
	}
	list, err := w.Fleet().Images(t.Context(), w.project, controller.Page{Limit: 10})
	if err != nil || len(list) != 1 || list[0].Digest != rebuilt.Digest {
		t.Errorf("%+v, %v", list, err)
	}
}

// TestImageByReference finds a pulled image by every spelling of its reference, and not by that of another tag.
func TestImageByReference(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	pulled := runnertest.DefaultImage
	pulled.Name, pulled.Digest = "app-1-4", core.DigestOf([]byte("pulled"))
	pulled.References = []string{"index.docker.io/library/app:1.4"}
	w.runner.SetImages(runnertest.DefaultImage, pulled)
	for _, ref := range []string{"app:1.4", "docker.io/library/app:1.4", "app-1-4"} {
		if found, err := w.Fleet().FindImage(t.Context(), ref); err != nil || found.Digest != pulled.Digest || found.Name != "app-1-4" {
			t.Errorf("%s: %+v, %v", ref, found, err)
		}
	}
	for _, ref := range []string{"app", "app:1.5", "registry.example/app:1.4", "app:"} {
		if found, err := w.Fleet().FindImage(t.Context(), ref); core.CodeOf(err) != core.CodeImageNotFound {
			t.Errorf("%s: %+v, %v", ref, found, err)
		}
	}
	if image := w.build(builds.Spec{Name: "web", Dockerfile: "FROM app:1.4\n"}); image.From != "app:1.4" {
		t.Errorf("%+v", image)
	}
}

// TestImageIsRebuiltInLargeCluster builds an image on one of many runners. Nobody is asked when a workspace is created: the heartbeat of
// the runner says that its images have changed.
func TestImageIsRebuiltInLargeCluster(t *testing.T) {
	t.Parallel()
	w := quiet(t)
	ws := w.create("one")
	w.crowd(ws, w.checkpoint(ws.ID).ID, 20, 10, 1) // all fuller than the one that can make workspaces
	rebuilt := runnertest.DefaultImage
	rebuilt.Digest, rebuilt.CreatedAt = core.DigestOf([]byte("rebuilt")), rebuilt.CreatedAt.Add(time.Hour)
	old := runnertest.DefaultImage
	old.Name = "" // it has moved on
	w.runner.SetImages(rebuilt, old)
	if got := w.create("two"); got.Image.Digest != ws.Image.Digest {
		t.Errorf("somebody was asked: %+v", got.Image)
	}
	w.beat()
	eventually(t, "the image is known", func() bool {
		return w.number(`SELECT count(*) FROM image_locations l JOIN images i ON i.id = l.image_id WHERE i.digest = $1 AND l.runner_id = $2`, rebuilt.Digest, w.runner.ID()) == 1
	})
	got := w.create("three")
	if got.Image.Digest != rebuilt.Digest || got.Sandbox.RunnerID != w.runner.ID() {
		t.Errorf("the new image is not used where it is: %+v on %s", got.Image, got.Sandbox.RunnerID)
	}
	_, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{Image: string(core.DigestOf([]byte("nothing"))), Resources: ws.Resources}, wait)
	wantCode(t, err, core.CodeImageNotFound)
}

// TestForkTakesOver gives children what their parent had unless the request says otherwise.
func TestForkTakesOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	a, err := w.CreateWorkspace(t.Context(), w.project, controller.CreateRequest{
		Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 3}, Env: map[string]string{"A": "1"}, Egress: core.EgressAllowAll, Labels: map[string]string{"mine": "1"},
	}, wait)
	if err != nil {
		t.Fatal(err)
	}
	cp := w.checkpoint(a.Result.Workspace.ID)
	child := w.fork(cp.ID, 1)[0]
	if child.Env["A"] != "1" || child.Egress != core.EgressAllowAll || child.Resources.DiskGiB != 3 || len(child.Labels) != 0 {
		t.Errorf("%+v", child)
	}
	a, err = w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1, Env: map[string]string{"B": "2"}, Egress: core.EgressDenyAll, TTL: time.Hour}, wait)
	if err != nil {
		t.Fatal(err)
	}
	own := a.Result.Children[0].Workspace
	if len(own.Env) != 1 || own.Env["B"] != "2" || own.Egress != core.EgressDenyAll || own.ExpiresAt.IsZero() {
		t.Errorf("%+v", own)
	}
}

// TestHostnamesNeverCollide names a workspace like the host of a restored one.
func TestHostnamesNeverCollide(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	a, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait)
	if err != nil {
		t.Fatal(err)
	}
	host := a.Result.Workspace.Sandbox.Identity.Hostname
	twin := w.create(host)
	if twin.Name != host || twin.Sandbox.Identity.Hostname == host {
		t.Errorf("%q has host %q", twin.Name, twin.Sandbox.Identity.Hostname)
	}
}

func TestPortsFollowARestore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	p, err := w.Ports().Open(t.Context(), w.project, ws.ID, 80, netip.MustParseAddrPort("127.0.0.1:0"))
	if err != nil {
		t.Fatal(err)
	}
	a, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait)
	if err != nil {
		t.Fatal(err)
	}
	held := w.runner.Ports(a.Result.Workspace.Sandbox.ID)
	if len(held) != 1 || held[0].ID != p.ID || held[0].Listen.String() != p.Listen {
		t.Errorf("after the restore: %+v, it was %+v", held, p)
	}
	child := w.fork(cp.ID, 1)[0]
	if list, err := w.Ports().List(t.Context(), w.project, child.ID); err != nil || len(list) != 0 {
		t.Errorf("a fork has inherited ports: %+v, %v", list, err)
	}
	w.runner.Hook(func(_ context.Context, at, _ string) error {
		if at == runnertest.PointPort {
			return core.Errorf(core.Conflict, core.CodeStateConflict, "the address is taken")
		}
		return nil
	})
	_, err = w.Ports().Open(t.Context(), w.project, ws.ID, 81, netip.MustParseAddrPort("127.0.0.1:1"))
	wantCode(t, err, core.CodeStateConflict)
	if list, err := w.Ports().List(t.Context(), w.project, ws.ID); err != nil || len(list) != 1 {
		t.Errorf("a port that was not opened is listed: %+v, %v", list, err)
	}
}

// TestInheritedSessionsInOrder lists a fork's sessions newest first, page by page: what was started in it, and then what it inherited, in
// the order of its parent.
func TestInheritedSessionsInOrder(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	start := func(id core.WorkspaceID) core.SessionID {
		t.Helper()
		s, err := w.StartSession(t.Context(), w.project, id, controller.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
		if err != nil {
			t.Fatal(err)
		}
		return s.GuestID
	}
	list := func(id core.WorkspaceID) (guest []core.SessionID) {
		t.Helper()
		for p := (controller.Page{Limit: 3}); ; {
			page, err := w.Sessions(t.Context(), w.project, id, p)
			if err != nil {
				t.Fatal(err)
			}
			for _, s := range page {
				guest = append(guest, s.GuestID)
			}
			if len(page) < p.Limit {
				return guest
			}
			p.After = string(page[len(page)-1].ID)
		}
	}
	parent := w.create("main")
	for range 8 {
		start(parent.ID)
	}
	want := list(parent.ID)
	if len(want) != 8 {
		t.Fatalf("the parent has %v", want)
	}
	child := w.fork(w.checkpoint(parent.ID).ID, 1)[0]
	own := start(child.ID)
	want = append([]core.SessionID{own}, want...)
	if diff := cmp.Diff(want, list(child.ID)); diff != "" {
		t.Errorf("sessions of the fork (-want +got):\n%s", diff)
	}
	grandchild := w.fork(w.checkpoint(child.ID).ID, 1)[0]
	if diff := cmp.Diff(want, list(grandchild.ID)); diff != "" {
		t.Errorf("sessions of a fork of the fork (-want +got):\n%s", diff)
	}
}

// TestSessionsFollowTheSandbox inherits a running program into a fork under another id, and ends all of them with their epoch.
func TestSessionsFollowTheSandbox(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	s, err := w.StartSession(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"cat"}, StdinOpen: true})
	if err != nil {
		t.Fatal(err)
	}
	cp := w.checkpoint(ws.ID)
	child := w.fork(cp.ID, 1)[0]
	list, err := w.Sessions(t.Context(), w.project, child.ID, controller.Page{Limit: 10})
	if err != nil || len(list) != 1 || list[0].ID == s.ID || list[0].GuestID != s.GuestID || list[0].WorkspaceID != child.ID {
		t.Fatalf("%+v, %v", list, err)
	}
	if got, err := w.Session(t.Context(), w.project, list[0].ID, 0); err != nil || got.Guest.Command[0] != "cat" {
		t.Errorf("%+v, %v", got, err)
	}
	token, _, err := w.Attach(t.Context(), w.project, s.ID)
	if err != nil {
		t.Fatal(err)
	}
	if _, _, _, err := w.UseAttachToken(t.Context(), list[0].ID, token); core.CodeOf(err) != core.CodeUnauthenticated {
		t.Errorf("the parent's token opens the child's session: %v", err)
	}
	if _, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait); err != nil {
		t.Fatal(err)
	}
	_, err = w.Session(t.Context(), w.project, s.ID, 0)
	wantCode(t, err, core.CodeSessionNotFound)
	if _, _, _, err := w.UseAttachToken(t.Context(), s.ID, token); core.CodeOf(err) != core.CodeUnauthenticated {
		t.Errorf("a token of the old epoch still works: %v", err)
	}
	if _, err := w.DeleteSessionOf(list[0].ID); err != nil {
		t.Error(err)
	}
}

// DeleteSessionOf deletes a session of the world's project.
func (w *world) DeleteSessionOf(id core.SessionID) (struct{}, error) {
	return struct{}{}, w.DeleteSession(w.t.Context(), w.project, id)
}

func TestExecWhileCapturing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	g := w.gate(runnertest.PointCapture)
	if _, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, 0); err != nil {
		t.Fatal(err)
	}
	<-g.reached
	out, err := w.Exec(t.Context(), w.project, ws.ID, controller.ExecRequest{Command: []string{"echo", "hi"}})
	if err != nil || string(out.Stdout) != "hi\n" {
		t.Errorf("%+v, %v", out, err)
	}
	close(g.open)
}

func TestAuthentication(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, _ *runnertest.Config) { c.KeyCache = 50 * time.Millisecond })
	key, err := w.Tenancy.Authenticate(t.Context(), "coppice-test-key")
	if err != nil || key.ProjectID != w.project {
		t.Fatalf("%+v, %v", key, err)
	}
	_, err = w.Tenancy.Authenticate(t.Context(), "coppice-test-kez")
	wantCode(t, err, core.CodeUnauthenticated)
	w.sql(`UPDATE api_keys SET revoked_at = now()`)
	eventually(t, "the revocation is seen", func() bool {
		_, err := w.Tenancy.Authenticate(t.Context(), "coppice-test-key")
		return core.CodeOf(err) == core.CodeUnauthenticated
	})
}

// countingStore counts the transactions of one project.
type countingStore struct {
	controller.Store
	mu    sync.Mutex
	count map[controller.Scope]int
}

func (s *countingStore) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	s.mu.Lock()
	s.count[scope]++
	s.mu.Unlock()
	return s.Store.InTx(ctx, scope, fn)
}

// TestForkTakesTwoTransactions counts them, for one child and for many (DECISIONS 13).
func TestForkTakesTwoTransactions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	store := &countingStore{Store: w.store, count: map[controller.Scope]int{}}
	// It has no loops, which have transactions of their own and would renew the leases.
	c := controller.New(inCluster(controller.Config{OperationLease: time.Hour}), store, w.client, logger(t))
	scope := controller.InProject(w.project)
	for _, n := range []int{1, 100} {
		store.count[scope] = 0
		if a, err := c.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: n}, wait); err != nil || len(a.Result.Children) != n {
			t.Fatal(err)
		}
		if got := store.count[scope]; got != 2 {
			t.Errorf("fork(%d) took %d transactions", n, got)
		}
	}
	store.count[scope] = 0
	if _, err := c.ForkWorkspace(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 10}, wait); err != nil {
		t.Fatal(err)
	}
	if got := store.count[scope]; got != 3 { // the capture is written while the children grow
		t.Errorf("a fork of a workspace took %d transactions", got)
	}
	w.consistent()
}

func TestShutdownRefuses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.create("main")
	w.stop()
	_, err := w.CreateCheckpoint(t.Context(), w.project, ws.ID, controller.CheckpointRequest{}, wait)
	wantCode(t, err, core.CodeControllerStopping)
}

func TestManyParallelForks(t *testing.T) {
	t.Parallel()
	w := newWorld(t, func(c *controller.Config, rc *runnertest.Config) {
		rc.Fork, c.OperationLease = 20*time.Millisecond, time.Hour // a lease that ends on a busy machine is an answer "not done yet"
	})
	cp := w.checkpoint(w.create("main").ID)
	const requests = 100
	var group sync.WaitGroup
	for range requests {
		group.Go(func() {
			a, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
			if err != nil || len(a.Result.Children) != 2 {
				t.Errorf("%+v, %v", a, err)
			}
		})
	}
	group.Wait()
	for _, column := range []string{"ip", "mac", "machine_id", "hostname", "generation"} {
		if n := w.number(`SELECT count(DISTINCT ` + column + `) FROM sandboxes`); n != 2*requests+1 {
			t.Errorf("%d different %s", n, column)
		}
	}
	w.consistent()
}

// panicking is a runner client with a fault of its own.
type panicking struct{ controller.Runners }

func (panicking) Fork(context.Context, string, runnerapi.Fork) (runnerapi.ForkResult, error) {
	panic("a programmer's mistake")
}

func TestPanicEndsTheOperationOnly(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	cp := w.checkpoint(w.create("main").ID)
	c := controller.New(inCluster(controller.Config{OperationLease: time.Hour}), w.store, panicking{w.client}, logger(t))
	_, err := c.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
	wantCode(t, err, core.CodeInternal)
	if strings.Contains(core.MessageOf(err), "mistake") {
		t.Errorf("the cause is shown: %v", err)
	}
	w.consistent()
}
