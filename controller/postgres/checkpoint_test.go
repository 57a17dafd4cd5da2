package postgres_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func TestCheckpoints(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	cp := d.node(w, from.ID)
	if cp.State != core.CheckpointCaptured || cp.Root != from.ID || cp.Depth != 1 || cp.ParentProject != controller.SystemProject || cp.Class == nil ||
		cp.DeltaBytes != 1 || cp.DeviceStateBytes != 2 || cp.DiskBytes != 3 || cp.PauseMS != 4 || len(cp.Timings) != 1 || len(cp.ParentReseal) != 1 || len(cp.StaleProcesses) != 1 {
		t.Errorf("%+v", cp)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		got, err := tx.Checkpoint(ctx, cp.ID)
		if err != nil || got.Env["A"] != "1" || got.Egress != core.EgressDenyAll || got.Endpoint == "" {
			t.Errorf("%+v, %v", got, err)
		}
		if _, err := tx.CaptureCheckpoint(ctx, cp.ID, d.runner, d.captured()); core.CodeOf(err) != core.CodeStateConflict {
			t.Errorf("captured twice: %v", err)
		}
		if err := tx.FailCheckpoint(ctx, cp.ID, controller.Failure{Code: "X"}); err != nil {
			t.Errorf("failing what is captured does nothing: %v", err)
		}
		template, err := tx.LiveTemplate(ctx, controller.Runner{Info: d.info()}, from.Image.Digest, shape, false)
		if err != nil || template.ID != from.ID {
			t.Errorf("template: %+v, %v", template, err)
		}
		other := controller.Runner{Info: d.info()}
		other.Info.Class.VMMVersion = "2"
		if _, err := tx.LiveTemplate(ctx, other, from.Image.Digest, shape, false); core.CategoryOf(err) != core.NotFound {
			t.Errorf("template of another class: %v", err)
		}
		return nil
	})
	failing := controller.Checkpoint{ID: core.NewID[core.CheckpointID](), ProjectID: d.project, Kind: controller.KindUser, Parent: cp.ID, WorkspaceID: w.ID, WorkspaceEpoch: 1, Image: w.Image, Resources: shape, Name: "named"}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		if err := tx.InsertCheckpoint(ctx, failing); err != nil {
			return err
		}
		return tx.FailCheckpoint(ctx, failing.ID, controller.Failure{Code: "NOT_QUIESCED", Message: "pid 7"})
	})
	named := failing
	for i, want := range []core.Code{"", core.CodeNameTaken} { // the failed one does not hold the name
		named.ID = core.NewID[core.CheckpointID]()
		err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error { return tx.InsertCheckpoint(ctx, named) })
		if core.CodeOf(err) != want {
			t.Errorf("name, time %d: %v", i, err)
		}
	}
}

// TestTemplateIsSingle races two connections for one template.
func TestTemplateIsSingle(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	class := d.class
	var group sync.WaitGroup
	errs := make([]error, 4)
	for i := range errs {
		group.Go(func() {
			errs[i] = d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
				return tx.InsertCheckpoint(ctx, controller.Checkpoint{
					ID: core.NewID[core.CheckpointID](), ProjectID: controller.SystemProject, Kind: controller.KindTemplate, RunnerID: d.runner, Class: &class,
					Image: controller.ImageRef{Name: "base", Digest: d.image}, Resources: shape,
				})
			})
		})
	}
	group.Wait()
	made := 0
	for _, err := range errs {
		if err == nil {
			made++
		} else if !errors.Is(err, controller.ErrTemplateExists) {
			t.Error(err)
		}
	}
	if made != 1 {
		t.Errorf("%d were made", made)
	}
}

func TestPatchCheckpoint(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	cp := d.node(w, w.Head)
	patch := func(p controller.CheckpointPatch) (controller.Checkpoint, error) {
		var got controller.Checkpoint
		err := d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			var err error
			got, err = tx.PatchCheckpoint(ctx, cp.ID, p)
			return err
		})
		return got, err
	}
	name, empty := "best", ""
	got, err := patch(controller.CheckpointPatch{Version: 1, Name: &name, Annotations: map[string]json.RawMessage{"score": []byte("0.1"), "n": []byte("[1]")}})
	if err != nil || got.Version != 2 || got.Name != "best" || string(got.Annotations["score"]) != "0.1" {
		t.Errorf("%+v, %v", got, err)
	}
	got, err = patch(controller.CheckpointPatch{Name: &empty, Annotations: map[string]json.RawMessage{"score": []byte("null")}, Labels: map[string]*string{"k": nil}})
	if err != nil || got.Version != 3 || got.Name != "" || len(got.Annotations) != 1 || len(got.Labels) != 0 {
		t.Errorf("%+v, %v", got, err)
	}
	// Twenty writers count up by compare-and-set: none is lost.
	const writers = 20
	var group sync.WaitGroup
	for range writers {
		group.Go(func() {
			for {
				var now controller.Checkpoint
				d.mine(func(ctx context.Context, tx controller.AllTx) error {
					var err error
					now, err = tx.Checkpoint(ctx, cp.ID)
					return err
				})
				visits := 0
				if raw, ok := now.Annotations["visits"]; ok {
					if err := json.Unmarshal(raw, &visits); err != nil {
						t.Error(err)
						return
					}
				}
				_, err := patch(controller.CheckpointPatch{Version: now.Version, Annotations: map[string]json.RawMessage{"visits": fmt.Append(nil, visits+1)}})
				if err == nil {
					return
				}
				if core.CodeOf(err) != core.CodeVersionConflict {
					t.Error(err)
					return
				}
			}
		})
	}
	group.Wait()
	if got, err = patch(controller.CheckpointPatch{}); err != nil || string(got.Annotations["visits"]) != fmt.Sprint(writers) {
		t.Errorf("visits: %s, %v", got.Annotations["visits"], err)
	}
}

func TestDeleteCheckpoint(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	a := d.node(w, from.ID)
	b := d.node(w, a.ID)
	c := d.node(w, b.ID)
	remove := func(id core.CheckpointID) error {
		return d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.DeleteCheckpoint(ctx, id, false)
			return err
		})
	}
	shown := func() int {
		n := 0
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			nodes, err := tx.Tree(ctx, from.ID, controller.TreePage{Page: page(100), MaxDepth: -1})
			n = len(nodes)
			return err
		})
		return n
	}
	for range 2 { // idempotent
		if err := remove(b.ID); err != nil {
			t.Fatal(err)
		}
	}
	if n := shown(); n != 4 {
		t.Errorf("a deleted ancestor is shown: %d", n)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error { // it is no longer a child that can be forked
		got, err := tx.Checkpoint(ctx, a.ID)
		if got.ChildrenCount != 0 {
			t.Errorf("children of a: %d", got.ChildrenCount)
		}
		return err
	})
	if err := remove(c.ID); err != nil {
		t.Fatal(err)
	}
	if n := shown(); n != 2 {
		t.Errorf("the deleted branch is gone: %d", n)
	}
	wantCode(t, remove(c.ID), core.CodeCheckpointNotFound)
	// A living workspace whose head is a deleted node may grow on from it: the node is an ancestor again.
	d.exec(`UPDATE workspaces SET checkpoint_id = $1, checkpoint_project_id = $2 WHERE id = $3`, c.ID, d.project, w.ID)
	child := d.node(w, c.ID)
	if n := shown(); n != 5 || child.Depth != 4 {
		t.Errorf("from a deleted head: %d shown, depth %d", n, child.Depth)
	}
	// In use: an operation that has not ended names it.
	op := controller.Operation{ID: core.NewID[core.OperationID](), ProjectID: d.project, Kind: controller.OpForkCheckpoint, Input: []byte(`{}`), LeaseOwner: "o", CheckpointID: a.ID}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		var err error
		op, err = tx.InsertOperation(ctx, op, time.Minute)
		return err
	})
	wantCode(t, remove(a.ID), core.CodeCheckpointInUse)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		op.State, op.Problem = core.OperationFailed, core.Errorf(core.Internal, "X", "x")
		_, err := tx.FinishOperation(ctx, op)
		return err
	})
	if err := remove(a.ID); err != nil {
		t.Error(err)
	}
}

// TestDeleteWaitsForAFork lets a fork hold a checkpoint while another connection deletes it.
func TestDeleteWaitsForAFork(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	w := d.ready(d.project, d.template())
	cp := d.node(w, w.Head)
	held, removed := make(chan struct{}), make(chan error, 1)
	go func() {
		<-held
		removed <- d.try(controller.InProject(d.project), func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.DeleteCheckpoint(ctx, cp.ID, false)
			return err
		})
	}()
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		tx.LockCheckpoint(cp.ID)
		if _, err := tx.Checkpoint(ctx, cp.ID); err != nil {
			return err
		}
		close(held)
		select {
		case err := <-removed:
			t.Errorf("it did not wait: %v", err)
		case <-time.After(100 * time.Millisecond):
		}
		_, err := tx.InsertOperation(ctx, controller.Operation{
			ID: core.NewID[core.OperationID](), ProjectID: d.project, Kind: controller.OpForkCheckpoint, Input: []byte(`{}`), LeaseOwner: "o", CheckpointID: cp.ID,
		}, time.Minute)
		return err
	})
	wantCode(t, <-removed, core.CodeCheckpointInUse)
}

// TestTreeAgainstModel grows a random tree and compares lineage, children, tree and pages with one in memory.
func TestTreeAgainstModel(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	seed := time.Now().UnixNano()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(uint64(seed), 1))
	from := d.template()
	w := d.ready(d.project, from)
	parent := map[core.CheckpointID]core.CheckpointID{from.ID: ""}
	depth := map[core.CheckpointID]int{from.ID: 0}
	all := []core.CheckpointID{from.ID}
	for range 150 {
		p := all[random.IntN(len(all))]
		n := d.node(w, p)
		parent[n.ID], depth[n.ID] = p, depth[p]+1
		all = append(all, n.ID)
	}
	below := func(id, top core.CheckpointID) (int, bool) {
		for n := 0; id != ""; n++ {
			if id == top {
				return n, true
			}
			id = parent[id]
		}
		return 0, false
	}
	for range 30 {
		top := all[random.IntN(len(all))]
		limit, maxDepth := 1+random.IntN(40), random.IntN(6)-1
		var want []string
		for _, id := range all {
			if n, ok := below(id, top); ok && (maxDepth < 0 || n <= maxDepth) {
				want = append(want, fmt.Sprintf("%06d:%s", n, id))
			}
		}
		slices.Sort(want)
		var got []string
		p := controller.TreePage{Page: page(limit), MaxDepth: maxDepth}
		for {
			var nodes []controller.TreeNode
			d.mine(func(ctx context.Context, tx controller.AllTx) error {
				var err error
				nodes, err = tx.Tree(ctx, top, p)
				return err
			})
			for _, n := range nodes {
				got = append(got, fmt.Sprintf("%06d:%s", n.Depth, n.Checkpoint.ID))
				p.AfterDepth, p.After = n.Depth, string(n.Checkpoint.ID)
			}
			if len(nodes) < limit {
				break
			}
		}
		if !slices.Equal(got, want) {
			t.Fatalf("tree of %s (limit %d, depth %d):\n got %v\nwant %v", top, limit, maxDepth, got, want)
		}
		var lineage []core.CheckpointID
		for id := top; id != ""; id = parent[id] {
			lineage = append(lineage, id)
		}
		var walked []core.CheckpointID
		for after := core.CheckpointID(""); ; {
			var list []controller.Ancestor
			d.mine(func(ctx context.Context, tx controller.AllTx) error {
				var err error
				list, err = tx.Lineage(ctx, top, after, 3)
				return err
			})
			for _, c := range list {
				walked = append(walked, c.ID)
				after = c.ID
			}
			if len(list) < 3 {
				break
			}
		}
		if !slices.Equal(walked, lineage) {
			t.Fatalf("lineage of %s: %v, want %v", top, walked, lineage)
		}
	}
}

// BenchmarkTree asks a tree of 100,000 nodes, 1,000 deep (FAULTS.md 3.6: ancestry p99 at most 20 ms).
func BenchmarkTree(b *testing.B) {
	d := newDB(b)
	from := d.template()
	w := d.ready(d.project, from)
	// 100 nodes in each of 1,000 generations, each below a node of the generation before; node (g, 0) is a chain.
	d.exec(`SET session_replication_role = replica; INSERT INTO checkpoints (id, project_id, kind, state, parent_project_id, parent_id, root_id, depth, workspace_id, workspace_epoch,
			image_name, image_digest, vcpus, memory_mib, disk_gib, runner_id, runner_class, class_key, base_id, captured_at)
		SELECT 'ckpt_' || lpad(g::text, 5, '0') || '_' || n, '` + string(d.project) + `', 'user', 'captured', CASE WHEN g = 1 THEN '` + string(controller.SystemProject) + `' ELSE '` + string(d.project) + `' END,
			CASE WHEN g = 1 THEN '` + string(from.ID) + `' ELSE 'ckpt_' || lpad((g - 1)::text, 5, '0') || '_' || (n / 2) END, '` + string(from.ID) + `', g, '` + string(w.ID) + `', 1,
			'base', '` + string(from.Image.Digest) + `', 1, 512, 1, '` + string(d.runner) + `', '{}', 'c', 'base_x', now()
		FROM generate_series(1, 1000) AS g, generate_series(0, 99) AS n; ANALYZE checkpoints`)
	deepest := core.CheckpointID("ckpt_01000_0")
	for _, c := range []struct {
		name string
		run  func(ctx context.Context, tx controller.AllTx) (int, error)
		want int
	}{
		{"lineage/page=100", func(ctx context.Context, tx controller.AllTx) (int, error) {
			list, err := tx.Lineage(ctx, deepest, "", 100)
			return len(list), err
		}, 100},
		{"lineage/all=1001", func(ctx context.Context, tx controller.AllTx) (int, error) {
			list, err := tx.Lineage(ctx, deepest, "", 2000)
			return len(list), err
		}, 1001},
		{"tree/root/first=100", func(ctx context.Context, tx controller.AllTx) (int, error) {
			list, err := tx.Tree(ctx, from.ID, controller.TreePage{Page: page(100), MaxDepth: -1})
			return len(list), err
		}, 100},
		{"tree/root/last=100", func(ctx context.Context, tx controller.AllTx) (int, error) {
			list, err := tx.Tree(ctx, from.ID, controller.TreePage{Page: controller.Page{After: "ckpt_00999_99", Limit: 100}, AfterDepth: 999, MaxDepth: -1})
			return len(list), err
		}, 100},
		{"tree/inner/first=100", func(ctx context.Context, tx controller.AllTx) (int, error) {
			list, err := tx.Tree(ctx, "ckpt_00500_0", controller.TreePage{Page: page(100), MaxDepth: -1})
			return len(list), err
		}, 100},
		{"children", func(ctx context.Context, tx controller.AllTx) (int, error) {
			list, err := tx.Checkpoints(ctx, controller.CheckpointFilter{Page: page(100), Parent: "ckpt_00500_0", OldestFirst: true})
			return len(list), err
		}, 2},
		{"list", func(ctx context.Context, tx controller.AllTx) (int, error) {
			list, err := tx.Checkpoints(ctx, controller.CheckpointFilter{Page: page(100), States: []core.CheckpointState{core.CheckpointCaptured}})
			return len(list), err
		}, 100},
	} {
		b.Run(c.name, func(b *testing.B) {
			var times []time.Duration
			for b.Loop() {
				start := time.Now()
				d.mine(func(ctx context.Context, tx controller.AllTx) error {
					n, err := c.run(ctx, tx)
					if n != c.want {
						b.Fatalf("%d nodes, want %d", n, c.want)
					}
					return err
				})
				times = append(times, time.Since(start))
			}
			slices.Sort(times)
			b.ReportMetric(core.Milliseconds(times[len(times)/2]), "p50-ms")
			b.ReportMetric(core.Milliseconds(times[len(times)*99/100]), "p99-ms")
		})
	}
}
