package postgres_test

import (
	"context"
	"slices"
	"strconv"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/core"
)

func TestRunnerLease(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	get := func() controller.Runner {
		var r controller.Runner
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			r, err = tx.Runner(ctx, d.runner)
			return err
		})
		return r
	}
	r := get()
	if !r.Fresh || r.LeaseEpoch != 1 || r.Info.Class != d.class || r.Info.Capacity.Sandboxes != 100 {
		t.Errorf("%+v", r)
	}
	var number int64
	var beaten controller.Beaten
	beat := func(epoch int64) error {
		return d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
			info := d.info()
			info.Allocated.Sandboxes = 7
			number++
			var err error
			beaten, err = tx.HeartbeatRunner(ctx, d.runner, runnerapi.Heartbeat{LeaseEpoch: epoch, Number: number, Answered: number - 1, Info: info}, controller.BeatTerms{Lease: time.Minute})
			return err
		})
	}
	if err := beat(1); err != nil {
		t.Fatal(err)
	}
	if r = get(); r.Info.Allocated.Sandboxes != 7 {
		t.Errorf("%+v", r)
	}
	// Settled compares with the heartbeat before: a workspace that became ready after it is not.
	settled := func() bool {
		var held []controller.HeldSandbox
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			held, err = tx.RunnerSandboxes(ctx, d.runner, controller.HeldFilter{All: true, Settled: beaten.Settled})
			return err
		})
		if len(held) != 1 || held[0].ID != w.Sandbox.ID || !held[0].Current || held[0].State != core.WorkspaceReady {
			t.Errorf("held: %+v", held)
		}
		return held[0].Settled
	}
	if !beaten.Next || beat(1) != nil || !settled() {
		t.Error("not settled although a heartbeat came after it was ready")
	}
	d.exec(`UPDATE workspaces SET ready_at = now()`)
	if beat(1) != nil || settled() {
		t.Error("settled although no heartbeat came since it was ready")
	}
	d.exec(`UPDATE runners SET lease_expires_at = now() - interval '30 s'`)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		got, err := tx.Workspace(ctx, w.ID)
		if !got.Unknown || got.State != core.WorkspaceReady {
			t.Errorf("with a silent runner: %+v", got)
		}
		return err
	})
	fence := func(hard time.Duration) []core.WorkspaceID {
		var lost []core.WorkspaceID
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			var err error
			if _, err = tx.FenceRunners(ctx, hard, 10); err != nil {
				return err
			}
			list, err := tx.FencedRunners(ctx, 10)
			if err != nil || len(list) == 0 {
				return err
			}
			lost, err = tx.LoseWorkspaces(ctx, list[0], controller.Failure{Code: core.CodeRunnerLost, Message: "silent"}, 10)
			return err
		})
		return lost
	}
	if lost := fence(time.Hour); len(lost) != 0 {
		t.Errorf("fenced too early: %v", lost)
	}
	if lost := fence(20 * time.Second); len(lost) != 1 || lost[0] != w.ID {
		t.Errorf("fenced: %v", lost)
	}
	if lost := fence(20 * time.Second); len(lost) != 0 {
		t.Errorf("fenced twice: %v", lost)
	}
	wantCode(t, beat(1), core.CodeRunnerLost) // it must end its sandboxes, and register again
	if r = get(); !r.Fenced {
		t.Errorf("%+v", r)
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		fleet, err := tx.LoadedRunners(ctx, []core.RunnerID{d.runner})
		if len(fleet) != 0 {
			t.Errorf("a fenced runner is in the fleet: %+v", fleet)
		}
		return err
	})
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		r, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: d.info(), Endpoint: "unix:/x"}, time.Minute)
		if r.LeaseEpoch != 3 || r.Fenced || r.Endpoint != "unix:/x" {
			t.Errorf("registered again: %+v", r)
		}
		return err
	})
	wantCode(t, d.try(controller.System(), func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.HeartbeatRunner(ctx, core.NewID[core.RunnerID](), runnerapi.Heartbeat{LeaseEpoch: 1}, controller.BeatTerms{Lease: time.Minute})
		return err
	}), core.CodeRunnerNotFound)
}

// TestHeartbeatSays: the first statement of a heartbeat says which runners were removed lately, the latest first, whether its runner holds
// checkpoints, and whether it is drained.
func TestHeartbeatSays(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	beat := func(within time.Duration) (out controller.Beaten) {
		t.Helper()
		d.system(func(ctx context.Context, tx controller.AllTx) (err error) {
			r, err := tx.Runner(ctx, d.runner)
			if err == nil {
				terms := controller.BeatTerms{Lease: time.Minute, RemovedWithin: within}
				out, err = tx.HeartbeatRunner(ctx, d.runner, runnerapi.Heartbeat{LeaseEpoch: r.LeaseEpoch, Info: r.Info}, terms)
			}
			return err
		})
		return out
	}
	if got := beat(time.Hour); got.Holds || got.Draining || len(got.Removed) > 0 {
		t.Errorf("before: %+v", got)
	}
	first, second, old := core.NewID[core.RunnerID](), core.NewID[core.RunnerID](), core.NewID[core.RunnerID]()
	for _, id := range []core.RunnerID{old, first, second} {
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			_, _, err := tx.RemoveRunner(ctx, id)
			return err
		})
	}
	d.exec(`UPDATE runner_identities SET revoked_at = revoked_at - interval '2 hours' WHERE runner_id = '` + string(old) + `'`)
	from := d.template()
	cp := d.node(d.ready(d.project, from), from.ID)
	d.sealed(cp.ID)
	d.fetches(d.runner, cp.ID)
	d.exec(`UPDATE runners SET draining = true WHERE id = '` + string(d.runner) + `'`)
	if got := beat(time.Hour); !got.Holds || !got.Draining || !slices.Equal(got.Removed, []core.RunnerID{second, first}) {
		t.Errorf("%+v, want %v", got, []core.RunnerID{second, first})
	}
	d.fetches(d.runner)
	if got := beat(time.Hour); got.Holds {
		t.Error("it holds a checkpoint that it let go")
	}
}

func TestFleetCountsAllProjects(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	d.ready(d.project, from)
	gone := d.ready(d.newProject("other"), from)
	used := func(want runnerapi.Capacity) {
		t.Helper()
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			fleet, err := tx.LoadedRunners(ctx, []core.RunnerID{d.runner})
			if len(fleet) != 1 || fleet[0].Used != want {
				t.Errorf("%+v, want %+v", fleet, want)
			}
			return err
		})
	}
	used(runnerapi.Capacity{Sandboxes: 2, VCPUs: 2, MemoryMiB: 1024})
	for range 2 { // an end counts once
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			if err := tx.EndSandboxes(ctx, []core.SandboxID{gone.Sandbox.ID}); err != nil {
				return err
			}
			_, err := tx.EndWorkspaces(ctx, []controller.EndedWorkspace{{ID: gone.ID, To: core.WorkspaceLost, Failure: &controller.Failure{Code: core.CodeRunnerLost, Message: "gone"}}})
			return err
		})
		used(runnerapi.Capacity{Sandboxes: 1, VCPUs: 1, MemoryMiB: 512})
	}
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.LoadedRunners(ctx, []core.RunnerID{d.runner})
		list, err2 := tx.Workspaces(ctx, controller.WorkspaceFilter{Page: page(10)})
		if len(list) != 1 || err2 != nil {
			t.Errorf("afterwards the scope is the project's again: %d, %v", len(list), err2)
		}
		return err
	})
}

func TestHeldCheckpoints(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	from := d.template()
	w := d.ready(d.project, from)
	kept, gone := d.node(w, from.ID), d.node(w, from.ID)
	d.mine(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.DeleteCheckpoint(ctx, gone.ID, false)
		return err
	})
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		held, err := tx.HeldCheckpoints(ctx, d.runner, []core.CheckpointID{from.ID, kept.ID, gone.ID, core.NewID[core.CheckpointID]()})
		if len(held.Copies) != 2 || len(held.Deleted) != 1 || held.Deleted[0] != gone.ID {
			t.Errorf("held: %+v", held)
		}
		foreign, err2 := tx.HeldCheckpoints(ctx, core.NewID[core.RunnerID](), []core.CheckpointID{kept.ID})
		if len(foreign.Copies) != 0 || err2 != nil {
			t.Errorf("of another runner: %+v, %v", foreign, err2)
		}
		return err
	})
}

func TestImages(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	at := func(n int) time.Time { return time.Date(2026, 1, n, 0, 0, 0, 0, time.UTC) }
	image := func(name, content string, day int) runnerapi.Image {
		return runnerapi.Image{Name: name, Digest: core.DigestOf([]byte(content)), SizeBytes: 1, CreatedAt: at(day)}
	}
	set := func(images ...runnerapi.Image) {
		d.system(func(ctx context.Context, tx controller.AllTx) error { return tx.SetImages(ctx, d.runner, images) })
	}
	list := func() map[string]core.Digest {
		out := map[string]core.Digest{}
		d.mine(func(ctx context.Context, tx controller.AllTx) error { // images are published to every project
			images, err := tx.Images(ctx, page(10))
			for _, i := range images {
				out[i.Name] = i.Digest
				if len(i.Runners) != 1 || i.Runners[0] != d.runner {
					t.Errorf("%+v", i)
				}
			}
			return err
		})
		return out
	}
	old, rebuilt, demo := image("base", "old", 1), image("base", "new", 2), image("demo", "old", 1)
	set(old, demo)
	if diff := cmp.Diff(map[string]core.Digest{"base": old.Digest, "demo": old.Digest}, list()); diff != "" {
		t.Error(diff)
	}
	old.Name = ""
	set(old, rebuilt) // the name has moved on
	if diff := cmp.Diff(map[string]core.Digest{"base": rebuilt.Digest, "": old.Digest}, list()); diff != "" {
		t.Error(diff)
	}
	pulled := image("python-3-12", "pulled", 3)
	pulled.References = []string{"index.docker.io/library/python:3.12", "index.docker.io/library/python@" + string(pulled.Digest)}
	set(old, rebuilt, pulled)
	if diff := cmp.Diff(map[string]core.Digest{"base": rebuilt.Digest, "": old.Digest, "python-3-12": pulled.Digest}, list()); diff != "" {
		t.Error(diff)
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		for _, ref := range append(pulled.References, string(pulled.Digest)) {
			if found, err := tx.FindImage(ctx, ref); err != nil || found.Digest != pulled.Digest || found.Name != "python-3-12" {
				t.Errorf("%s: %+v, %v", ref, found, err)
			}
		}
		return nil
	})
	set(old, rebuilt) // another image may have the tag now
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		if found, err := tx.FindImage(ctx, pulled.References[0]); core.CodeOf(err) != core.CodeImageNotFound {
			t.Errorf("a reference of an image that is gone: %+v, %v", found, err)
		}
		return nil
	})
	set()
	if got := list(); len(got) != 0 {
		t.Errorf("%v", got)
	}
	var many []runnerapi.Image
	for i := range 20 { // more than are looked at: the name is that of the last one
		many = append(many, image("many", strconv.Itoa(i), i+1))
		set(many...)
	}
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		found, err := tx.FindImage(ctx, "many")
		if found.Digest != many[19].Digest {
			t.Errorf("the name is that of %+v", found)
		}
		return err
	})
}

// TestLoadsFollowRunners changes a runner in every way that decides whether it is offered, and how early.
func TestLoadsFollowRunners(t *testing.T) {
	t.Parallel()
	d := newDB(t)
	second := d.info()
	second.RunnerID = core.NewID[core.RunnerID]()
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: second, Endpoint: "http://127.0.0.1:2"}, time.Minute)
		return err
	})
	from := d.template()
	offered := func(f controller.EmptiestFilter, want ...core.RunnerID) {
		t.Helper()
		f.Limit = 10
		d.mine(func(ctx context.Context, tx controller.AllTx) error {
			list, err := tx.EmptiestRunners(ctx, f)
			got := make([]core.RunnerID, len(list))
			for i, r := range list {
				got[i] = r.Info.RunnerID
			}
			if !slices.Equal(got, want) {
				t.Errorf("%+v: %v, want %v", f, got, want)
			}
			return err
		})
	}
	all := controller.EmptiestFilter{}
	offered(all, slices.Sorted(slices.Values([]core.RunnerID{d.runner, second.RunnerID}))...)
	for range 7 { // more than a sixteenth of its 100
		d.ready(d.project, from)
	}
	offered(all, second.RunnerID, d.runner)
	other := d.class
	other.VMMVersion = "2"
	offered(controller.EmptiestFilter{Class: &d.class}, second.RunnerID, d.runner)
	offered(controller.EmptiestFilter{Class: &other})
	beat := func(capacity runnerapi.Capacity) {
		t.Helper()
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			r, err := tx.Runner(ctx, d.runner)
			if err != nil {
				return err
			}
			info := d.info()
			info.StartedAt, info.Capacity = r.Info.StartedAt, capacity
			_, err = tx.HeartbeatRunner(ctx, d.runner, runnerapi.Heartbeat{LeaseEpoch: r.LeaseEpoch, Info: info}, controller.BeatTerms{Lease: time.Minute})
			return err
		})
	}
	beat(runnerapi.Capacity{Sandboxes: 7})
	offered(controller.EmptiestFilter{NotFull: true}, second.RunnerID)
	offered(controller.EmptiestFilter{Fits: &core.Resources{VCPUs: 1000, MemoryMiB: 1}}, d.runner) // its processors are not limited
	beat(runnerapi.Capacity{})
	offered(controller.EmptiestFilter{NotFull: true}, slices.Sorted(slices.Values([]core.RunnerID{d.runner, second.RunnerID}))...)
	for _, on := range []bool{true, false} {
		d.system(func(ctx context.Context, tx controller.AllTx) error {
			_, err := tx.DrainRunner(ctx, second.RunnerID, on)
			return err
		})
		offered(controller.EmptiestFilter{Fresh: true}, map[bool][]core.RunnerID{true: {d.runner}, false: slices.Sorted(slices.Values([]core.RunnerID{d.runner, second.RunnerID}))}[on]...)
	}
	d.exec(`UPDATE runners SET lease_expires_at = now() - interval '1 hour' WHERE id = $1`, second.RunnerID)
	offered(controller.EmptiestFilter{Fresh: true}, d.runner)
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.FenceRunners(ctx, time.Minute, 10)
		return err
	})
	offered(all, d.runner)
	second.Class = other
	d.system(func(ctx context.Context, tx controller.AllTx) error {
		_, err := tx.RegisterRunner(ctx, runnerapi.Register{Info: second, Endpoint: "http://127.0.0.1:2"}, time.Minute)
		return err
	})
	offered(controller.EmptiestFilter{Class: &other}, second.RunnerID)
}
