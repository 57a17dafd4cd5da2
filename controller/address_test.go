package controller_test

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/placement"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// fill gives living sandboxes of a runner and a tree all addresses but one in 51, and those that somebody has already.
func (w *world) fill(like controller.Workspace, runner core.RunnerID, tree string) {
	w.t.Helper()
	w.sql(fmt.Sprintf(`SET session_replication_role = replica; INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, mac, ip, tree_id)
		SELECT k || 'x' || n, s.project_id, 'none', k * 100000 + n, '%s', 1, 512, k || 'x' || n, k || 'x' || n, md5(k || 'x' || n),
			'06:00:' || lpad(to_hex(k), 2, '0') || ':' || substr(h, 1, 2) || ':' || substr(h, 3, 2) || ':' || substr(h, 5, 2), p.ip, '%s'
		FROM (SELECT row_number() OVER (ORDER BY a, b)::int AS n, lpad(to_hex(row_number() OVER (ORDER BY a, b)), 6, '0') AS h, '10.83.' || a || '.' || b AS ip
			FROM generate_series(1, 255) AS a, generate_series(0, 255) AS b WHERE (a, b) <> (255, 255)) AS p, sandboxes s,
			(SELECT count(DISTINCT (runner_id, tree_id))::int AS k FROM sandboxes) AS c
		WHERE s.id = '%s' AND p.n %% 51 <> 0 AND p.ip NOT IN (SELECT ip FROM sandboxes WHERE ended_at IS NULL)`, runner, tree, like.Sandbox.ID))
}

// left reports whether an address is one of those that fill leaves.
func left(w controller.Workspace) bool {
	b := w.Sandbox.Identity.IP.As4()
	return ((int(b[2])-1)*256+int(b[3])+1)%51 == 0
}

// TestAddressesOfATree makes every kind of child of a workspace whose tree has nearly all addresses, on a runner that is far away. Each
// child gets one of the few that are left, wherever it is, and no two the same.
func TestAddressesOfATree(t *testing.T) {
	t.Parallel()
	p := newPool(t)
	ws, cp := p.first("a")
	other, _ := p.first("b")
	p.fill(ws, "far", ws.Sandbox.Tree)
	seen := map[string]string{ws.Sandbox.Identity.IP.String(): "parent"}
	wants := func(what string, list ...controller.Workspace) {
		t.Helper()
		for _, w := range list {
			ip := w.Sandbox.Identity.IP.String()
			if seen[ip] != "" || !left(w) {
				t.Errorf("%s has the address %s, which somebody of its tree has (%s)", what, ip, seen[ip])
			}
			seen[ip] = what
		}
	}
	first := p.fork(cp.ID, 3)
	wants("a fork", first...)
	p.drain(p.runner, true)
	wants("a later fork of the same checkpoint, on another runner", p.fork(cp.ID, 3)...)
	p.drain(p.runner, false)
	a, err := p.ForkCheckpoint(t.Context(), p.project, cp.ID, controller.ForkRequest{Count: 4, Spread: true}, wait)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range a.Result.Children {
		wants("a fork that is spread", *c.Workspace)
	}
	a, err = p.ForkWorkspace(t.Context(), p.project, first[0].ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 2}, wait)
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range a.Result.Children {
		wants("a fork of a fork", *c.Workspace)
	}
	a, err = p.RestoreCheckpoint(t.Context(), p.project, cp.ID, controller.ForkRequest{Name: "named"}, wait)
	if err != nil {
		t.Fatal(err)
	}
	wants("a checkpoint that is restored", *a.Result.Workspace)
	for _, c := range []struct{ id, why string }{{string(ws.ID), "the parent, after a restore in place"}, {string(other.ID), "a workspace of another tree, after a restore in place to this one"}} {
		a, err := p.RestoreWorkspace(t.Context(), p.project, core.WorkspaceID(c.id), cp.ID, wait)
		if err != nil {
			t.Fatal(err)
		}
		wants(c.why, *a.Result.Workspace)
	}
	p.suspend(first[1].ID)
	wants("a fork that was suspended", p.resume(first[1].ID))

	// An image is not a parent: what is made of it has all addresses to choose from.
	var fresh []controller.Workspace
	for i := range 4 {
		fresh = append(fresh, p.create(fmt.Sprint("fresh-", i)))
	}
	if !slices.ContainsFunc(fresh, func(w controller.Workspace) bool { return !left(w) }) {
		t.Error("workspaces that are made of an image get only addresses that no fork of another workspace has")
	}
	for _, w := range fresh {
		if w.Sandbox.Tree != string(w.ID) {
			t.Errorf("a workspace that is made of an image is of the tree %s", w.Sandbox.Tree)
		}
	}
}

// TestAddressesOfARunner gives one runner nearly all addresses. What is made on it gets the few that are left; what is made on another
// gets any. Full, it gets nothing more, and another is chosen.
func TestAddressesOfARunner(t *testing.T) {
	t.Parallel()
	p := newPool(t, func(_ *controller.Config, r *runnertest.Config) { r.Capacity = runnerapi.Capacity{} })
	ws, cp := p.first("a")
	theirs := p.create("b")
	p.fill(theirs, p.runner.ID(), "theirs")
	p.drain(p.second, true)
	for _, w := range append(p.fork(cp.ID, 4), p.create("c")) {
		if w.Sandbox.RunnerID != p.runner.ID() || !left(w) {
			t.Errorf("on runner %s a sandbox got %s", w.Sandbox.RunnerID, w.Sandbox.Identity.IP)
		}
	}
	p.drain(p.second, false)
	p.drain(p.runner, true)
	if !slices.ContainsFunc(p.fork(cp.ID, 4), func(w controller.Workspace) bool { return !left(w) }) {
		t.Error("on another runner sandboxes get only addresses that no sandbox of the first has")
	}
	p.drain(p.runner, false)

	p.sql(`UPDATE runner_loads SET sandboxes = $2 WHERE runner_id = $1`, p.runner.ID(), placement.MaxSandboxes)
	for _, w := range append(p.fork(cp.ID, 1), p.create("d")) {
		if w.Sandbox.RunnerID != p.second.ID() {
			t.Errorf("a runner without addresses got a sandbox")
		}
	}
	p.sql(`UPDATE runner_loads SET sandboxes = $1`, placement.MaxSandboxes)
	_, err := p.ForkCheckpoint(t.Context(), p.project, cp.ID, controller.ForkRequest{Count: 1}, time.Nanosecond)
	wantCode(t, err, core.CodeCapacity)
	if p.state(ws.ID) != core.WorkspaceReady {
		t.Error("the parent is not ready")
	}
}

// wantedStore remembers for what addresses are drawn.
type wantedStore struct {
	controller.Store
	mu     sync.Mutex
	wanted []controller.AddressesWanted
}

type wantedTx struct {
	controller.AllTx
	s *wantedStore
}

func (s *wantedStore) InTx(ctx context.Context, scope controller.Scope, fn func(controller.AllTx) error) error {
	return s.Store.InTx(ctx, scope, func(tx controller.AllTx) error { return fn(wantedTx{tx, s}) })
}

func (t wantedTx) FreeAddresses(ctx context.Context, w controller.AddressesWanted) ([]string, error) {
	t.s.mu.Lock()
	t.s.wanted = append(t.s.wanted, w)
	t.s.mu.Unlock()
	return t.AllTx.FreeAddresses(ctx, w)
}

// TestAddressesOfThePast has no machine get the address that the captured one had, or that its workspace had until now, though no
// sandbox of its tree has it any more.
func TestAddressesOfThePast(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	store := &wantedStore{Store: w.store}
	var stop func()
	w.Controller, stop = w.startOn(store, controller.Config{})
	defer stop()
	ip := func(w controller.Workspace) string { return w.Sandbox.Identity.IP.String() }
	wants := func(what, tree string, except ...string) {
		t.Helper()
		store.mu.Lock()
		defer store.mu.Unlock()
		got := store.wanted[len(store.wanted)-1]
		for _, a := range except {
			if !slices.Contains(got.Except, a) {
				t.Errorf("%s may get %s: %+v", what, a, got)
			}
		}
		if got.Tree != tree {
			t.Errorf("%s is of the tree %s, not %s", what, got.Tree, tree)
		}
	}
	ws, other := w.create("main"), w.create("other")
	cp := w.checkpoint(ws.ID)
	tree := ws.Sandbox.Tree
	if _, err := w.Terminate(t.Context(), w.project, ws.ID, wait); err != nil {
		t.Fatal(err)
	}
	child := w.fork(cp.ID, 1)[0]
	wants("a fork of what has ended", tree, ip(ws))
	w.suspend(child.ID)
	w.resume(child.ID)
	wants("a resumed workspace", tree, ip(child))
	if _, err := w.RestoreWorkspace(t.Context(), w.project, other.ID, cp.ID, wait); err != nil {
		t.Fatal(err)
	}
	wants("a workspace that is restored to what came from another", tree, ip(ws), ip(other))
	if _, err := w.ForkWorkspace(t.Context(), w.project, child.ID, controller.CheckpointRequest{}, controller.ForkRequest{Count: 1}, wait); err != nil {
		t.Fatal(err)
	}
	wants("a fork beside its parent", tree)
	w.fork(ws.Parent, 2)
	wants("what grows from a template", string(w.project)+" "+string(ws.Parent))
}

// TestManyLiveWorkspaces has a cluster of a few runners and trees grow, with -long to more than 100,000 workspaces that live at the same
// time: twice as many as one pool of addresses has.
func TestManyLiveWorkspaces(t *testing.T) {
	const runners, trees = 4, 4
	want := 2000
	if *long {
		want = 100_000
	} else {
		t.Parallel()
	}
	files, store := withStore(t)
	room := runnerapi.Capacity{Sandboxes: want, VCPUs: want, MemoryMiB: want << 10}
	w := newWorld(t, store, func(_ *controller.Config, r *runnertest.Config) { r.Capacity = room })
	w.quota(func(p *controller.QuotasPatch) { p.Workspaces, p.Children = new(int64(2*want)), new(int64(2*want)) })
	var roots []core.CheckpointID
	for i := range trees {
		ws := w.create(fmt.Sprint("root-", i))
		cp := w.checkpoint(ws.ID)
		if w.get(ws.Parent).State != core.CheckpointSealed {
			w.seal(files, ws.Parent)
		}
		w.seal(files, cp.ID)
		roots = append(roots, cp.ID)
	}
	for range runners - 1 {
		if _, err := runnertest.Start(t, runnertest.Config{Store: files, Capacity: room}).Announce(t.Context(), w.Fleet()); err != nil {
			t.Fatal(err)
		}
	}
	const batch = 250
	began := time.Now()
	for n := trees; n < want; n += batch {
		a, err := w.ForkCheckpoint(t.Context(), w.project, roots[n/batch%trees], controller.ForkRequest{Count: batch, Spread: true}, wait)
		if err != nil || !a.Done {
			t.Fatalf("after %d workspaces: %v", n, err)
		}
		for _, c := range a.Result.Children {
			if c.Problem != nil {
				t.Fatalf("after %d workspaces: %v", n, c.Problem)
			}
		}
		if n/batch%40 == 0 {
			t.Logf("%d workspaces after %.0f s", n, time.Since(began).Seconds())
		}
	}
	live := w.number(`SELECT count(*) FROM workspaces w JOIN sandboxes s ON s.id = w.sandbox_id AND s.ended_at IS NULL WHERE w.state = 'ready'`)
	addresses := w.number(`SELECT count(DISTINCT ip) FROM sandboxes WHERE ended_at IS NULL`)
	t.Logf("%d live workspaces have %d addresses on %d runners in %d trees", live, addresses, runners, trees)
	if live < want {
		t.Errorf("%d workspaces live, not %d", live, want)
	}
	for what, key := range map[string]string{"runner": "runner_id", "tree": "tree_id"} {
		if n := w.number(`SELECT count(*) FROM (SELECT FROM sandboxes WHERE ended_at IS NULL GROUP BY ` + key + `, ip HAVING count(*) > 1) x`); n != 0 {
			t.Errorf("%d addresses are used twice by a %s", n, what)
		}
	}
	if n := w.number(`SELECT count(DISTINCT tree_id) FROM sandboxes WHERE ended_at IS NULL`); n != trees {
		t.Errorf("%d trees, not %d", n, trees)
	}
}

// TestAmongManyLiveWorkspaces has a controller work in a cluster whose runners all give the same addresses, with -long to 102,400
// workspaces that live. What it reads does not grow with them.
func TestAmongManyLiveWorkspaces(t *testing.T) {
	runners, each := 20, 64
	if *long {
		runners = 1600
	} else {
		t.Parallel()
	}
	w := quiet(t)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	w.crowd(ws, cp.ID, runners, each, 1)
	live, addresses := w.number(`SELECT count(*) FROM sandboxes WHERE ended_at IS NULL`), w.number(`SELECT count(DISTINCT ip) FROM sandboxes WHERE ended_at IS NULL`)
	t.Logf("%d live workspaces have %d addresses", live, addresses)
	if live <= runners*each || addresses > each+1 {
		t.Fatal("the runners do not give the same addresses")
	}
	for _, c := range []struct {
		name string
		do   func(*world)
	}{
		{"create", func(w *world) { w.create("another") }},
		{"fork", func(w *world) { w.fork(cp.ID, 8) }},
		{"restore", func(w *world) {
			if _, err := w.RestoreWorkspace(t.Context(), w.project, ws.ID, cp.ID, wait); err != nil {
				t.Error(err)
			}
		}},
	} {
		got := w.counted(c.do)
		t.Logf("%s: %d rows read:%s", c.name, got.rows(), got)
		if got.rows("sandboxes") > 100 {
			t.Errorf("%s reads %d sandboxes", c.name, got.rows("sandboxes"))
		}
	}
	if n := w.number(`SELECT count(*) FROM (SELECT FROM sandboxes WHERE ended_at IS NULL GROUP BY runner_id, ip HAVING count(*) > 1) x`); n != 0 {
		t.Errorf("%d addresses are used twice on a runner", n)
	}
}
