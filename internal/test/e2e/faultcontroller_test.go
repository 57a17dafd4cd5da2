package e2e

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// children is how many a fork of a row has.
const children = 2

// forkAs asks one of the controllers for a fork of the base, under a key.
func (in *installation) forkAs(ctx context.Context, i int, key string) (coppice.ForkResult, error) {
	return in.controllers[i].client.ForkCheckpoint(coppice.WithIdempotencyKey(ctx, key), in.base(), coppice.ForkCheckpointRequest{Count: new(children), BranchName: key})
}

// forked is what a fork came to.
type forked struct {
	result coppice.ForkResult
	err    error
}

// beginFork is forkAs in the background. It outlives the row's part of the test.
func (in *installation) beginFork(t *testing.T, i int, key string) <-chan forked {
	t.Helper()
	done := make(chan forked, 1)
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 3*time.Minute)
	go func() {
		defer cancel()
		res, err := in.forkAs(ctx, i, key)
		done <- forked{res, err}
	}()
	return done
}

// checkFork wants a fork under a key to have been made once, with the state of the base, and ends its children.
func (in *installation) checkFork(t *testing.T, key string, told coppice.ForkResult) {
	t.Helper()
	again, err := in.forkAs(t.Context(), 0, key)
	if err != nil {
		t.Fatalf("the fork, asked for again: %v", err)
	}
	if diff := cmp.Diff(ids(told), ids(again)); diff != "" {
		t.Errorf("the fork, asked for again, has other children (-first +again):\n%s", diff)
	}
	all := in.sql(t, `SELECT id FROM workspaces WHERE name LIKE $1`, key+"-%")
	if len(told.Children) != children || len(all) != children {
		t.Errorf("one fork of %d has made the workspaces %q; the client was told of %q", children, all, ids(told))
	}
	for _, c := range told.Children {
		if c.Workspace == nil {
			t.Errorf("a child failed: %v", c.Problem.Err())
			continue
		}
		compare(t, "child "+c.Workspace.Name, after(in.first, in.acked[0].path...), look(t, in.host, c.Workspace.ID))
		terminate(t, in.host, c.Workspace.ID)
	}
}

func ids(r coppice.ForkResult) (out []string) {
	for _, c := range r.Children {
		if c.Workspace != nil {
			out = append(out, c.Workspace.ID)
		}
	}
	return out
}

// killControllerAt kills a controller at a step of a fork. The client repeats its request at the other: it is made once.
func killControllerAt(point string) func(*testing.T, *installation) {
	return func(t *testing.T, in *installation) {
		t.Helper()
		in.rearm(t, in.controllers[0], point+"=kill")
		key := strings.NewReplacer(".", "-", "_", "-").Replace(point)
		first, err := in.forkAs(t.Context(), 0, key)
		if err == nil {
			t.Fatalf("the controller was to be killed and has answered %+v", first)
		}
		<-in.controllers[0].ended
		told, err := in.forkAs(t.Context(), 1, key)
		if err != nil {
			t.Fatalf("repeated at the other controller: %v", err)
		}
		in.heal(t)
		in.checkFork(t, key, told)
	}
}

// killControllerAfterCheckpoint kills a controller that has committed a checkpoint and told nobody.
func killControllerAfterCheckpoint(t *testing.T, in *installation) {
	t.Helper()
	in.rearm(t, in.controllers[0], "controller.after_end=kill")
	ctx := coppice.WithIdempotencyKey(t.Context(), "after-end")
	req := coppice.CreateCheckpointRequest{Name: "after-end"}
	if c, err := in.controllers[0].client.CreateCheckpoint(ctx, in.parent, req); err == nil {
		t.Fatalf("the controller was to be killed and has answered %+v", c)
	}
	<-in.controllers[0].ended
	told, err := in.controllers[1].client.CreateCheckpoint(ctx, in.parent, req)
	if err != nil {
		t.Fatalf("repeated at the other controller: %v", err)
	}
	if all := in.sql(t, `SELECT id FROM checkpoints WHERE name = 'after-end'`); len(all) != 1 || all[0] != told.ID {
		t.Errorf("there are the checkpoints %q, the client was told of %s", all, told.ID)
	}
	in.acknowledge(told.ID)
}

// killControllerInReseal kills a controller while the runner stands still between the resume of a fork and its reseal.
func killControllerInReseal(t *testing.T, in *installation) {
	t.Helper()
	in.rearm(t, in.runner, "fork.connected=stop")
	in.awaitParent(t)
	const key = "in-reseal"
	first := in.beginFork(t, 0, key)
	in.runner.awaitStopped(t)
	in.controllers[0].kill()
	if ready := in.sql(t, `SELECT id FROM workspaces WHERE name LIKE $1 AND state = 'ready'`, key+"-%"); len(ready) > 0 {
		t.Errorf("%q are ready before their reseal", ready)
	}
	in.runner.signal(t, syscall.SIGCONT)
	told, err := in.forkAs(t.Context(), 1, key)
	if err != nil {
		t.Fatalf("repeated at the other controller: %v", err)
	}
	if got := <-first; got.err == nil {
		t.Errorf("a dead controller has answered %+v", got.result)
	}
	in.heal(t)
	in.checkFork(t, key, told)
}

// stopLeader stops a controller in the middle of a fork for longer than its operation's lease. The other one brings it to its end; when the
// first goes on, what it writes changes nothing.
func stopLeader(t *testing.T, in *installation) {
	t.Helper()
	for _, point := range []string{"controller.before_end", "controller.after_admission", "controller.in_admission"} {
		in.rearm(t, in.controllers[0], point+"=stop")
		key := "stopped-" + strings.ReplaceAll(strings.TrimPrefix(point, "controller."), "_", "-")
		first := in.beginFork(t, 0, key)
		in.controllers[0].awaitStopped(t)
		began := time.Now()
		told, err := in.forkAs(t.Context(), 1, key)
		if err != nil {
			t.Fatalf("%s: asked for at the other controller: %v", point, err)
		}
		t.Logf("%s: the other controller has made it after %.1f s", point, time.Since(began).Seconds())
		before := in.traces(t, key)
		in.controllers[0].signal(t, syscall.SIGCONT)
		got := <-first
		if got.err != nil && !errors.Is(got.err, coppice.CodeDatabaseUnavailable) {
			t.Errorf("%s: the client of the stopped controller was told %v", point, got.err)
		} else if got.err == nil {
			if diff := cmp.Diff(ids(told), ids(got.result)); diff != "" {
				t.Errorf("%s: the two controllers tell of other children (-other +stopped):\n%s", point, diff)
			}
		}
		// A second of its loops, in which it would write what it still has in mind.
		hold(time.Second)
		if diff := cmp.Diff(before, in.traces(t, key)); diff != "" {
			t.Errorf("%s: the stopped controller has changed what the other had made (-before +after):\n%s", point, diff)
		}
		in.checkFork(t, key, told)
	}
}

// traces are all rows that tell of a fork's children: what is changed twice shows in them.
func (in *installation) traces(t *testing.T, name string) []string {
	t.Helper()
	return in.sql(t, `
		SELECT w.id || ' ' || w.state || ' epoch ' || w.epoch || ' version ' || w.version FROM workspaces w WHERE w.name LIKE $1
		UNION ALL SELECT s.id || ' generation ' || s.generation || ' of ' || s.workspace_id FROM sandboxes s JOIN workspaces w ON w.id = s.workspace_id WHERE w.name LIKE $1
		UNION ALL SELECT 'reseal of ' || r.sandbox_id || ' ' || count(*) FROM reseal_reports r JOIN sandboxes s ON s.id = r.sandbox_id
			JOIN workspaces w ON w.id = s.workspace_id WHERE w.name LIKE $1 GROUP BY r.sandbox_id
		UNION ALL SELECT 'record ' || a.id || ': ' || a.object_id || ' ' || a.after FROM audit_records a JOIN workspaces w ON w.id = a.object_id WHERE w.name LIKE $1`, name+"-%")
}

// stormOfForks asks a full runner for more than it has room for: a few wait in line, all are told to come back or get in, and
// nothing half made is left.
func stormOfForks(t *testing.T, in *installation) {
	t.Helper()
	const storm, width = 8, 4 // of 12 places, one of which the parent has
	done := make(chan error, storm)
	made := make(chan coppice.WorkspaceID, storm*width)
	for i := range storm {
		go func() {
			res, err := in.controllers[i%2].client.ForkCheckpoint(t.Context(), in.base(), coppice.ForkCheckpointRequest{
				Count: new(width), BranchName: fmt.Sprintf("storm-%d", i), AllOrNothing: true,
			})
			for _, id := range ids(res) {
				made <- id
			}
			done <- err
		}()
	}
	admitted := 0
	for range storm {
		err := <-done
		var e *coppice.Error
		switch {
		case err == nil:
			admitted++
		case !errors.As(err, &e) || e.Status != 429 || e.Code != "CAPACITY":
			t.Errorf("a fork without room was told %v, want a 429", err)
		}
	}
	if admitted == 0 || admitted > 2 {
		t.Errorf("%d forks of %d got in, and there is room for 11 children", admitted, width)
	}
	if n := len(dirsIn(filepath.Join(in.files(), "shells"))); n != 1+admitted*width {
		t.Errorf("%d sandboxes are on the disk of %d children", n, admitted*width)
	}
	for range admitted * width {
		terminate(t, in.host, <-made)
	}
}
