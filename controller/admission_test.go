package controller_test

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/coppice-dev/coppice/api/runnerapi"
	"github.com/coppice-dev/coppice/controller"
	"github.com/coppice-dev/coppice/controller/runnertest"
	"github.com/coppice-dev/coppice/core"
)

// crowded is a world whose runner has room for a few sandboxes and is full.
func crowded(t *testing.T, room int, options ...option) (*world, controller.Checkpoint, []controller.Workspace) {
	t.Helper()
	options = append([]option{func(c *controller.Config, rc *runnertest.Config) {
		c.AdmissionWait, rc.Capacity = wait, runnerapi.Capacity{Sandboxes: room}
	}}, options...)
	w := newWorld(t, options...)
	ws := w.create("main")
	cp := w.checkpoint(ws.ID)
	there := []controller.Workspace{ws}
	if room > 1 {
		there = append(there, w.fork(cp.ID, room-1)...)
	}
	return w, cp, there
}

func (w *world) waiting(n int) {
	w.t.Helper()
	ctx, cancel := context.WithTimeout(w.t.Context(), wait)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for w.Waiting() != n {
		select {
		case <-ctx.Done():
			w.t.Fatalf("%d requests wait, not %d", w.Waiting(), n)
		case <-tick.C:
		}
	}
}

// TestAdmissionWaits lets a storm of forks onto a full runner: as others end, all of it gets in, one after the other and no more
// at once than there is room for.
func TestAdmissionWaits(t *testing.T) {
	t.Parallel()
	const room, storm = 4, 24
	w, cp, there := crowded(t, room)
	var group sync.WaitGroup
	grown := make(chan core.WorkspaceID, storm)
	for range storm {
		group.Go(func() { grown <- w.fork(cp.ID, 1)[0].ID })
	}
	w.waiting(storm)
	if n := w.number(`SELECT count(*) FROM sandboxes WHERE ended_at IS NULL`); n != room {
		t.Errorf("%d sandboxes are allocated while all wait", n)
	}
	w.end(there[0].ID)
	for range storm {
		id := <-grown
		if n := w.number(`SELECT count(*) FROM sandboxes WHERE ended_at IS NULL`); n > room {
			t.Errorf("%d sandboxes on a runner with room for %d", n, room)
		}
		w.end(id)
	}
	group.Wait()
	w.waiting(0)
	w.consistent()
}

// TestAdmissionIsExact has more forks choose a runner at the same moment than it has room for: those that come too late are told
// so, or wait, and no fork gets as far as the runner to fail there.
func TestAdmissionIsExact(t *testing.T) {
	t.Parallel()
	const room, width, storm = 6, 2, 8
	w, cp, _ := crowded(t, 1, func(c *controller.Config, rc *runnertest.Config) {
		c.AdmissionWait, rc.Capacity = -1, runnerapi.Capacity{Sandboxes: room}
	})
	var group sync.WaitGroup
	results := make(chan error, storm)
	for range storm {
		group.Go(func() {
			_, err := w.ForkCheckpoint(t.Context(), w.project, cp.ID, controller.ForkRequest{Count: width}, wait)
			results <- err
		})
	}
	group.Wait()
	close(results)
	admitted := 0
	for err := range results {
		if err == nil {
			admitted++
		} else if core.CodeOf(err) != core.CodeCapacity {
			t.Errorf("a fork without room: %v", err)
		}
	}
	if admitted != (room-1)/width {
		t.Errorf("%d forks of %d were admitted to %d places", admitted, width, room-1)
	}
	w.consistent()
}

// TestAdmissionIsFair has one project storm and another ask once: it has its turn after the request that is next.
func TestAdmissionIsFair(t *testing.T) {
	t.Parallel()
	w, cp, there := crowded(t, 1)
	var other controller.Project
	if err := w.store.InTx(t.Context(), controller.System(), func(tx controller.AllTx) error {
		var err error
		other, err = tx.EnsureProject(t.Context(), core.NewID[core.ProjectID](), "other")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	admitted := make(chan string, 10)
	ask := func(project core.ProjectID, name string) {
		group.Go(func() {
			// The template belongs to all: both projects wait for the one runner that has its bytes.
			a, err := w.RestoreCheckpoint(t.Context(), project, cp.Root, controller.ForkRequest{Count: 1, Name: name}, wait)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				return
			}
			admitted <- name
			if _, err := w.Terminate(t.Context(), project, a.Result.Workspace.ID, wait); err != nil {
				t.Errorf("%s: %v", name, err)
			}
		})
	}
	for i := range 5 {
		ask(w.project, fmt.Sprintf("storm-%d", i))
		w.waiting(i + 1)
	}
	ask(other.ID, "once")
	w.waiting(6)
	w.end(there[0].ID)
	var order []string
	for range 6 {
		order = append(order, <-admitted)
	}
	group.Wait()
	if at := slices.Index(order, "once"); at > 2 || order[0] != "storm-0" {
		t.Errorf("they were admitted in the order %v", order)
	}
	w.waiting(0)
}

// TestAdmissionIsBounded refuses what would wait too long, what need not wait, and what too many wait before.
func TestAdmissionIsBounded(t *testing.T) {
	t.Parallel()
	const bound = time.Second
	w, cp, there := crowded(t, 2, func(c *controller.Config, _ *runnertest.Config) { c.AdmissionQueue = 2 })
	ctx := t.Context()
	ask := func(ctx context.Context, c *controller.Controller, n int, wait time.Duration) (time.Duration, error) {
		start := time.Now()
		_, err := c.ForkCheckpoint(ctx, w.project, cp.ID, controller.ForkRequest{Count: n, Name: "late"}, wait)
		return time.Since(start), err
	}
	hasty, _ := w.start(controller.Config{AdmissionWait: bound})
	took, err := ask(ctx, hasty, 1, wait)
	wantCode(t, err, core.CodeCapacity)
	if took < bound {
		t.Errorf("it was refused after %s", took)
	}
	if !strings.Contains(core.MessageOf(err), "not enough sandboxes") {
		t.Errorf("it does not say what there is too little of: %v", err)
	}
	for name, c := range map[string]struct {
		n    int
		wait time.Duration
	}{"more than there ever is": {3, wait}, "a request that does not wait": {1, 0}} {
		took, err := ask(ctx, w.Controller, c.n, c.wait)
		wantCode(t, err, core.CodeCapacity)
		if took >= wait {
			t.Errorf("%s: refused after %s", name, took)
		}
	}
	gone, cancel := context.WithCancel(ctx)
	ended := make(chan error, 2)
	for range cap(ended) {
		go func() {
			_, err := ask(gone, w.Controller, 1, wait)
			ended <- err
		}()
	}
	w.waiting(2)
	if took, err := ask(ctx, w.Controller, 1, wait); core.CodeOf(err) != core.CodeCapacity || took >= wait {
		t.Errorf("behind a full queue: %v after %s", err, took)
	}
	cancel()
	for range cap(ended) {
		wantCode(t, <-ended, core.CodeCanceled)
	}
	w.waiting(0)
	w.end(there[0].ID)
	if n := w.number(`SELECT count(*) FROM workspaces WHERE name = 'late'`); n != 0 {
		t.Error("who has gone was admitted")
	}
	w.consistent()
}
