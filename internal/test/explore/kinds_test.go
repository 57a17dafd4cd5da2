package explore

import (
	"context"
	"errors"
	"fmt"

	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/grants"
	"github.com/coppice-dev/coppice/controller/retention"
	"github.com/coppice-dev/coppice/core"
	"github.com/coppice-dev/coppice/egress/grant"
	"github.com/coppice-dev/coppice/guestagent/guestapi"
	"github.com/coppice-dev/coppice/runner/vmm/fakevmm"
)

// scene is what operations act on: a workspace with two checkpoints, of which the second grew from the first.
type scene struct {
	workspace  core.WorkspaceID
	older      core.CheckpointID
	checkpoint core.CheckpointID
	image      core.CheckpointID // the template that all grew from
}

// reply is what a controller told whoever asked it for something.
type reply struct {
	kind      string
	operation core.OperationID // empty: it was none
	done      bool             // the reply says how the operation has ended; else it was accepted
	err       error
	result    controller.Result
}

// kind is something that a controller can be asked for.
type kind struct {
	name string
	// asleep has the workspace suspended before, and unsealed has nothing sealed.
	asleep, unsealed bool
	// fault goes wrong with a machine, once. Such a kind does not happen meanwhile.
	fault *fakevmm.Fault
	do    func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error)
}

var small = core.Resources{VCPUs: 1, MemoryMiB: core.MinMemoryMiB, DiskGiB: 1}

// What goes wrong with machines.
var (
	unproven = &fakevmm.Fault{Step: fakevmm.ResealStep(guestapi.StepMachineID), Kind: fakevmm.Lie, Times: 1}
	unsaved  = &fakevmm.Fault{Step: fakevmm.StepSave, Kind: fakevmm.Fail, Times: 1}
)

// allowed is what workspaces with grants may reach.
const allowed = "api.example.com"

var kinds = []kind{
	{name: "create", do: func(ctx context.Context, w *world, c *controller.Controller, _ scene) (controller.Answer, error) {
		return c.CreateWorkspace(ctx, w.project, controller.CreateRequest{Resources: small}, patience)
	}},
	{name: "fork", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.ForkCheckpoint(ctx, w.project, s.checkpoint, controller.ForkRequest{Count: 2}, patience)
	}},
	{name: "fork-all-or-nothing", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.ForkCheckpoint(ctx, w.project, s.checkpoint, controller.ForkRequest{Count: 2, AllOrNothing: true}, patience)
	}},
	{name: "fork-workspace", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.ForkWorkspace(ctx, w.project, s.workspace, controller.CheckpointRequest{}, controller.ForkRequest{Count: 2}, patience)
	}},
	{name: "restore", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.RestoreWorkspace(ctx, w.project, s.workspace, s.older, patience)
	}},
	{name: "suspend", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.Suspend(ctx, w.project, s.workspace, patience)
	}},
	{name: "resume", asleep: true, do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.Resume(ctx, w.project, s.workspace, patience)
	}},
	{name: "checkpoint", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.CreateCheckpoint(ctx, w.project, s.workspace, controller.CheckpointRequest{}, patience)
	}},
	{name: "terminate", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.Terminate(ctx, w.project, s.workspace, patience)
	}},
	{name: "delete", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return controller.Answer{Done: true}, c.DeleteCheckpoint(ctx, w.project, s.older)
	}},
	{name: "prune", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.PruneCheckpoints(ctx, w.project, s.image, controller.RetentionPolicy{Policy: retention.Policy{MaxBytes: 1}}, false, patience)
	}},
	{name: "grant", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		_, _, err := c.Grants().Put(ctx, w.project, s.workspace, "new", grants.Request{Secret: grant.NewSecret("new secret"), Hosts: []string{allowed}})
		return controller.Answer{Done: true}, err
	}},
	{name: "revoke", do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return controller.Answer{Done: true}, c.Grants().Revoke(ctx, w.project, s.workspace, "old")
	}},
	{name: "seal", unsealed: true, do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		if !w.sealing.Swap(true) { // what there is
			w.asksSeals.Store(true)
			w.seal()
			w.within(patience, func() bool { return w.number(`SELECT count(*) FROM checkpoints WHERE state = 'captured'`) == 0 })
			return controller.Answer{Done: true}, nil
		}
		a, err := c.CreateCheckpoint(ctx, w.project, s.workspace, controller.CheckpointRequest{}, patience)
		if err != nil || !a.Done {
			return a, err
		}
		// It reads the row again and again while the runner stands still: the explorer would take that for progress.
		_, err = c.SealedCheckpoint(context.WithValue(ctx, asked{}, nil), w.project, a.Result.Checkpoint.ID, patience)
		return controller.Answer{Done: true}, err
	}},
	{name: "fork-all-or-nothing-failing", fault: unproven, do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.ForkCheckpoint(ctx, w.project, s.checkpoint, controller.ForkRequest{Count: 2, AllOrNothing: true}, patience)
	}},
	{name: "restore-failing", fault: unproven, do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.RestoreWorkspace(ctx, w.project, s.workspace, s.older, patience)
	}},
	{name: "resume-failing", asleep: true, fault: unproven, do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.Resume(ctx, w.project, s.workspace, patience)
	}},
	{name: "checkpoint-failing", fault: unsaved, do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.CreateCheckpoint(ctx, w.project, s.workspace, controller.CheckpointRequest{}, patience)
	}},
	{name: "suspend-failing", fault: unsaved, do: func(ctx context.Context, w *world, c *controller.Controller, s scene) (controller.Answer, error) {
		return c.Suspend(ctx, w.project, s.workspace, patience)
	}},
	{name: fencing, do: func(_ context.Context, w *world, c *controller.Controller, _ scene) (controller.Answer, error) {
		w.silent.Store(true)
		w.hearing.Lock()  // when no report is under way
		w.sides[1].stop() // it would give the runner up, too
		w.hearing.Unlock()
		w.sql(`UPDATE runners SET lease_expires_at = now() - interval '1 day'`)
		w.goRun("the controller that gives up", c.Run)
		w.within(patience, func() bool {
			return !w.silent.Load() || w.number(`SELECT count(*) FROM runners WHERE fenced_at IS NULL`) == 0 &&
				w.number(`SELECT count(*) FROM workspaces w JOIN sandboxes s ON s.id = w.sandbox_id WHERE w.ended_at IS NULL AND s.ended_at IS NULL`) == 0
		})
		w.heard()
		return controller.Answer{Done: true}, nil
	}},
	{name: "drain", do: func(ctx context.Context, w *world, c *controller.Controller, _ scene) (controller.Answer, error) {
		_, err := c.Fleet().Drain(ctx, w.runner.ID(), true)
		return controller.Answer{Done: true}, err
	}},
}

func kindOf(name string) (kind, bool) {
	for _, k := range kinds {
		if k.name == name {
			return k, true
		}
	}
	return kind{}, false
}

// heard ends the silence of a runner that is to be given up, and the stop of whoever would have done it instead.
func (w *world) heard() {
	w.silent.Store(false)
	w.sides[1].goOn()
}

// ask has a controller do something. The reply comes when it has ended, or when it cannot say so itself.
func (w *world) ask(c *controller.Controller, k kind, s scene) <-chan reply {
	out := make(chan reply, 1)
	if k.fault != nil {
		w.disarm = w.driver.Arm(*k.fault)
	}
	go func() {
		a, err := k.do(context.WithValue(w.t.Context(), asked{}, true), w, c, s)
		r := reply{kind: k.name, operation: a.Operation.ID, done: a.Done, err: err, result: a.Result}
		if failed, ok := errors.AsType[*controller.OperationError](err); ok {
			r.operation, r.done = failed.Operation, true
		}
		w.log.note("%s was answered: operation %q, done %v, error %v", k.name, r.operation, r.done, err)
		out <- r
	}()
	return out
}

// set builds the scene, through the first controller.
func (w *world) set(k kind) (scene, error) {
	var s scene
	ctx := w.t.Context()
	project, err := w.first.Tenancy.CreateProject(ctx, w.admin, fmt.Sprintf("explored-%d", len(w.played)), controller.QuotasPatch{}, controller.EncryptionPatch{})
	if err != nil {
		return s, err
	}
	w.project = project.ID
	main := controller.CreateRequest{Name: "main", Resources: small}
	if w.granting {
		main.Allow = []string{allowed}
	}
	a, err := w.first.CreateWorkspace(ctx, w.project, main, patience)
	if err != nil {
		return s, err
	}
	w.owner = w.strings(`SELECT DISTINCT lease_owner FROM operations WHERE lease_owner IS NOT NULL AND project_id = $1`, w.project)[0]
	s.workspace, s.image = a.Result.Workspace.ID, a.Result.Workspace.Parent
	if w.granting {
		if _, _, err := w.first.Grants().Put(ctx, w.project, s.workspace, "old", grants.Request{Secret: grant.NewSecret("old secret"), Hosts: []string{allowed}}); err != nil {
			return s, err
		}
	}
	for _, id := range []*core.CheckpointID{&s.older, &s.checkpoint} {
		a, err := w.first.CreateCheckpoint(ctx, w.project, s.workspace, controller.CheckpointRequest{}, patience)
		if err != nil {
			return s, err
		}
		*id = a.Result.Checkpoint.ID
	}
	if k.asleep {
		if _, err := w.first.Suspend(ctx, w.project, s.workspace, patience); err != nil {
			return s, err
		}
	}
	if !k.unsealed { // not before: a checkpoint that no row says is captured waits for a second
		w.sealing.Store(true)
		w.seal()
		w.settle()
	}
	w.beat()
	w.log.note("the scene is set")
	if k.name == fencing {
		w.sides[0] = &side{fences: true}
		var err error
		w.first, _, err = w.control(w.sides[0], leaseTime)
		return s, err
	}
	return s, nil
}
