package controller_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

func (w *world) createAllowing(name string, allow ...string) controller.Workspace {
	w.t.Helper()
	a, err := w.CreateWorkspace(w.t.Context(), w.project, controller.CreateRequest{
		Name: name, Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}, Allow: allow,
	}, wait)
	if err != nil {
		w.t.Fatal(err)
	}
	return *a.Result.Workspace
}

func (w *world) allow(id core.WorkspaceID, allow ...string) (controller.Workspace, error) {
	if allow == nil {
		allow = []string{}
	}
	return w.PatchWorkspace(w.t.Context(), w.project, id, controller.WorkspacePatch{Allow: &allow})
}

func (w *world) mustAllow(id core.WorkspaceID, allow ...string) controller.Workspace {
	w.t.Helper()
	ws, err := w.allow(id, allow...)
	if err != nil {
		w.t.Fatal(err)
	}
	return ws
}

// wantRules looks at the row and, of a running workspace, at its runner.
func (w *world) wantRules(id core.WorkspaceID, allow ...string) {
	w.t.Helper()
	ws, err := w.Workspace(w.t.Context(), w.project, id)
	if err != nil {
		w.t.Fatal(err)
	}
	if !slices.Equal(ws.Rules.Allow, allow) {
		w.t.Errorf("workspace %s may reach %q, want %q", ws.Name, ws.Rules.Allow, allow)
	}
	if ws.State != core.WorkspaceReady {
		return
	}
	eventually(w.t, "its runner has the rules of "+ws.Name, func() bool {
		got := w.runner.Rules(ws.Sandbox.ID)
		return got.Version == ws.Rules.Version && slices.Equal(got.Allow, allow)
	})
	eventually(w.t, "it is known that its runner has them", func() bool {
		now, err := w.Workspace(w.t.Context(), w.project, id)
		return err == nil && !now.RulesPending()
	})
}

func (w *world) forkAllowing(cp core.CheckpointID, req controller.ForkRequest) (controller.Workspace, error) {
	req.Count = 1
	a, err := w.ForkCheckpoint(w.t.Context(), w.project, cp, req, wait)
	if err != nil {
		return controller.Workspace{}, err
	}
	return *a.Result.Children[0].Workspace, nil
}

// TestForksReachNoMore: a fork has today's rules of what it comes from, or fewer.
func TestForksReachNoMore(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	root := w.createAllowing("root", "*.wide.example", "a.example", "b.example:443")
	w.wantRules(root.ID, "*.wide.example", "a.example", "b.example:443")
	cp := w.checkpoint(root.ID)
	for _, c := range []struct {
		mode   core.EgressPolicy
		allow  []string // nil: not said
		want   []string
		beyond string
	}{
		{want: []string{"*.wide.example", "a.example", "b.example:443"}},
		{mode: core.EgressDenyAll, want: []string{"*.wide.example", "a.example", "b.example:443"}},
		{allow: []string{}, want: []string{}},
		{allow: []string{"a.example:80", "x.y.wide.example"}, want: []string{"a.example:80", "x.y.wide.example"}},
		{allow: []string{"b.example"}, beyond: "b.example"},
		{allow: []string{"a.example", "c.example", "wide.example"}, beyond: "c.example, wide.example"},
		{allow: []string{"tcp://a.example:443"}, beyond: "tcp://a.example:443"},
		{mode: core.EgressAllowAll, beyond: "allow-all"},
	} {
		req := controller.ForkRequest{Egress: c.mode}
		if c.allow != nil {
			req.Allow = &c.allow
		}
		child, err := w.forkAllowing(cp.ID, req)
		if c.beyond != "" {
			wantCode(t, err, core.CodeEgressBeyondParent)
			if !strings.Contains(err.Error(), c.beyond+": workspace ") || !strings.Contains(err.Error(), string(root.ID)) {
				t.Errorf("%+v: %v", c, err)
			}
			req.Count = 1
			if _, err := w.ForkWorkspace(t.Context(), w.project, root.ID, controller.CheckpointRequest{}, req, wait); core.CodeOf(err) != core.CodeEgressBeyondParent {
				t.Errorf("%+v, of the workspace: %v", c, err)
			}
			continue
		}
		if err != nil {
			t.Fatalf("%+v: %v", c, err)
		}
		w.wantRules(child.ID, c.want...)
	}
	if n := w.runner.Calls(runnertest.PointRules); n != 0 {
		t.Errorf("rules went to the runner %d times beside the forks that had them", n)
	}
	// Today's rules count, not those of when it was captured; also when the workspace has ended.
	w.mustAllow(root.ID, "a.example")
	child, err := w.forkAllowing(cp.ID, controller.ForkRequest{})
	if err != nil {
		t.Fatal(err)
	}
	w.wantRules(child.ID, "a.example")
	if _, err := w.Terminate(t.Context(), w.project, root.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.mustAllow(root.ID, "a.example:443")
	w.wantRules(child.ID, "a.example:443")
	if child, err = w.forkAllowing(cp.ID, controller.ForkRequest{}); err != nil {
		t.Fatal(err)
	}
	w.wantRules(child.ID, "a.example:443")
	wantCode(t, second(w.allow(child.ID, "a.example:80")), core.CodeEgressBeyondParent)
	// A bound does not go with the checkpoint.
	if err := w.DeleteCheckpoint(t.Context(), w.project, cp.ID); err != nil {
		t.Fatal(err)
	}
	wantCode(t, second(w.allow(child.ID, "a.example:80")), core.CodeEgressBeyondParent)
}

func second[T any](_ T, err error) error { return err }

// TestRulesOfATree: what is taken out above is out below, at once and on the hosts; what is let in above is not in below by itself.
func TestRulesOfATree(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	root := w.createAllowing("root", "a.example", "b.example", "*.c.example")
	narrow, empty := []string{"b.example:443", "x.c.example"}, []string{}
	child, err := w.forkAllowing(w.checkpoint(root.ID).ID, controller.ForkRequest{})
	if err != nil {
		t.Fatal(err)
	}
	cp := w.checkpoint(child.ID)
	grandchild, err := w.forkAllowing(cp.ID, controller.ForkRequest{Allow: &narrow})
	if err != nil {
		t.Fatal(err)
	}
	none, err := w.forkAllowing(cp.ID, controller.ForkRequest{Allow: &empty})
	if err != nil {
		t.Fatal(err)
	}
	if got := w.mustAllow(root.ID, "a.example:443", "b.example", "y.c.example"); got.RulesPending() {
		t.Error("the answer says that the rules are not in force")
	}
	w.wantRules(root.ID, "a.example:443", "b.example", "y.c.example")
	w.wantRules(child.ID, "a.example:443", "b.example", "y.c.example")
	w.wantRules(grandchild.ID, "b.example:443")
	w.wantRules(none.ID)
	if now, err := w.Workspace(t.Context(), w.project, none.ID); err != nil || now.Rules.Version != 1 {
		t.Errorf("rules that did not change are at version %d, %v", now.Rules.Version, err)
	}
	w.mustAllow(root.ID, "a.example", "b.example", "d.example")
	w.wantRules(child.ID, "a.example:443", "b.example")
	wantCode(t, second(w.allow(child.ID, "e.example")), core.CodeEgressBeyondParent)
	wantCode(t, second(w.allow(grandchild.ID, "d.example")), core.CodeEgressBeyondParent) // its own parent may not
	w.mustAllow(child.ID, "d.example")
	w.wantRules(child.ID, "d.example")
	w.wantRules(grandchild.ID)
	w.mustAllow(grandchild.ID, "d.example:443")
	w.wantRules(grandchild.ID, "d.example:443")
	// With a version that is not the present one nothing changes.
	_, err = w.PatchWorkspace(t.Context(), w.project, root.ID, controller.WorkspacePatch{Version: 1, Allow: &empty})
	wantCode(t, err, core.CodeVersionConflict)
	w.wantRules(root.ID, "a.example", "b.example", "d.example")
}

// TestRulesAndOtherModes: rules are for deny-all.
func TestRulesAndOtherModes(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	req := controller.CreateRequest{Resources: core.Resources{VCPUs: 1, MemoryMiB: 512, DiskGiB: 1}, Egress: core.EgressAllowAll, Allow: []string{"a.example"}}
	wantCode(t, second(w.CreateWorkspace(t.Context(), w.project, req, wait)), core.CodeInvalidField)
	req.Allow = nil
	a, err := w.CreateWorkspace(t.Context(), w.project, req, wait)
	if err != nil {
		t.Fatal(err)
	}
	open := *a.Result.Workspace
	wantCode(t, second(w.allow(open.ID, "a.example")), core.CodeInvalidField)
	cp := w.checkpoint(open.ID)
	allow := []string{"a.example"}
	wantCode(t, second(w.forkAllowing(cp.ID, controller.ForkRequest{Allow: &allow})), core.CodeInvalidField)
	child, err := w.forkAllowing(cp.ID, controller.ForkRequest{Egress: core.EgressDenyAll, Allow: &allow})
	if err != nil {
		t.Fatal(err)
	}
	w.wantRules(child.ID, "a.example")
	w.mustAllow(child.ID, "b.example") // everything is within allow-all
	w.wantRules(child.ID, "b.example")
}

// TestRulesReachRunnersLater: a runner that was away gets the rules when it is back, and nobody says so before.
func TestRulesReachRunnersLater(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.createAllowing("ws", "a.example")
	w.runner.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointRules {
			return runnertest.ErrVanish
		}
		return nil
	})
	got := w.mustAllow(ws.ID, "b.example")
	if !got.RulesPending() || got.Rules.Version != 2 {
		t.Errorf("%+v of a runner that took none", got.Rules)
	}
	calls := w.runner.Calls(runnertest.PointRules)
	eventually(t, "it is tried again", func() bool { return w.runner.Calls(runnertest.PointRules) > calls+1 })
	if now, err := w.Workspace(t.Context(), w.project, ws.ID); err != nil || !now.RulesPending() {
		t.Errorf("%+v, %v", now.Rules, err)
	}
	w.stop() // another controller does it
	w.runner.Hook(nil)
	w.Controller, _ = w.start(controller.Config{ClusterID: "test", LoopInterval: 50 * time.Millisecond})
	w.wantRules(ws.ID, "b.example")
}

// TestRulesThatChangeMeanwhile: rules that change while a sandbox is being made are its rules in the end.
func TestRulesThatChangeMeanwhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	ws := w.createAllowing("ws", "a.example", "b.example")
	cp := w.checkpoint(ws.ID)
	made, goOn := make(chan core.SandboxID, 1), make(chan struct{})
	w.runner.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointFork+runnertest.Done {
			made <- ""
			<-goOn
		}
		return nil
	})
	for _, begin := range []func() (core.WorkspaceID, error){
		func() (core.WorkspaceID, error) {
			_, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 1, Name: "child"}, 0)
			return "", err
		},
		func() (core.WorkspaceID, error) {
			_, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, 0)
			return ws.ID, err
		},
	} {
		w.mustAllow(ws.ID, "a.example", "b.example")
		id, err := begin()
		if err != nil {
			t.Fatal(err)
		}
		<-made
		w.mustAllow(ws.ID, "b.example")
		goOn <- struct{}{}
		if id == "" {
			list, err := w.Workspaces(t.Context(), w.project, controller.WorkspaceFilter{Name: "child", Page: controller.Page{Limit: 1}})
			if err != nil || len(list) != 1 {
				t.Fatal(list, err)
			}
			id = list[0].ID
		}
		eventually(t, "it is ready", func() bool { return w.state(id) == core.WorkspaceReady })
		w.wantRules(id, "b.example")
	}
}

// TestRestoresKeepRules: a restore in place and a resume have the workspace's present rules; the state of a workspace that may reach less is
// not restored into one that may reach more.
func TestRestoresKeepRules(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	root := w.createAllowing("root", "a.example", "b.example")
	cp := w.checkpoint(root.ID)
	w.mustAllow(root.ID, "b.example", "c.example")
	if _, err := w.RestoreWorkspace(t.Context(), w.project, root.ID, cp.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.wantRules(root.ID, "b.example", "c.example")
	if _, err := w.Suspend(t.Context(), w.project, root.ID, wait); err != nil {
		t.Fatal(err)
	}
	if got := w.mustAllow(root.ID, "b.example"); got.RulesPending() {
		t.Error("rules of what does not run are pending")
	}
	if _, err := w.Resume(t.Context(), w.project, root.ID, wait); err != nil {
		t.Fatal(err)
	}
	w.wantRules(root.ID, "b.example")
	none := []string{}
	child, err := w.forkAllowing(cp.ID, controller.ForkRequest{Allow: &none})
	if err != nil {
		t.Fatal(err)
	}
	own := w.checkpoint(child.ID)
	wantCode(t, second(w.RestoreWorkspace(t.Context(), w.project, root.ID, own.ID, wait)), core.CodeEgressBeyondParent)
	if _, err := w.RestoreWorkspace(t.Context(), w.project, child.ID, cp.ID, wait); err != nil { // the other way round
		t.Fatal(err)
	}
	w.wantRules(child.ID)
}

// TestForksAndRulesRace: forks and changes at the same time leave no fork that reaches more than its parent.
func TestForksAndRulesRace(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	root := w.createAllowing("root", "a.example")
	cp := w.checkpoint(root.ID)
	var group sync.WaitGroup
	for range 4 {
		group.Go(func() {
			for range 6 {
				if _, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: 2}, wait); err != nil {
					t.Error(err)
				}
			}
		})
	}
	for i := range 12 {
		entry := []string{"a.example", "b.example"}[i%2]
		w.mustAllow(root.ID, entry)
	}
	group.Wait()
	now, err := w.Workspace(t.Context(), w.project, root.ID)
	if err != nil {
		t.Fatal(err)
	}
	list, err := w.Workspaces(t.Context(), w.project, controller.WorkspaceFilter{Page: controller.Page{Limit: 100}, Parent: cp.ID})
	if err != nil || len(list) != 48 {
		t.Fatal(len(list), err)
	}
	for _, child := range list {
		if len(child.Rules.Allow) > 0 && !slices.Equal(child.Rules.Allow, now.Rules.Allow) {
			t.Errorf("a fork may reach %q, its parent %q", child.Rules.Allow, now.Rules.Allow)
		}
		w.wantRules(child.ID, child.Rules.Allow...)
	}
}

// slowStore lets a transaction wait before its end.
type slowStore struct{ controller.Store }

type slowKey struct{}

func (s slowStore) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	return s.Store.InTx(ctx, scope, func(tx controller.AllTx) error {
		err := fn(tx)
		if wait, ok := ctx.Value(slowKey{}).(func()); ok {
			wait()
		}
		return err
	})
}

// TestRulesWaitForForks: a fork that is being admitted while its parent's rules change is found by the change.
func TestRulesWaitForForks(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	slow, _ := w.startOn(slowStore{Store: w.store}, controller.Config{ClusterID: "test", LoopInterval: 50 * time.Millisecond})
	root := w.createAllowing("root", "a.example", "b.example")
	cp := w.checkpoint(root.ID)
	for _, fork := range []func(context.Context) (controller.Answer, error){
		func(ctx context.Context) (controller.Answer, error) {
			return slow.ForkCheckpoint(ctx, w.project, cp.ID, controller.ForkRequest{Count: 1}, wait)
		},
		func(ctx context.Context) (controller.Answer, error) {
			return slow.ForkWorkspace(ctx, w.project, root.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 1}, wait)
		},
	} {
		w.mustAllow(root.ID, "a.example", "b.example")
		admitted, goOn := make(chan struct{}), make(chan struct{})
		var once sync.Once
		ctx := context.WithValue(t.Context(), slowKey{}, func() {
			once.Do(func() {
				close(admitted)
				<-goOn
			})
		})
		forked := make(chan controller.Answer, 1)
		go func() {
			a, err := fork(ctx)
			if err != nil {
				t.Error(err)
			}
			forked <- a
		}()
		<-admitted
		changed := make(chan error, 1)
		go func() { changed <- second(w.allow(root.ID, "b.example")) }()
		// The change waits, as the database says, or has ended without.
		eventually(t, "the change waits", func() bool { return len(changed) > 0 || w.locksWanted() > 0 })
		close(goOn)
		if err := <-changed; err != nil {
			t.Fatal(err)
		}
		child := (<-forked).Result.Children[0].Workspace
		w.wantRules(child.ID, "b.example")
	}
}

// locksWanted counts who waits for an advisory lock.
func (w *world) locksWanted() (n int) {
	w.t.Helper()
	conn, err := pgx.Connect(w.t.Context(), w.dsn)
	if err != nil {
		w.t.Fatal(err)
	}
	err = conn.QueryRow(w.t.Context(), `SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted AND database = (SELECT oid FROM pg_database WHERE datname = current_database())`).Scan(&n)
	if err := errors.Join(err, conn.Close(w.t.Context())); err != nil {
		w.t.Fatal(err)
	}
	return n
}

// TestHungRunnerHoldsUpNobody: rules of other runners are given while one does not answer.
func TestHungRunnerHoldsUpNobody(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	p.drain(p.second, true)
	root := p.createAllowing("root", "a.example", "b.example")
	cp := p.checkpoint(root.ID)
	for _, id := range []core.CheckpointID{root.Parent, cp.ID} {
		if p.get(id).State != core.CheckpointSealed {
			p.seal(p.files, id)
		}
	}
	p.drain(p.second, false)
	p.drain(p.runner, true)
	child, err := p.forkAllowing(cp.ID, controller.ForkRequest{})
	if err != nil || child.Sandbox.RunnerID != p.second.ID() {
		t.Fatal(child.Sandbox.RunnerID, err)
	}
	goOn := make(chan struct{})
	p.runner.Hook(func(ctx context.Context, point, _ string) error {
		if point == runnertest.PointRules {
			select {
			case <-goOn:
			case <-ctx.Done():
			}
		}
		return nil
	})
	p.mustAllow(root.ID, "a.example", "b.example", "c.example")
	eventually(t, "the loop waits for the runner", func() bool { return p.runner.Calls(runnertest.PointRules) > 1 })
	var missed atomic.Bool
	p.second.Hook(func(_ context.Context, point, _ string) error {
		if point == runnertest.PointRules && missed.CompareAndSwap(true, false) { // so that the loop has to do it
			return runnertest.ErrVanish
		}
		return nil
	})
	meanwhile := false
	for i := 0; i < 5 && !meanwhile; i++ { // the loop may ask the one that hangs again in between
		missed.Store(true)
		calls := p.runner.Calls(runnertest.PointRules)
		p.mustAllow(child.ID, []string{"a.example", "b.example"}[i%2])
		eventually(t, "the other has its rules", func() bool {
			now, err := p.Workspace(t.Context(), p.project, child.ID)
			return err == nil && !now.RulesPending()
		})
		meanwhile = p.runner.Calls(runnertest.PointRules) == calls
	}
	if !meanwhile {
		t.Error("rules of a runner waited for another that hangs")
	}
	close(goOn)
	p.wantRules(root.ID, "a.example", "b.example", "c.example")
}
