package postgres_test

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

// another registers one more runner.
func (d *db) another() core.RunnerID {
	d.t.Helper()
	info := d.info()
	info.RunnerID = core.NewID[core.RunnerID]()
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: info, Endpoint: "http://127.0.0.1:2"}, time.Minute)
		return err
	})
	return info.RunnerID
}

// fill gives living sandboxes of a runner and a tree all addresses but one in each so many. They belong to the workspace w.
func (d *db) fill(w controller.Workspace, runner core.RunnerID, tree string, each int) {
	d.t.Helper()
	d.exec(fmt.Sprintf(`SET session_replication_role = replica; INSERT INTO sandboxes (id, project_id, workspace_id, epoch, runner_id, vcpus, memory_mib, generation, hostname, machine_id, mac, ip, tree_id)
		SELECT 'sbx_' || k || 'x' || n, s.project_id, s.workspace_id, 2 + k * 100000 + n, '%s', 1, 512, k || 'x' || n, k || 'x' || n, md5(k || 'x' || n),
			'06:00:' || lpad(to_hex(k), 2, '0') || ':' || substr(h, 1, 2) || ':' || substr(h, 3, 2) || ':' || substr(h, 5, 2), p.ip, '%s'
		FROM (SELECT row_number() OVER (ORDER BY a, b)::int AS n, lpad(to_hex(row_number() OVER (ORDER BY a, b)), 6, '0') AS h, '10.83.' || a || '.' || b AS ip
			FROM generate_series(1, 255) AS a, generate_series(0, 255) AS b WHERE (a, b) <> (255, 255)) AS p, sandboxes s, (SELECT %d AS k) AS c
		WHERE s.id = '%s' AND p.n %% %d <> 0 AND (p.ip <> s.ip OR s.runner_id <> '%s')`, runner, tree, d.count.Add(1), w.Sandbox.ID, each, runner))
}

// TestAddressByRunnerAndTree lets the database decide who may have an address that somebody has.
func TestAddressByRunnerAndTree(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from, elsewhere, other := d.template(), d.another(), d.newProject("other")
	planned := func(project core.ProjectID, runner core.RunnerID, tree string) controller.Workspace {
		w := d.plan(project, from)
		w.Sandbox.RunnerID, w.Sandbox.Tree = runner, tree
		return w
	}
	first := planned(d.project, d.runner, "one")
	try := func(w controller.Workspace) error {
		w.Sandbox.Identity.IP = first.Sandbox.Identity.IP
		return d.try(controller.InProject(w.ProjectID), func(ctx context.Context, tx controller.AllTx) error { return insert(ctx, tx, w) })
	}
	if err := try(first); err != nil {
		t.Fatal(err)
	}
	for name, w := range map[string]controller.Workspace{
		"the same runner": planned(d.project, d.runner, "two"), "the same runner, for another project": planned(other, d.runner, "two"),
		"another runner, in the same tree": planned(d.project, elsewhere, "one"),
	} {
		if err := try(w); !errors.Is(err, controller.ErrIdentityTaken) {
			t.Errorf("%s: %v", name, err)
		}
	}
	second := planned(d.project, elsewhere, "two")
	if err := try(second); err != nil {
		t.Errorf("another runner and another tree: %v", err)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		return tx.EndSandboxes(ctx, []core.SandboxID{second.Sandbox.ID})
	})
	if err := try(planned(d.project, elsewhere, "two")); err != nil {
		t.Errorf("after the sandbox has ended: %v", err)
	}
}

// TestSiblingsRace has two connections give the same address to two forks on two runners at the same time.
func TestSiblingsRace(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	first, second := d.plan(d.project, from), d.plan(d.project, from)
	second.Sandbox.RunnerID, second.Sandbox.Identity.IP = d.another(), first.Sandbox.Identity.IP
	first.Sandbox.Tree, second.Sandbox.Tree = "one", "one"
	d.collide(first, second)
}

// TestAddressesRunOut fills a runner, and then a tree on another runner, but for one address in 51. More than are left are refused there,
// and nowhere else.
func TestAddressesRunOut(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.newProject("other"), d.template()) // the addresses of a runner are those of all projects
	elsewhere := d.another()
	draw := func(n int, tree string, runners ...core.RunnerID) (list []string, err error) {
		want := controller.AddressesWanted{Tree: tree}
		for i := range n {
			want.Runners = append(want.Runners, runners[i%len(runners)])
		}
		err = d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) (err error) {
			if list, err = tx.FreeAddresses(ctx, want); err != nil {
				return err
			}
			if _, err := tx.Workspace(ctx, w.ID); core.CategoryOf(err) != core.NotFound {
				t.Errorf("the scope was not restored after looking at the cluster: %v", err)
			}
			return nil
		})
		return list, err
	}
	check := func(full bool, tree string, runners ...core.RunnerID) {
		t.Helper()
		for _, n := range []int{1, 7, 256} {
			got, err := draw(n, tree, runners...)
			slices.Sort(got)
			if err != nil || len(got) != n || len(slices.Compact(slices.Clone(got))) != n {
				t.Fatalf("%d of %d addresses, %v", len(got), n, err)
			}
			for _, ip := range got {
				var a, b int
				if _, err := fmt.Sscanf(ip, "10.83.%d.%d", &a, &b); err != nil || full && ((a-1)*256+b+1)%51 != 0 {
					t.Errorf("%s was taken, %v", ip, err)
				}
			}
		}
		_, err := draw(1300, tree, runners...)
		if !full && err != nil {
			t.Errorf("where there is room: %v", err)
		} else if full {
			wantCode(t, err, core.CodeCapacity)
		}
	}
	d.fill(w, d.runner, "theirs", 51)
	d.exec(`ANALYZE sandboxes`)
	check(true, "mine", d.runner)
	check(false, "mine", elsewhere)
	if got := d.counted(func() {
		if _, err := draw(3, "mine", elsewhere); err != nil {
			t.Error(err)
		}
	}); got > 50 {
		t.Errorf("to draw 3 addresses where none is taken %d rows are read", got)
	}

	d.exec(`SET session_replication_role = replica; UPDATE sandboxes SET ended_at = now() WHERE hostname LIKE '%x%'`)
	mine := d.ready(d.project, d.template())
	d.fill(mine, d.another(), "mine", 51)
	check(true, "mine", d.runner)
	check(true, "mine", d.runner, elsewhere) // as siblings on several runners
	check(false, "another", d.runner, elsewhere)
}

func TestFreeAddressesAreInThePool(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		seen := map[string]bool{}
		var except []string // all but those of one /24 and a little
		excepted := map[string]bool{}
		for a := 1; a < 255; a++ {
			for b := range 256 {
				if a%100 != 0 {
					ip := fmt.Sprintf("10.83.%d.%d", a, b)
					except, excepted[ip] = append(except, ip), true
				}
			}
		}
		for i := range 20 {
			want := controller.AddressesWanted{Tree: "x", Runners: slices.Repeat([]core.RunnerID{d.runner}, 256)}
			if i%2 == 1 {
				want.Except = except
			}
			list, err := tx.FreeAddresses(ctx, want)
			if err != nil || len(list) != 256 {
				t.Fatalf("%d, %v", len(list), err)
			}
			clear(seen)
			for _, ip := range list {
				if seen[ip] || ip == "10.83.255.255" || len(ip) < 9 || ip[:7] == "10.83.0" || i%2 == 1 && excepted[ip] {
					t.Fatalf("%s", ip)
				}
				seen[ip] = true
			}
		}
		return nil
	})
}

// collide inserts two workspaces at once whose sandboxes share something that is unique: the second waits for the first, and fails.
func (d *db) collide(first, second controller.Workspace) {
	d.t.Helper()
	holds, goes := make(chan struct{}), make(chan struct{})
	var group sync.WaitGroup
	var errs [2]error
	group.Go(func() {
		errs[0] = d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			err := insert(ctx, tx, first)
			close(holds)
			<-goes
			return err
		})
	})
	group.Go(func() {
		<-holds
		time.AfterFunc(50*time.Millisecond, func() { close(goes) }) // while the second waits for the first
		errs[1] = d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error { return insert(ctx, tx, second) })
	})
	group.Wait()
	if errs[0] != nil || !errors.Is(errs[1], controller.ErrIdentityTaken) {
		d.t.Errorf("first %v, second %v", errs[0], errs[1])
	}
}
