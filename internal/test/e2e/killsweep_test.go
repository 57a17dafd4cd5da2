package e2e

import (
	"context"
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	coppice "github.com/coppice-dev/coppice/sdk/go"
)

// failpointsVariable arms failpoints in a server; see internal/failpoint.
const failpointsVariable = "COPPICE_FAILPOINTS"

// someKills are the points that every run of the tests kills the server at; with -long it is killed at all there are. At
// capture.paused and controller.before_end every run kills in TestFaultMatrix (2 and 24), at two others of a capture in TestSurvival.
var someKills = []string{"fork.resealed", "capture.published"}

// elsewhere says whether the work of TestKillSweep never reaches a point. Other tests stop or kill there.
func elsewhere(point string) bool {
	for _, family := range []string{
		"images.", "template.", "rebase.", "seal.", "fetch.", "roots.", "trash.",
		"controller.import_", "controller.after_condemn", "controller.after_delete",
	} {
		if strings.HasPrefix(point, family) {
			return true
		}
	}
	return strings.HasSuffix(point, "_port") || strings.HasSuffix(point, "_launch")
}

// failpoints asks the program for the names of its failpoints.
func (s *stack) failpoints(t *testing.T) []string {
	t.Helper()
	c := cli{t: t, s: s}
	cmd := c.command("image", "ls")
	cmd.Env = append(cmd.Env, failpointsVariable+"=absent=kill")
	out, err := cmd.CombinedOutput()
	_, list, ok := strings.Cut(string(out), "there are ")
	if err == nil || !ok {
		t.Fatalf("the program does not say which failpoints it has: %v\n%s", err, out)
	}
	list, _, _ = strings.Cut(strings.TrimSpace(list), "\n")
	return strings.Split(strings.TrimRight(list, ".\"}"), ", ")
}

// TestKillSweep kills a server with running machines at each step of a checkpoint and of a fork, starts it again without faults, and
// wants all to be well: the machine that was there goes on, whatever had been acknowledged is there and nothing that was not is half there, and
// every VMM on the host belongs to a workspace.
func TestKillSweep(t *testing.T) {
	s := newStack(t, "--listen", freeAddress(t), "--warm", "0", "--max-sandboxes", "16")
	points := someKills
	if *long {
		points = slices.DeleteFunc(s.failpoints(t), elsewhere)
	}
	parent, err := s.client.CreateWorkspace(t.Context(), coppice.CreateWorkspaceRequest{
		Name: "parent", Image: string(baseImage(t)), Resources: small(),
	})
	if err != nil {
		t.Fatal(err)
	}
	upload(t, s, parent.ID)
	k := &killSweep{s: s, parent: parent.ID, first: startWitness(t, s, parent.ID)}
	k.from = checkpoint(t, s, parent.ID).ID
	if k.client, err = coppice.New(coppice.Config{Server: s.server, Token: s.token}); err != nil {
		t.Fatal(err)
	}
	defer k.client.Close()
	for i, point := range points {
		if !t.Run(point, func(t *testing.T) { k.killAt(t, i, point) }) {
			return // the next would start from what this one left
		}
	}
}

type killSweep struct {
	s      *stack
	client *coppice.Client // outlives every server
	parent coppice.WorkspaceID
	from   coppice.CheckpointID
	first  sight
	path   []string // of the parent
}

// killAt does a checkpoint and a fork on a server that dies at a point.
func (k *killSweep) killAt(t *testing.T, i int, point string) {
	t.Helper()
	s := k.s
	s.kill(t)
	t.Setenv(failpointsVariable, point+"=kill")
	name := fmt.Sprintf("kill-%d", i)
	var captured coppice.Checkpoint
	var captureErr, forkErr error
	var forked coppice.ForkResult
	if err := s.tryStart(t); err == nil {
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
		defer cancel()
		var calls sync.WaitGroup
		calls.Go(func() {
			captured, captureErr = k.client.CreateCheckpoint(ctx, k.parent, coppice.CreateCheckpointRequest{Name: name})
		})
		calls.Go(func() {
			forked, forkErr = k.client.ForkCheckpoint(ctx, k.from, coppice.ForkCheckpointRequest{Count: new(2), BranchName: name})
		})
		calls.Wait()
		select {
		case <-s.ended:
		default:
			t.Errorf("the server did not come by this point: checkpoint %v, fork %v", captureErr, forkErr)
			s.kill(t)
		}
	}
	if err := os.Unsetenv(failpointsVariable); err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	s.start(t)
	k.awaitRest(t, began)
	k.checkParent(t, i)
	k.checkCapture(t, name, captured, captureErr)
	k.checkForks(t, name, forked, forkErr)
	k.checkHost(t)
}

// awaitRest wants nothing to be on its way after the start. Most of the time is the lease of what the dead server was doing, 8 s. How soon
// all is at rest is checked by TestFaultMatrix, whose other controller lives.
func (k *killSweep) awaitRest(t *testing.T, began time.Time) {
	t.Helper()
	until(t, "at rest after the start", func() (bool, error) {
		list, err := coppice.Collect(k.client.Workspaces(t.Context(), coppice.WorkspaceFilter{}))
		if err != nil || slices.ContainsFunc(list, moving) {
			return false, nil //nolint:nilerr // it is awaited
		}
		all, err := coppice.Collect(k.client.Checkpoints(t.Context(), coppice.CheckpointFilter{States: []coppice.CheckpointState{coppice.CheckpointCapturing}}))
		return err == nil && len(all) == 0, nil
	})
	t.Logf("at rest %.1f s after the start", time.Since(began).Seconds())
}

// checkParent wants the machine that ran before the crash to have gone on, and to do so.
func (k *killSweep) checkParent(t *testing.T, i int) {
	t.Helper()
	compare(t, "the parent", after(k.first, k.path...), look(t, k.s, k.parent))
	k.path = append(k.path, fmt.Sprint(i))
	compare(t, "the parent, a step on", after(k.first, k.path...), step(t, k.s, k.parent, fmt.Sprint(i)))
}

// checkCapture wants an acknowledged checkpoint to be there and to have the parent's state, and another to be whole or absent.
func (k *killSweep) checkCapture(t *testing.T, name string, told coppice.Checkpoint, toldErr error) {
	t.Helper()
	there, err := coppice.Collect(k.client.Checkpoints(t.Context(), coppice.CheckpointFilter{Name: name}))
	if err != nil {
		t.Fatal(err)
	}
	if told.ID != "" && (len(there) != 1 || there[0].ID != told.ID) {
		t.Errorf("checkpoint %s was acknowledged, and there are %+v", told.ID, there)
	}
	var e *coppice.Error
	if errors.As(toldErr, &e) && e.Status == 0 && len(there) > 0 {
		t.Errorf("the checkpoint was said to have failed (%v), and is there", e)
	}
	for _, c := range there {
		child := forkOne(t, k.s, c.ID)
		compare(t, "a fork of the checkpoint", after(k.first, k.path[:len(k.path)-1]...), look(t, k.s, child))
		terminate(t, k.s, child)
		if err := k.client.DeleteCheckpoint(t.Context(), c.ID); err != nil {
			t.Error(err)
		}
	}
	t.Logf("checkpoint: told %q, %v; %d there", told.ID, toldErr, len(there))
}

// checkForks wants acknowledged children to run, with the state of their checkpoint and names of their own, and no half ones.
func (k *killSweep) checkForks(t *testing.T, name string, told coppice.ForkResult, toldErr error) {
	t.Helper()
	var ready []coppice.Workspace
	for i := range 2 {
		list, err := coppice.Collect(k.client.Workspaces(t.Context(), coppice.WorkspaceFilter{
			Name: fmt.Sprintf("%s-%d", name, i+1), States: []coppice.WorkspaceState{coppice.WorkspaceReady},
		}))
		if err != nil || len(list) > 1 {
			t.Fatalf("%d children of one name: %v", len(list), err)
		}
		ready = append(ready, list...)
	}
	if errors.Is(toldErr, coppice.CodeForkFailed) && len(ready) > 0 {
		t.Errorf("the fork was said to have failed (%v), and %d children are ready", toldErr, len(ready))
	}
	for _, c := range told.Children {
		if c.Problem == nil && !slices.ContainsFunc(ready, func(w coppice.Workspace) bool { return w.ID == c.Workspace.ID }) {
			t.Errorf("%s was acknowledged, and is not ready", c.Workspace.ID)
		}
	}
	seen := map[string]bool{}
	for _, w := range ready {
		compare(t, "child "+w.Name, after(k.first), look(t, k.s, w.ID))
		for v := range strings.FieldsSeq(execute(t, k.s, w.ID, "cat", "/proc/sys/kernel/random/uuid", "/etc/machine-id", "/etc/hostname")) {
			if seen[v] {
				t.Errorf("both children have %s", v)
			}
			seen[v] = true
		}
		terminate(t, k.s, w.ID)
	}
	t.Logf("fork: told of %d children, %v; %d ready", len(told.Children), toldErr, len(ready))
}

// checkHost wants one VMM, the parent's.
func (k *killSweep) checkHost(t *testing.T) {
	t.Helper()
	until(t, "only the parent's VMM runs", func() (bool, error) { return len(k.s.vmms()) == 1, nil })
	k.s.mustMachine(t, k.parent)
}
