package controller_test

import (
	"context"
	"maps"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// become restarts the fake runner as one of another class.
func (w *world) become(class runnerapi.RunnerClass) {
	w.t.Helper()
	w.runner.SetClass(class)
	w.register()
}

// TestOtherClass starts a runner again with another VMM, version, accelerator or CPU: whatever would load what was saved before is refused
// before anything is written or asked of the runner, by the name of the field, and works again once the runner is what it was.
func TestOtherClass(t *testing.T) {
	t.Parallel()
	changes := map[string]func(*runnerapi.RunnerClass){
		"arch":         func(c *runnerapi.RunnerClass) { c.Arch = "arm64" },
		"accelerator":  func(c *runnerapi.RunnerClass) { c.Accelerator = "kvm" },
		"vmm":          func(c *runnerapi.RunnerClass) { c.VMM = "another" },
		"vmm_version":  func(c *runnerapi.RunnerClass) { c.VMMVersion = "2" },
		"machine_type": func(c *runnerapi.RunnerClass) { c.MachineType = "fake-2" },
		"cpu_model":    func(c *runnerapi.RunnerClass) { c.CPUModel = "host:another" },
	}
	w := newWorld(t)
	ctx := t.Context()
	ready, asleep := w.create("ready"), w.create("asleep")
	cp := w.checkpoint(ready.ID)
	on := true
	if _, err := w.PatchWorkspace(ctx, w.project, asleep.ID, controller.WorkspacePatch{AutoResume: &on}); err != nil {
		t.Fatal(err)
	}
	w.suspend(asleep.ID)
	was := w.runner.Info().Class
	paths := map[string]func() error{
		"fork": func() error {
			_, err := w.ForkCheckpoint(ctx, w.project, cp.ID, controller.ForkRequest{Count: 2}, wait)
			return err
		},
		"restore as a workspace": func() error {
			_, err := w.RestoreCheckpoint(ctx, w.project, cp.ID, controller.ForkRequest{Name: "again"}, wait)
			return err
		},
		"restore in place": func() error {
			_, err := w.RestoreWorkspace(ctx, w.project, ready.ID, cp.ID, wait)
			return err
		},
		"resume": func() error {
			_, err := w.Resume(ctx, w.project, asleep.ID, wait)
			return err
		},
		"resume on use": func() error {
			_, err := w.Exec(ctx, w.project, asleep.ID, controller.ExecRequest{Command: []string{"true"}})
			return err
		},
	}
	written := func() int {
		return w.number(`SELECT (SELECT count(*) FROM operations) + (SELECT count(*) FROM workspaces) + (SELECT count(*) FROM sandboxes) + (SELECT count(*) FROM checkpoints)`)
	}
	rows, forks := written(), w.runner.Calls(runnertest.PointFork)
	for _, field := range slices.Sorted(maps.Keys(changes)) {
		other := was
		changes[field](&other)
		w.become(other)
		for path, try := range paths {
			err := try()
			if core.CodeOf(err) != core.CodeIncompatibleHost || !strings.Contains(core.MessageOf(err), field+" is ") || !strings.Contains(core.MessageOf(err), "start its runner again") {
				t.Errorf("%s after %s changed: %v", path, field, err)
			}
		}
	}
	if n, calls := written(), w.runner.Calls(runnertest.PointFork); n != rows || calls != forks {
		t.Errorf("%d rows were written and %d forks asked for by what was refused", n-rows, calls-forks)
	}
	if a, b := w.state(ready.ID), w.state(asleep.ID); a != core.WorkspaceReady || b != core.WorkspaceSuspended {
		t.Errorf("the workspaces are %s and %s", a, b)
	}
	w.become(was)
	for _, path := range []string{"fork", "restore as a workspace", "restore in place", "resume on use", "resume"} {
		if err := paths[path](); err != nil {
			t.Errorf("%s on the runner as it was: %v", path, err)
		}
	}
	w.consistent()
}

// TestTemplatesOfClasses: each class has templates of its own, and goes back to them.
func TestTemplatesOfClasses(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	templates := func() int { return w.number(`SELECT count(*) FROM checkpoints WHERE kind = 'template'`) }
	first := w.create("first")
	was := w.runner.Info().Class
	other := was
	other.VMM, other.VMMVersion = "another", "53.0"
	w.become(other)
	second := w.create("second")
	if first.Parent == second.Parent || templates() != 2 {
		t.Errorf("another class: parents %s and %s, %d templates", first.Parent, second.Parent, templates())
	}
	w.become(was)
	if third := w.create("third"); third.Parent != first.Parent || templates() != 2 {
		t.Errorf("back again: parents %s and %s, %d templates", first.Parent, third.Parent, templates())
	}
	w.consistent()
}

// TestClassChangesMeanwhile: a runner that comes back with another VMM while a workspace is being made refuses the template that was
// chosen; one of the new class is made.
func TestClassChangesMeanwhile(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	first := w.create("first")
	other := w.runner.Info().Class
	other.VMM = "another"
	var refused atomic.Bool
	w.runner.Hook(func(ctx context.Context, point, _ string) error {
		if point != runnertest.PointFork || refused.Swap(true) {
			return nil
		}
		w.runner.SetClass(other)
		if _, err := w.runner.Announce(ctx, w.Fleet()); err != nil {
			return err
		}
		return core.Errorf(core.FailedPrecondition, core.CodeIncompatibleHost, "its vmm is another")
	})
	second := w.create("second")
	if second.Parent == first.Parent || !refused.Load() {
		t.Errorf("both grow from %s", second.Parent)
	}
	w.runner.Hook(nil)
	w.register()
	w.consistent()
}
